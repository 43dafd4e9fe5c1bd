"""Replays of stored answers: other tasks get their turn, and nothing changes before the claim."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from galley.core import content
from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.answer import answer as answer_module
from galley.core.answer.answer import Answer, Ending, Reason, SessionSpec, encode_ending, encode_spec
from galley.core.content import prefix_hash, prefix_hash_of_bytes
from galley.core.errors import LogLost, Overloaded
from galley.core.records import DRAFTED, NOT_DRAFTED, TokenRecord, decode_records, encode_records
from galley.core.session.machine import SessionLimits
from galley.core.store import NewSession, OwnerChanged, Ownership, StoredSession
from services.gateway.clock import Timeouts
from services.gateway.request.validate import ResumeSpec
from services.gateway.session import replay
from services.gateway.session.replay import SLICE_TOKENS, SPEC_FIELD
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.session.streams import LogStatistics, Streams
from tests.fakes import owners
from tests.fakes import store as store_module
from tests.fakes.resumes import resumed
from tests.fakes.session_ports import SPEC, ManualClock, NoDraft, PortTarget
from tests.fakes.store import MemoryStore

LONG = 40 * SLICE_TOKENS
ME = Principal("me")


class Replaying:
    """A gateway whose tokenizer counts what it decodes between two turns of another task."""

    def __init__(self, slots: int = 8) -> None:
        self.store = MemoryStore()
        self.most = self.since = self.turns = 0
        self.begun = asyncio.Event()
        clock = ManualClock()
        ports = Ports(NoDraft(), PortTarget(), clock)
        self.streams = Streams(
            self.store, clock, lambda *_: ports, self._decode, SessionLimits(), Timeouts(), slots
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        self.begun.set()
        self.count()
        return "x" * len(tokens)

    def count(self) -> None:
        self.since += 1
        self.most = max(self.most, self.since)

    async def stored(self, session_id: str = "s", length: int = LONG, spec: SessionSpec = SPEC) -> Ownership:
        """Return the owner of a stored session with `length` output tokens."""
        spec = replace(spec, session_id=session_id, max_position=10**6)
        new = NewSession(session_id, ME.name, b"body", {SPEC_FIELD: encode_spec(spec)}, SPEC.prompt)
        owner = (await owners.create(self.store, new)).ownership
        await self.add(owner, length)
        return owner

    async def add(self, owner: Ownership, count: int, record: TokenRecord = NOT_DRAFTED) -> None:
        log, tokens = self.store.log(owner.session_id), [5] * count
        meta = encode_records([record] * count)
        await self.store.commit(owner, len(log), tokens, meta, owners.hashes_of(log, tokens))

    async def owner(self, session_id: str = "s") -> Ownership:
        return (await self.store.read(session_id, ME.name)).ownership

    async def claim(
        self, session_id: str = "s", principal: Principal = ME, next_index: int = 0, seen_hash: bytes = b""
    ) -> SessionRunner:
        with self.streams.admit(principal) as slot:
            return await resumed(self.streams, slot, ResumeSpec(session_id, next_index, seen_hash))

    @asynccontextmanager
    async def claiming(self) -> AsyncIterator[asyncio.Task[SessionRunner]]:
        """Start a claim and return in the middle of its replay."""
        task = asyncio.create_task(self.claim())
        await self.begun.wait()
        yield task
        await asyncio.wait({task})

    async def tick(self) -> None:
        """Be the other task."""
        while True:
            self.since = 0
            self.turns += 1
            await asyncio.sleep(0)


DECODED_PER_TOKEN = 2
SLOW = replace(SPEC, stop_strings=tuple(f"{index:255}" for index in range(16)))
"""An answer that takes milliseconds to make: it has long stop strings."""


@pytest.mark.parametrize("streams", [1, 5])
async def test_other_tasks_get_a_turn_after_each_slice(streams: int) -> None:
    world = Replaying()
    names = [f"s{index}" for index in range(streams)]
    for name in names:
        await world.stored(name)
    ticking = asyncio.create_task(world.tick())
    runners = await asyncio.gather(*(world.claim(name) for name in names))
    ticking.cancel()
    assert [runner.session.answer.output_len for runner in runners] == [LONG] * streams
    assert world.turns >= streams * LONG // SLICE_TOKENS
    assert world.most <= DECODED_PER_TOKEN * SLICE_TOKENS, "however many are replayed at once"


async def test_statistics_of_logs_are_read_in_slices_by_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In threads, the reading of several logs would hold the interpreter lock for all of its time."""
    world, loop = Replaying(), threading.get_ident()
    names = [f"s{index}" for index in range(5)]
    for name in names:
        await world.add(await world.stored(name), 3, DRAFTED)

    def counted(meta: bytes) -> Iterator[TokenRecord]:
        for record in decode_records(meta):
            assert threading.get_ident() == loop
            world.count()
            yield record

    monkeypatch.setattr(replay, "decode_records", counted)
    stored = [await world.store.read(name, ME.name) for name in names]
    ticking = asyncio.create_task(world.tick())
    read = await asyncio.gather(*(world.streams.statistics_of([one, one], ME) for one in stored))
    ticking.cancel()
    for _, choices in read:
        assert choices == [LogStatistics(None, drafted=3, predicted=0)] * 2
    assert world.turns >= 2 * len(names) * LONG // SLICE_TOKENS
    assert world.most <= SLICE_TOKENS, "however many are read at once"


