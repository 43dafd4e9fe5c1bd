"""The point at which a stream is resumed, and the check of what its client has seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from galley.client.errors import GalleyRpcError
from galley.client.result import Output
from galley.client.streams import AsyncStream, ResumePoint
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb


class Broken(grpc.aio.AioRpcError):
    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away")


async def chunk_then_break(*chunks: tuple[int, list[int]]) -> AsyncIterator[pb.ResumeResponse]:
    for index, tokens in chunks:
        yield pb.ResumeResponse(event=pb.StreamEvent(chunk=pb.Chunk(index=index, token_ids=tokens)))
    raise Broken


GIVEN = ResumePoint("5e" * 16, 2, b"h" * 16)


@pytest.mark.parametrize(
    ("chunks", "seen", "resumed_at"),
    [
        ((), [], GIVEN),
        (((2, [7]),), [], ResumePoint(GIVEN.session_id, 3, b"")),
        (((2, [7]),), [5, 6], ResumePoint(GIVEN.session_id, 3, prefix_hash([5, 6, 7]))),
    ],
    ids=["before a token", "earlier tokens unknown", "all tokens known"],
)
async def test_a_repeated_resume_checks_what_is_known(
    chunks: tuple[tuple[int, list[int]], ...], seen: list[int], resumed_at: ResumePoint
) -> None:
    stream = AsyncStream(cast("Any", chunk_then_break(*chunks)), GIVEN, Output(tokens=seen))
    with pytest.raises(GalleyRpcError):
        async for _ in stream:
            pass
    assert stream.resume_from() == resumed_at
