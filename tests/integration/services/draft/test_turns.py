"""No request holds the event loop of a draft for more than 5 ms of CPU time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc

from galley.common.server.reading import PART_TOKENS
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.strategies.base import NoneStrategy
from tests.fakes.processes import service_process
from tests.fakes.turns import FILE, Turns, too_long
from tests.fakes.verify_items import slice_of
from tests.integration.services.draft.steps import Stream, item, serving

CONTEXT, K = 1 << 17, 4
PROMPT = [index % 50_000 for index in range(CONTEXT - 50)]
FOLLOWING = [(PROMPT[-1] + 1 + index) % 50_000 for index in range(K)]


class Sessions:
    """Sessions of the longest prompts, each a new one."""

    def __init__(self, draft: rpc.DraftAsyncStub) -> None:
        self._draft = draft
        self._numbers = count(1)

    async def _propose(self, tokens: list[int], start: int = 0) -> pb.ProposeAnswer:
        named = slice_of(tokens, start=start, session_id=f"s{next(self._numbers)}", max_position=CONTEXT)
        request = pb.ProposeRequest(items=[pb.ProposeItem(slice=named, k=K)])
        return (await self._draft.Propose(request)).answers[0]

    async def new(self) -> None:
        answer = await self._propose(PROMPT)
        assert answer.result.draft_tokens == FOLLOWING, answer

    async def missed(self) -> None:
        answer = await self._propose(PROMPT, start=1)
        assert answer.HasField("cache_miss"), answer


@asynccontextmanager
async def measured(turns_at: Path) -> AsyncIterator[Sessions]:
    log, environment = turns_at.with_suffix(".log"), {FILE: str(turns_at)}
    flags = {"max-kv-tokens": str(2 * CONTEXT), "max-sessions": "4", "port": "0"}
    async with (
        service_process("tests.fakes.measured_draft", log, environment, flags) as ready,
        grpc.aio.insecure_channel(ready["address"]) as channel,
    ):
        yield Sessions(rpc.DraftStub(channel))


async def test_no_turn_takes_more_than_five_milliseconds(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns")
    async with measured(tmp_path / "turns") as sessions:
        cases = (sessions.new, sessions.missed)
        found = {case.__name__: await too_long(turns, case) for case in cases}
    assert not any(found.values()), found


async def test_what_comes_while_a_long_prompt_is_read_follows_it() -> None:
    async with serving(NoneStrategy(), max_tokens=CONTEXT) as draft:
        stream = Stream(draft.stub)
        long = item([index % 32 for index in range(3 * PART_TOKENS)], 4, "s", max_position=CONTEXT)
        newer = item([1, 2, 3], 4, "s", request_id=8)
        await stream.send(long, newer)
        answers = [await stream.next(), await stream.next()]
    assert [answer.request_id for answer in answers] == [long.slice.request_id, 8]
    assert answers[1].HasField("result"), answers


async def test_a_token_that_a_long_prompt_may_not_have_is_named() -> None:
    async with serving(NoneStrategy(), max_tokens=CONTEXT) as draft:
        tokens = [1] * 2 * PART_TOKENS + [1 << 31]
        request = pb.ProposeRequest(items=[item(tokens, 4, "s", max_position=CONTEXT)])
        [answer] = (await draft.stub.Propose(request)).answers
    assert answer.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answer.status.message.startswith(f"slice.tokens[{2 * PART_TOKENS}]: "), answer