async def test_statistics_name_the_end_and_the_predicted_tokens() -> None:
    world = Replaying()
    owner = await world.stored(length=4, spec=replace(SPEC, prediction=(5, 5, 6)))
    end = encode_ending(Ending(Reason.ABORTED))
    await world.store.abort("s", ME.name, latest_ms=2**53, finish=end)
    spec, [statistics] = await world.streams.statistics_of([await world.store.read("s", ME.name)], ME)
    assert spec.session_id == owner.session_id
    assert statistics == LogStatistics(Ending(Reason.ABORTED), drafted=0, predicted=2)


async def test_statistics_are_charged_for_what_they_read() -> None:
    world = Replaying()
    await world.stored()
    stored = await world.store.read("s", ME.name)
    poor = replace(ME, limits=PrincipalLimits(tokens_per_s=1.0, burst_tokens=LONG))
    await world.streams.statistics_of([stored, stored], poor)
    with pytest.raises(Overloaded, match="no token budget left"):
        await world.streams.statistics_of([stored], poor)


async def test_statistics_of_an_unreadable_log_are_refused() -> None:
    world = Replaying()
    await world.stored(length=3)
    stored = await world.store.read("s", ME.name)
    for meta in (stored.meta[:-1], b"\x02"):
        with pytest.raises(LogLost, match="cannot be read"):
            await world.streams.statistics_of([replace(stored, meta=meta)], ME)


