"""Drafts that share a Redis propose what the others saw, and what those saw that are gone."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from galley.core.content import common_prefix_len
from galley.core.lookup.lookup import AnswerPart, RecentAnswers
from galley.core.names import HYBRID, NGRAM, SHARED
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.answers import exchange
from services.draft.answers.log import AnswerLog
from services.draft.answers.mailbox import SharedKind
from tests.fakes.processes import service_process
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.tiny_model import VOCAB
from tests.fakes.verify_items import slice_of
from tests.fakes.waiting import PATIENCE_S
from tests.integration.services.draft.conftest import drafting

SALT, WORKLOAD, POOL = b"tenant", "extract", "blue"
K = 8
ANSWER = [*range(100, 160)]
WARNING = "answers not shared"
BEGIN = 3
"""Tokens of an answer that lead to the rest of it."""


@pytest.fixture
def server() -> Iterator[Server]:
    with running(VALKEY) as started:
        yield started


@dataclass
class Tally:
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted


class Gateway:
    """A gateway with its target in the place of one tenant and workload: it knows each answer beforehand."""

    def __init__(self, draft: rpc.DraftAsyncStub, salt: bytes = SALT, workload: str = WORKLOAD) -> None:
        self._draft, self._salt, self._workload = draft, salt, workload
        self._sessions = 0
        self.sources: list[str] = []
        """What proposed the tokens of the last response."""

    async def propose(self, tokens: Sequence[int], session_id: str = "", prompt_len: int = 1) -> list[int]:
        if not session_id:
            self._sessions += 1
            session_id = f"{self._workload}-{self._sessions}"
        asked = slice_of(tokens, session_id=session_id, tenant_salt=self._salt, prompt_len=prompt_len)
        item = pb.ProposeItem(slice=asked, k=K, workload=self._workload)
        [response] = (await self._draft.Propose(pb.ProposeRequest(items=[item]))).answers
        assert response.WhichOneof("outcome") == "result", response
        assert sum(run.tokens for run in response.result.sources) == len(response.result.draft_tokens)
        self.sources = [run.name for run in response.result.sources]
        return list(response.result.draft_tokens)

    async def serve(self, session_id: str, prompt: list[int], answer: Sequence[int]) -> Tally:
        tally, at = Tally(), 0
        while at < len(answer):
            proposed = await self.propose([*prompt, *answer[:at]], session_id, len(prompt))
            accepted = common_prefix_len(proposed, answer[at:])
            tally.drafted += len(proposed)
            tally.accepted += accepted
            tally.rounds += 1
            at += accepted + 1
        await self.propose([*prompt, *answer], session_id, len(prompt))
        return tally

    async def serve_all(self, name: str, answers: Sequence[Sequence[int]]) -> Tally:
        total = Tally()
        for i, answer in enumerate(answers):
            tally = await self.serve(f"{name}-{i}", [i, 7, 8, 9], answer)
            total.drafted += tally.drafted
            total.accepted += tally.accepted
            total.rounds += tally.rounds
        return total

    async def knows(self, answer: Sequence[int]) -> bool:
        """Return True if the draft goes on with `answer` in a session that is new to it."""
        proposed = await self.propose([1, *answer[:BEGIN]])
        return bool(proposed) and proposed == list(answer[BEGIN:][: len(proposed)])


async def stored(server: Server, salt: bytes = SALT, workload: str = WORKLOAD) -> list[int]:
    """Return the tokens that a new draft would read of a kind."""
    log = AnswerLog(server.url, POOL, "", ttl_s=900)
    try:
        parts = await log.exchange(SharedKind((salt, workload), RecentAnswers()), [])
    finally:
        await log.close()
    return [token for part in parts for token in part.tokens]


def records(count: int, seed: int) -> list[list[int]]:
    """Return answers of one form whose fields differ, as extraction with a schema gives."""
    form, fields = random.Random(7), random.Random(seed)
    keys = [[form.randrange(1000, 5000) for _ in range(6)] for _ in range(5)]
    values = range(5000, 9000)
    return [[token for key in keys for token in (*key, *fields.choices(values, k=4))] for _ in range(count)]


@asynccontextmanager
async def draft_process(
    server: Server, log: Path, end: signal.Signals = signal.SIGTERM
) -> AsyncIterator[Gateway]:
    flags = {"redis-url": server.url, "pool": POOL}
    async with (
        service_process("services.draft", log, {}, flags, end) as ready,
        grpc.aio.insecure_channel(ready["address"]) as channel,
    ):
        yield Gateway(rpc.DraftStub(channel))


def sharing(server: Server, **given: Any) -> AbstractAsyncContextManager[rpc.DraftAsyncStub]:
    return drafting(redis_url=server.url, pool=POOL, **given)


async def test_acceptance_is_the_same_after_a_draft_was_killed_and_replaced(
    server: Server, tmp_path: Path
) -> None:
    answers, later = [*records(12, seed=1), ANSWER], records(3, seed=2)
    async with drafting() as draft:
        alive = Gateway(draft)
        first = await alive.serve_all("first", answers)
        expected = await alive.serve_all("later", later)
    async with drafting() as draft:
        unshared = await Gateway(draft).serve_all("later", later)
    async with draft_process(server, tmp_path / "killed", signal.SIGKILL) as killed:
        assert await killed.serve_all("first", answers) == first

        async def is_stored() -> bool:
            return len(await stored(server)) >= sum(map(len, answers))

        await until(is_stored)
    async with draft_process(server, tmp_path / "replaced") as replaced:
        await until(lambda: replaced.knows(ANSWER))
        seen = await replaced.serve_all("later", later)
    # Its estimates of survival start anew, so it may propose a few tokens more or fewer.
    assert abs(seen.acceptance - expected.acceptance) < 0.03
    assert abs(seen.rounds - expected.rounds) <= 0.03 * expected.rounds
    assert unshared.rounds > 1.1 * expected.rounds, "else the test shows nothing"


async def test_each_draft_proposes_what_the_other_saw_and_says_so(server: Server) -> None:
    async with sharing(server) as one, sharing(server) as another:
        here, there = Gateway(one), Gateway(another)
        await here.serve("a", [1, 2], ANSWER)
        assert await here.knows(ANSWER)
        assert here.sources == [NGRAM]
        await until(lambda: there.knows(ANSWER))
        assert there.sources == [SHARED]
        other = [*range(200, 260)]
        await there.serve("b", [1, 2], other)
        await until(lambda: here.knows(other))
        assert here.sources == [SHARED]
        assert await there.knows(other)
        assert there.sources == [NGRAM]


async def test_an_answer_is_followed_while_it_grows_elsewhere(server: Server) -> None:
    async with sharing(server) as one, sharing(server) as another:
        here, there = Gateway(one), Gateway(another)
        for at in range(20, len(ANSWER), 20):
            await here.propose([1, 2, *ANSWER[:at]], "growing", 2)
            await until(partial(there.knows, ANSWER[at - BEGIN - 1 : at]))


@pytest.mark.parametrize(("salt", "workload"), [(b"other", WORKLOAD), (b"", WORKLOAD), (SALT, "chat")])
async def test_another_tenant_or_workload_sees_nothing(server: Server, salt: bytes, workload: str) -> None:
    other = [*range(200, 260)]
    async with sharing(server) as one, sharing(server) as another:
        await Gateway(one).serve("a", [1, 2], ANSWER)
        await Gateway(one, salt, workload).serve("b", [1, 2], other)
        own, foreign = Gateway(another), Gateway(another, salt, workload)
        # By then the draft has read what is there of either kind.
        await until(partial(own.knows, ANSWER))
        await until(partial(foreign.knows, other))
        assert not await foreign.knows(ANSWER)
        assert not await own.knows(other)


async def test_a_draft_that_ends_shares_its_last_tokens(server: Server) -> None:
    async with sharing(server) as draft:
        await Gateway(draft).serve("a", [1, 2], ANSWER)
    assert (await stored(server))[-len(ANSWER) :] == ANSWER


async def test_nothing_is_stored_where_sharing_is_off(server: Server) -> None:
    async with sharing(server, shared_answers_ttl_s=0) as draft:
        await Gateway(draft).serve("a", [1, 2], ANSWER)
    assert not await server.command("KEYS", "galley:answers:*")


async def test_only_the_end_of_a_prompt_is_stored(server: Server) -> None:
    async with sharing(server) as draft:
        await Gateway(draft).serve("a", [*range(1000, 1100)], ANSWER)
    assert await stored(server) == [*range(1092, 1100), *ANSWER]


async def test_answers_stay_no_longer_than_is_set(server: Server) -> None:
    async with sharing(server, shared_answers_ttl_s=30) as draft:
        await Gateway(draft).serve("a", [1, 2], ANSWER)
    for key in await server.command("KEYS", "galley:answers:*"):
        assert 0 < await server.command("PTTL", key.decode()) <= 30_000


async def test_a_store_that_hangs_delays_no_proposal(server: Server) -> None:
    async with sharing(server) as draft:
        await Gateway(draft).serve("a", [1, 2], ANSWER)
        server.pause()
        try:
            # As many as take longer than a call to the store may, if one of them waited for it.
            async with asyncio.timeout(PATIENCE_S):
                for i in range(200):
                    await Gateway(draft).serve(f"b{i}", [1, 2], ANSWER)
                assert await Gateway(draft).knows(ANSWER)
        finally:
            server.go_on()


async def test_a_draft_goes_on_sharing_when_the_store_is_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_RETRY_S", 0.1)
    with capture_logs() as lines:
        async with sharing(server) as one, sharing(server) as another:
            here, there = Gateway(one), Gateway(another)
            server.kill()
            await here.serve("a", [1, 2], ANSWER)
            await until(lambda: has_warned(lines))
            server.start()
            other = [*range(200, 260)]

            async def is_shared() -> bool:
                await here.serve("b", [1, 2], other)
                return await there.knows(other)

            await until(is_shared)
    assert [line["event"] for line in lines].count(WARNING) <= 4, "not for each exchange that fails"


async def test_a_user_without_the_right_only_shares_nothing(server: Server) -> None:
    """As the replicas' user of an earlier release."""
    rules = (
        "on >pw ~galley:replicas:* -@all +evalsha +eval +time +get +set +sadd +srem +hget +hset +pexpire +del"
    )
    await server.command("ACL", "SETUSER", "old", *rules.split())
    url = server.url.replace("unix://", "unix://old:pw@")
    with capture_logs() as lines:
        async with drafting(redis_url=url, pool=POOL) as draft:
            await Gateway(draft).serve("a", [1, 2], ANSWER)
            await until(lambda: has_warned(lines))
            assert await Gateway(draft).knows(ANSWER)
    assert not await server.command("KEYS", "galley:answers:*")


