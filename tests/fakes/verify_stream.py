"""A client of VerifyStream that writes and reads as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

_TIMEOUT_S = 20
_NOBODY = "nobody"


class Stream:
    """One VerifyStream; all waiting ends after some seconds."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._read: list[pb.VerifyAnswer] = []

    async def send(
        self,
        *items: pb.VerifyItem,
        cancelled: Sequence[pb.ItemRef] = (),
        extensions: Sequence[pb.Extension] = (),
    ) -> None:
        await self.call.write(pb.VerifyStreamRequest(items=items, cancelled=cancelled, extensions=extensions))

    async def next(self) -> pb.VerifyAnswer:
        """The next answer of any item."""
        if not self._read:
            await self._receive()
        return self._read.pop(0)

    async def _receive(self) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await self.call.read()
        assert isinstance(response, pb.VerifyStreamResponse), "the stream has ended"
        self._read += response.answers

    async def heard(self) -> None:
        """Return once the target has taken all that was sent: it refuses what comes last, and says so."""
        await self.send(pb.VerifyItem(slice=pb.SessionSlice(session_id=_NOBODY)))
        while not any(answer.session_id == _NOBODY for answer in self._read):
            await self._receive()
        self._read = [answer for answer in self._read if answer.session_id != _NOBODY]

    async def until_last(self) -> list[pb.VerifyAnswer]:
        """All answers up to one that nothing follows."""
        answers = [await self.next()]
        while answers[-1].result.more:
            answers.append(await self.next())
        return answers


@asynccontextmanager
async def stream_of(target: rpc.TargetAsyncStub) -> AsyncIterator[Stream]:
    """A stream that is cancelled at the end."""
    call = target.VerifyStream()
    try:
        yield Stream(call)
    finally:
        call.cancel()


def extension(tokens: Sequence[int], draft: Sequence[int] | None = None, **given: Any) -> pb.Extension:
    """Of the item that `slice_of` makes: a hint after `tokens`, if any."""
    fields: dict[str, Any] = {"session_id": "s", "request_id": 7}
    made = pb.Extension(**(fields | given))
    if draft is not None:
        made.hint.CopyFrom(pb.Hint(position=len(tokens), prefix_hash=prefix_hash(tokens), draft_tokens=draft))
    return made


def tokens_of(answers: Sequence[pb.VerifyAnswer]) -> list[int]:
    return [token for answer in answers for token in answer.result.tokens]