@pytest.mark.parametrize("is_new", [False, True])
async def test_an_answer_is_made_in_a_turn_of_its_own(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a long log takes milliseconds, and so does the automaton of long stop strings."""
    world = Replaying()
    await world.stored(spec=SLOW)
    turns: dict[str, int] = {}

    def note(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def noted(*arguments: object) -> object:
            turns[name] = world.turns
            return call(*arguments)

        monkeypatch.setattr(owner, name, noted)

    note(Answer, "__init__")
    note(StoredSession, "to_new_session")
    note(world.store, "create" if is_new else "read")
    note(world.streams._replays, "_append")
    ticking = asyncio.create_task(world.tick())
    if is_new:
        with world.streams.admit(ME) as slot:
            await world.streams.create(slot, replace(SLOW, session_id="new"), b"body", None)
        last = "to_new_session"
    else:
        await world.claim()
        last = "_append"
    ticking.cancel()
    assert turns["create" if is_new else "read"] < turns["__init__"] < turns[last]


PIECE_TOKENS = 32 * 1024
PREDICTING = replace(SPEC, prediction=tuple(range(3 * PIECE_TOKENS + 1)))


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_long_prediction_is_converted_in_turns(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Replaying()
    await world.stored(spec=PREDICTING, length=1)
    name = "token_bytes" if is_new else "tokens_from_bytes"
    convert = getattr(answer_module, name)
    turns, sizes = [], []

    def noted(piece: Any) -> Any:
        turns.append(world.turns)
        sizes.append(len(piece) if is_new else len(piece) // 4)
        return convert(piece)

    monkeypatch.setattr(answer_module, name, noted)
    ticking = asyncio.create_task(world.tick())
    if is_new:
        with world.streams.admit(ME) as slot:
            spec = replace(PREDICTING, session_id="new")
            runner = await world.streams.create(slot, spec, b"body", None)
    else:
        runner = await world.claim()
    ticking.cancel()
    assert runner.session.spec.prediction == PREDICTING.prediction
    assert sizes == [PIECE_TOKENS] * 3 + [1], "once"
    assert len(set(turns)) == len(turns)


async def test_what_a_client_has_is_hashed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world, piece, length = Replaying(), 1024, 4 * 1024 + 1
    monkeypatch.setattr(replay, "_PIECE_TOKENS", piece)
    await world.stored(length=length)
    with pytest.raises(LogLost, match="not the one whose first tokens the client has seen"):
        await world.claim(next_index=length, seen_hash=prefix_hash([5] * (length - 1) + [6]))
    seen_hash = prefix_hash([5] * length)
    sizes: Counter[int] = Counter()
    convert = content.token_bytes

    def noted(tokens: Sequence[int]) -> bytes:
        sizes[world.turns] += len(tokens)
        return convert(tokens)

    monkeypatch.setattr(content, "token_bytes", noted)
    # The hashes of the fake store are not the gateway's.
    monkeypatch.setattr(store_module, "prefix_hash", lambda tokens: prefix_hash_of_bytes(convert(tokens)))
    ticking = asyncio.create_task(world.tick())
    runner = await world.claim(next_index=length, seen_hash=seen_hash)
    runner.session.start(0)
    ticking.cancel()
    assert sum(sizes.values()) > 2 * length, "before the claim, and by the session"
    assert max(sizes.values()) < 2 * piece


class Sliced(list[int]):
    """The tokens of a log, whose slices are noted."""

    def __init__(self, tokens: Sequence[int], world: Replaying) -> None:
        super().__init__(tokens)
        self.world = world
        self.slices: list[tuple[int, int]] = []
        """The turn and the length of each."""

    def __getitem__(self, key: Any) -> Any:
        got = super().__getitem__(key)
        self.slices.append((self.world.turns, len(got)))
        return got


async def test_a_log_is_compared_with_the_one_that_was_replayed_in_turns() -> None:
    world = Replaying()
    await world.stored(length=1)
    stored = await world.store.read("s", ME.name)
    answer = await world.streams._replays.replay(stored)
    tokens = [5] * (3 * PIECE_TOKENS + 1)
    ticking = asyncio.create_task(world.tick())
    further, same = Sliced([*tokens, 5], world), replace(stored, tokens=tokens)
    after = replace(stored, tokens=further, meta=stored.meta + encode_records([NOT_DRAFTED]))
    assert await world.streams._replays.extend(answer, same, after) is answer
    ticking.cancel()
    assert answer.output_len == 2
    assert [length for _, length in further.slices] == [PIECE_TOKENS] * 3 + [1, 1]
    assert len({turn for turn, _ in further.slices}) >= 4
    others = replace(after, tokens=[*stored.tokens[:-1], 6], meta=stored.meta)
    again = await world.streams._replays.extend(answer, stored, others)
    assert again is not answer
    assert again.tokens == others.tokens


async def test_answers_that_begin_together_are_made_in_turns_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, made, turns = Replaying(), Answer.__init__, []
    names = [f"s{index}" for index in range(5)]
    for name in names:
        await world.stored(name, length=1, spec=SLOW)

    def noted(*arguments: Any) -> None:
        turns.append(world.turns)
        made(*arguments)

    monkeypatch.setattr(Answer, "__init__", noted)
    ticking = asyncio.create_task(world.tick())
    await asyncio.gather(*(world.claim(name) for name in names))
    ticking.cancel()
    assert len(set(turns)) == len(turns) == len(names)


async def test_short_answers_that_begin_together_do_not_wait_for_each_other() -> None:
    world = Replaying(slots=64)

    async def create(index: int) -> None:
        with world.streams.admit(ME) as slot:
            await world.streams.create(slot, replace(SPEC, session_id=f"{index}"), b"body", None)

    ticking = asyncio.create_task(world.tick())
    await asyncio.gather(*map(create, range(64)))
    ticking.cancel()
    assert world.turns < 10, "not a turn or more for each"


async def test_an_owner_goes_on_until_the_replay_is_done() -> None:
    world = Replaying()
    owner = await world.stored()
    async with world.claiming() as claim:
        assert await world.owner() == owner
        await world.add(owner, SLICE_TOKENS + 1)
    runner = claim.result()
    assert runner.session.answer.output_len == LONG + SLICE_TOKENS + 1
    assert runner.session.answer.tokens == world.store.log("s")
    assert runner.log.owner.epoch == owner.epoch + 1


async def test_a_cancelled_replay_leaves_the_session_to_its_owner() -> None:
    world = Replaying()
    owner = await world.stored()
    await world.stored("other")
    async with world.claiming() as claim:
        claim.cancel()
        other = await world.claim("other")
    assert claim.cancelled()
    assert await world.owner() == owner
    assert other.session.answer.output_len == LONG, "the turn was passed on"


async def test_a_session_that_was_claimed_during_the_replay_is_left_alone() -> None:
    world = Replaying()
    owner = await world.stored()
    async with world.claiming() as claim:
        rival = (await owners.claim(world.store, "s", ME.name)).ownership
    with pytest.raises(OwnerChanged):
        claim.result()
    assert rival.epoch == owner.epoch + 1
    assert await world.owner() == rival


async def test_a_session_that_was_aborted_during_the_replay_ends_as_aborted() -> None:
    world = Replaying()
    await world.stored()
    async with world.claiming() as claim:
        await world.streams.abort("s", ME, None)
    runner = claim.result()
    runner.outbox.discard()
    end = await runner.run()
    assert end.ending == Ending(Reason.ABORTED)


async def test_a_log_that_lost_its_end_during_the_replay_is_replayed_anew() -> None:
    world = Replaying()
    await world.stored()
    before = await world.store.read("s", ME.name)
    shorter = replace(before, tokens=before.tokens[:-5], meta=before.meta[:-5])
    answer = await world.streams._replays.replay(before)
    again = await world.streams._replays.extend(answer, before, shorter)
    assert again.tokens == shorter.tokens
    assert again.output_len == LONG - 5


async def test_an_unreadable_record_is_refused_before_the_claim() -> None:
    world = Replaying()
    owner = await world.stored()
    log = world.store.log("s")
    await world.store.commit(owner, len(log), [5], b"\x02", owners.hashes_of(log, [5]))
    with pytest.raises(LogLost, match="cannot be read"):
        await world.claim()
    assert await world.owner() == owner


async def test_a_resume_is_charged_for_what_it_replays() -> None:
    world = Replaying()
    await world.stored()
    poor = replace(ME, limits=PrincipalLimits(tokens_per_s=1.0, burst_tokens=LONG))
    await world.claim(principal=poor)
    with world.streams.admit(poor) as slot, pytest.raises(Overloaded, match="no token budget left"):
        await world.streams.reserve([slot], [1], None)
