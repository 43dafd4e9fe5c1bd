"""No request holds the event loop of a target for more than 5 ms of CPU time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.measured_target import BLOCK_TOKENS, CONTEXT, TOKEN, VOCAB
from tests.fakes.processes import service_process
from tests.fakes.turns import FILE, Turns, too_long
from tests.fakes.verify_items import slice_of, verify

PROMPT = [index * 7919 % VOCAB for index in range(CONTEXT - 50)]
CACHED = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Sessions:
    """Sessions of the longest prompts, each a new one."""

    def __init__(self, target: rpc.TargetAsyncStub) -> None:
        self._target = target
        self._numbers = count(1)

    async def begin(self, prompt: list[int]) -> tuple[str, int]:
        """Return the id of a session that has confirmed a token, and how many tokens it found cached."""
        number = next(self._numbers)
        named = slice_of(prompt, session_id=f"s{number}", arrival_ns=number, max_position=CONTEXT)
        (answer,) = await verify(self._target, pb.VerifyItem(slice=named))
        assert answer.result.tokens == [TOKEN], answer
        return named.session_id, answer.result.kv_reused

    async def cached(self) -> None:
        _, reused = await self.begin(PROMPT)
        assert reused == CACHED

    async def uncached(self) -> None:
        """Begin with another token than any session before: its blocks are those of an idle session."""
        _, reused = await self.begin([next(self._numbers), *PROMPT[1:]])
        assert reused == 0

    async def resumed(self) -> None:
        """Send the rest of a prompt to a replica that has only the blocks before it."""
        session_id, _ = await self.begin(PROMPT[:1000])
        named = slice_of(PROMPT, start=900, session_id=session_id, max_position=CONTEXT)
        (answer,) = await verify(self._target, pb.VerifyItem(slice=named))
        assert answer.result.kv_reused == CACHED

    async def refused(self) -> None:
        named = slice_of([*PROMPT[:-1], VOCAB], max_position=CONTEXT)
        (answer,) = await verify(self._target, pb.VerifyItem(slice=named))
        assert f"slice.tokens[{len(PROMPT) - 1}]" in answer.status.message


@asynccontextmanager
async def measured(turns_at: Path) -> AsyncIterator[Sessions]:
    log, environment = turns_at.with_suffix(".log"), {FILE: str(turns_at)}
    flags = {"max-rows": "4096", "max-sessions": "2", "max-itl-ms": "0", "port": "0"}
    async with (
        service_process("tests.fakes.measured_target", log, environment, flags) as ready,
        grpc.aio.insecure_channel(ready["address"]) as channel,
    ):
        yield Sessions(rpc.TargetStub(channel))


async def test_no_turn_takes_more_than_five_milliseconds(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns")
    async with measured(tmp_path / "turns") as sessions:
        await sessions.begin(PROMPT)
        cases = (sessions.cached, sessions.resumed, sessions.refused, sessions.uncached)
        found = {case.__name__: await too_long(turns, case) for case in cases}
    assert not any(found.values()), found
