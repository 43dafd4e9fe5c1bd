"""Stored sessions that are changed under a stream: a repair or an error, and never a wrong token."""

from __future__ import annotations

import grpc
import pytest

from galley.client.client import AsyncStream, GalleyRpcError
from tests.fakes.changed_logs import CHANGES, REPAIRED, change
from tests.fakes.redis_servers import Server
from tests.fakes.truth import true_output
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, Received, World, must_be_true

RECEIVED = 8


async def end_of(received: Received, stream: AsyncStream) -> grpc.StatusCode:
    """Read to the end, or to the error."""
    try:
        await received.listen(stream)
    except GalleyRpcError as error:
        return error.code
    must_be_true(received)
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", CHANGES)
async def test_changed_data_end_a_stream_or_are_repaired(
    world: World, shared_store: Server, name: str
) -> None:
    gateway, other = [await world.gateway(draft="none", store_timeout_s=0.5) for _ in range(2)]
    stream, received = await world.held(gateway, RECEIVED)
    await world.target.waits_after(RECEIVED)
    async with shared_store.raw() as raw:
        await change(raw, stream.session_id, name)
    world.target.gate.open()
    truth = true_output(PROMPT_TOKENS, MAX_TOKENS)
    assert await end_of(received, stream) in {grpc.StatusCode.OK, grpc.StatusCode.DATA_LOSS}
    assert received.tokens == truth[: len(received.tokens)]
    again = Received()
    code = await end_of(again, other.client.resume(stream.session_id))
    if name in REPAIRED:
        assert code is grpc.StatusCode.OK
    else:
        assert code is grpc.StatusCode.DATA_LOSS
        assert not again.tokens
