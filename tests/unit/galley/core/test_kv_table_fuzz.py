"""Random lives of sessions over a small pool, beside a model of what lies in every block.

The model's KV of a position is all that the real one depends on: the tenant and every token up to there. So a
block that is shared, kept or copied wrongly reads back differently.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from galley.core.content import Hit, SessionKey, block_hashes, look_up, prefix_hash
from galley.core.errors import Overloaded
from galley.core.kv.table import KvTable
from tests.fakes.kv_check import check_table, drop

BLOCK_TOKENS = 3
MOST_TOKENS = 18
SALTS = (b"one", b"two")
KEYS: list[SessionKey] = [(salt, name) for salt in SALTS for name in "abc"]
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3],
    [1, 2, 3, 4, 5, 6, 9, 9, 9, 9, 9, 9],
    [1, 2, 3, 3, 2, 1, 1, 2],
]

Cell: TypeAlias = tuple[bytes, tuple[int, ...]] | None

keys = st.sampled_from(KEYS)
confirmed = st.builds(
    lambda prompt, cut, tail: prompt[:cut] + tail,
    st.sampled_from(PROMPTS),
    st.integers(1, 12),
    st.lists(st.integers(1, 2), max_size=3),
)
chunks = st.dictionaries(keys, st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4)


def kv(key: SessionKey, tokens: list[int]) -> Cell:
    return key[0], tuple(tokens)


@dataclass
class Memory:
    cells: list[list[Cell]]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, to in copies:
            self.cells[to] = list(self.cells[source])

    def write(self, blocks: tuple[int, ...], position: int, cell: Cell) -> None:
        self.cells[blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = cell

    def read(self, blocks: tuple[int, ...], length: int) -> list[Cell]:
        return [self.cells[blocks[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(length)]


@dataclass
class Plan:
    fed: dict[SessionKey, tuple[list[int], int]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Lives(RuleBasedStateMachine):
    BLOCKS = 9
    MAX_SESSIONS = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = KvTable(self.BLOCKS, BLOCK_TOKENS, self.MAX_SESSIONS)
        self.memory = Memory([[None] * BLOCK_TOKENS for _ in range(self.BLOCKS)])
        self.live: dict[SessionKey, list[int]] = {}  # Confirmed tokens of live sessions
        self.arrivals: dict[SessionKey, int] = {}

    @rule(key=keys, arrival=st.integers(0, 3), tokens=confirmed, known=st.integers(0, 5))
    def open(self, key: SessionKey, arrival: int, tokens: list[int], known: int) -> None:
        live = set(self.live)
        free = self.table.free
        had_blocks = bool(self.table.blocks_of(key))
        before = look_up(self.table.tokens_of(key), 0, tokens, prefix_hash(()))
        assert isinstance(before, Hit)
        try:
            hashes = block_hashes(key[0], tokens, BLOCK_TOKENS)[:known]
            stands = self.table.open(key, arrival, tokens, hashes=hashes)
        except Overloaded:
            assert len(live - {key}) >= self.MAX_SESSIONS
            return
        sure = before.agree if had_blocks else before.agree - before.agree % BLOCK_TOKENS
        assert min(sure, len(tokens) - 1) <= stands < len(tokens)
        assert list(self.table.tokens_of(key)) == tokens[:stands]
        assert self.table.free <= free or key in live
        self.live[key] = tokens
        self.arrivals[key] = arrival

    @rule(chunks=chunks, fails=st.booleans(), trash=st.lists(st.integers(0, 9), max_size=3))
    def step(self, chunks: dict[SessionKey, tuple[int, int]], fails: bool, trash: list[int]) -> None:
        plan = Plan()
        for key, (rows, guesses) in chunks.items():
            if key in self.live:
                self.plan(plan, key, rows, guesses)
        self.nothing_is_written_that_others_hold(plan)
        self.carry_out(plan, fails, trash)
        for key, (fed, good) in plan.fed.items():
            if fails:
                self.table.make_idle(key)
                del self.live[key]
            else:
                self.table.append_computed(key, fed[:good])
                if len(self.tokens(key)) >= len(self.live[key]):
                    self.live[key] = [*self.tokens(key), 1]

    def plan(self, plan: Plan, key: SessionKey, rows: int, guesses: int) -> None:
        stands = len(self.table.tokens_of(key))
        fed = self.live[key][stands : stands + rows]
        good = len(fed)
        if stands + good == len(self.live[key]):
            fed = fed + [2] * min(guesses, MOST_TOKENS - len(self.live[key]))
            good = (good + len(fed)) // 2 if len(fed) > good else good
        if self.reserve(plan, key, stands + len(fed)):
            plan.fed[key] = (fed, max(1, good))

    def reserve(self, plan: Plan, key: SessionKey, length: int) -> bool:
        busy = frozenset(plan.fed)
        before = {other: self.table.blocks_of(other) for other in KEYS}
        caller = (self.arrivals[key], key)
        younger = {k for k in self.live if (self.arrivals[k], k) > caller and k not in busy}
        idle = {k for k in KEYS if before[k] and k not in self.live}
        kept = {k for k in KEYS if before[k]} - younger - idle - {key}
        try:
            reservation = self.table.reserve(key, length, busy)
        except Overloaded:
            assert {other: self.table.blocks_of(other) for other in KEYS} == before
            assert self.must_refuse(key, length, {b for k in kept for b in before[k]})
            return False
        preempted = reservation.preempted
        assert set(preempted) <= younger
        if preempted:
            assert not any(self.table.blocks_of(k) for k in idle)
            ages = {k: (self.arrivals[k], k) for k in younger}
            assert list(preempted) == sorted(younger, key=lambda k: ages[k], reverse=True)[: len(preempted)]
        for other in preempted:
            del self.live[other]
        plan.copies.extend(reservation.copies)
        assert len(self.table.blocks_of(key)) * BLOCK_TOKENS >= length
        return True

    def must_refuse(self, key: SessionKey, length: int, kept: set[int]) -> bool:
        own = self.table.blocks_of(key)
        first = len(self.table.tokens_of(key)) // BLOCK_TOKENS
        need = max(0, -(-length // BLOCK_TOKENS) - len(own)) + (first < len(own) and own[first] in kept)
        return need > self.BLOCKS - len(kept | set(own))

    def nothing_is_written_that_others_hold(self, plan: Plan) -> None:
        holders = Counter(block for key in KEYS for block in set(self.table.blocks_of(key)))
        for key in plan.fed:
            first = len(self.table.tokens_of(key)) // BLOCK_TOKENS
            assert all(holders[block] == 1 for block in self.table.blocks_of(key)[first:])

    def carry_out(self, plan: Plan, fails: bool, trash: list[int]) -> None:
        if not (fails and trash):
            self.memory.copy(plan.copies)
        for _, to in plan.copies if fails and trash else ():
            self.memory.cells[to] = [None] * BLOCK_TOKENS
        for key, (fed, _) in plan.fed.items():
            tokens = self.tokens(key)
            blocks = self.table.blocks_of(key)
            for position in range(len(tokens), len(tokens) + len(fed)):
                sequence = [*tokens, *fed][: position + 1]
                self.memory.write(
                    blocks, position, None if position in trash and fails else kv(key, sequence)
                )

    @rule(key=keys, length=st.integers(0, MOST_TOKENS))
    def truncate(self, key: SessionKey, length: int) -> None:
        before = self.tokens(key)
        blocks = self.table.blocks_of(key)
        self.table.truncate(key, length)
        if blocks:
            assert self.tokens(key) == before[:length]
            assert self.table.blocks_of(key) == blocks[: -(-length // BLOCK_TOKENS)]

    @rule(key=keys)
    def idle(self, key: SessionKey) -> None:
        before = self.tokens(key)
        self.table.make_idle(key)
        self.live.pop(key, None)
        assert self.tokens(key) == before

    @rule(key=keys)
    def drop(self, key: SessionKey) -> None:
        drop(self.table, key)
        self.live.pop(key, None)
        assert self.table.blocks_of(key) == ()

    @rule(key=keys, start=st.integers(0, 8), tokens=confirmed)
    def looks_up_as_content_does(self, key: SessionKey, start: int, tokens: list[int]) -> None:
        held = self.tokens(key)
        prefix = prefix_hash(tokens[:start])
        assert self.table.look_up(key, start, tokens[start:], prefix) == look_up(
            held, start, tokens[start:], prefix
        )

    @precondition(lambda self: self.live)
    @rule()
    def the_oldest_always_gets_what_fits(self) -> None:
        key = min(self.live, key=lambda k: (self.arrivals[k], k))
        plan = Plan()
        assert self.reserve(plan, key, self.BLOCKS * BLOCK_TOKENS)
        self.table.make_idle(key)
        del self.live[key]

    @invariant()
    def all_balances(self) -> None:
        check_table(self.table)
        assert set(self.table._live) == set(self.live)
        live = {block for key in self.live for block in self.table.blocks_of(key)}
        assert self.table.live_blocks == len(live)
        assert self.table.free + self.table.live_blocks == self.BLOCKS

    @invariant()
    def every_session_reads_back_its_own_tokens(self) -> None:
        for key in KEYS:
            blocks = self.table.blocks_of(key)
            tokens = self.tokens(key)
            if blocks:
                expected = [kv(key, tokens[: p + 1]) for p in range(len(tokens))]
                assert self.memory.read(blocks, len(tokens)) == expected

    @invariant()
    def every_hash_published_can_be_attached(self) -> None:
        known = set(self.table.cached_prefixes(self.BLOCKS))
        assert len(known) <= self.BLOCKS
        for key in KEYS:
            if not self.table.blocks_of(key):
                assert set(block_hashes(key[0], self.tokens(key), BLOCK_TOKENS)) <= known

    def tokens(self, key: SessionKey) -> list[int]:
        return list(self.table.tokens_of(key))

    def teardown(self) -> None:
        for key in KEYS:
            drop(self.table, key)
        check_table(self.table)
        assert self.table.free == self.BLOCKS
        self.table.open(KEYS[0], 0, [1])
        self.table.reserve(KEYS[0], self.BLOCKS * BLOCK_TOKENS)
        assert self.table.live_blocks == self.BLOCKS
        assert self.table.cached_prefixes(9) == []


class ManySessions(Lives):
    BLOCKS = 6
    MAX_SESSIONS = 6


_SETTINGS = settings(
    max_examples=80,
    stateful_step_count=40,
)
TestLives = Lives.TestCase
TestLives.settings = _SETTINGS
TestManySessions = ManySessions.TestCase
TestManySessions.settings = _SETTINGS