async def test_a_draft_goes_on_sharing_after_any_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ValueError("a reply")

    async def failing(*_: object) -> None:
        raise fault

    monkeypatch.setattr(exchange, "_RETRY_S", 0.1)
    with monkeypatch.context() as patched, capture_logs() as lines:
        async with sharing(server) as one, sharing(server) as another:
            here, there = Gateway(one), Gateway(another)
            patched.setattr(AnswerLog, "exchange", failing)
            await here.serve("a", [1, 2], ANSWER)
            await until(lambda: has_warned(lines))
            patched.undo()

            async def is_shared() -> bool:
                await here.serve("b", [1, 2], ANSWER)
                return await there.knows(ANSWER)

            await until(is_shared)
    assert any(line["event"] == "internal error" and line["exc_info"] is fault for line in lines)


@pytest.mark.parametrize("has_model", [True, False])
async def test_tokens_that_no_vocabulary_has_fail_no_proposal(
    server: Server, tiny: Path, default_model_dir: Path, has_model: bool
) -> None:
    """A model would refuse such a token, and with it the step of all; a grammar's state would fail."""
    unknown = VOCAB if has_model else 2**20
    known, forged = [*range(40, 60)], [*range(10, 30), unknown]
    settings = {"tokenizer": str(default_model_dir)}
    if has_model:
        settings = {"model": str(tiny), "default_strategy": HYBRID, "dtype": "float32"}
    async with sharing(server, **settings) as draft:
        gateway = Gateway(draft)
        tokenizer = (await draft.GetDraftInfo(pb.GetDraftInfoRequest())).tokenizer_hash
        log = AnswerLog(server.url, POOL, tokenizer, ttl_s=900)
        try:
            parts = [AnswerPart(b"session1", 0, forged), AnswerPart(b"session2", 0, known)]
            await log.exchange(SharedKind((SALT, WORKLOAD), RecentAnswers()), parts)
        finally:
            await log.close()

        async def knows() -> bool:
            return (await gateway.propose(known[:-4]))[:4] == known[-4:]

        await until(knows)
        proposed = await gateway.propose(forged[:-3])
    assert unknown not in proposed
    assert has_model == bool(proposed)


async def has_warned(lines: Sequence[Mapping[str, Any]]) -> bool:
    return any(line["event"] == WARNING for line in lines)
