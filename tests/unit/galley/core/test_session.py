"""The session machine against every order of events (design: rules 1, 2 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from galley.core.content import prefix_hash
from galley.core.errors import Broken, DeadlinePassed, LogLost, TargetUnavailable, Unavailable
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from galley.core.session.sources import LocalSources
from tests.fakes.scripted_sources import scripted_sources
from tests.fakes.session_world import MS, TREE_LIES, StreamsBeforeCommit, World, spec
from tests.fakes.truth import IDS

LIES = [
    "",
    "too many",
    "other vocabulary",
    "negative",
    "nothing",
    "other position",
    "other content",
    "long cache",
    *TREE_LIES,
]
# Some tokens are forced, and perhaps the output is predicted, with some tokens wrong.
SOURCES = st.builds(
    lambda forced, edits: partial(scripted_sources, forced=forced, edits=edits),
    st.frozensets(st.integers(0, 40)),
    st.none() | st.dictionaries(st.integers(0, 40), st.integers(0, IDS - 1)),
)


class SessionMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        speculation=st.fixed_dictionaries({"k": st.integers(0, 6), "width": st.integers(0, 3)}),
        window=st.integers(1, 12),
        buffer=st.integers(1, 12),
        seed=st.integers(0, 6),
        length=st.integers(4, 40),
        credit=st.integers(0, 9),
        sources=SOURCES,
    )
    def begin(
        self,
        speculation: dict[str, int],
        window: int,
        buffer: int,
        seed: int,
        length: int,
        credit: int,
        sources: Callable[[list[int]], LocalSources],
    ) -> None:
        prompt = (seed, 2, 3)
        limits = SessionLimits(
            window=window, buffer=buffer, credit=credit, target_timeout_ns=20 * MS, retry_ns=MS
        )
        self.world = World(
            spec(prompt=prompt, max_position=3 + length, **speculation), limits, sources=sources
        )

    def waits(self, what: str) -> bool:
        return not self.world.over and what in self.world.waiting

    def at_target(self) -> bool:
        return not self.world.over and self.world.item is not None

    @precondition(lambda self: self.waits("draft"))
    @rule(spoil_at=st.none() | st.integers(0, 5), lie=st.sampled_from(LIES))
    def draft_answers(self, spoil_at: int | None, lie: str) -> None:
        self.world.draft_answers(spoil_at=spoil_at, lie=lie)

    @precondition(lambda self: self.waits("draft"))
    @rule()
    def draft_fails(self) -> None:
        self.world.draft_answers(fail=True)

    @precondition(lambda self: not self.world.over and self.world.to_target)
    @rule()
    def target_receives(self) -> None:
        self.world.deliver()

    @precondition(at_target)
    @rule(at_most=st.none() | st.integers(0, 3))
    def target_passes(self, at_most: int | None) -> None:
        self.world.target_passes(at_most)

    @precondition(at_target)
    @rule()
    def target_fails(self) -> None:
        self.world.target_fails()

    @precondition(at_target)
    @rule(keep=st.integers(0, 40))
    def target_preempts(self, keep: int) -> None:
        self.world.target_preempts(keep)

    @precondition(lambda self: not self.world.over and self.world.answers)
    @rule()
    def answer_arrives(self) -> None:
        self.world.deliver_answer()

    @precondition(lambda self: self.waits("commit") or self.waits("finish"))
    @rule()
    def store_answers(self) -> None:
        self.world.store()

    @precondition(lambda self: self.waits("commit"))
    @rule(tokens=st.integers(1, 5))
    def store_loses_its_tail(self, tokens: int) -> None:
        unseen = len(self.world.log) - len(self.world.spec.prompt) - len(self.world.seen)
        self.world.lose_log_tail(min(tokens, unseen))

    @precondition(lambda self: self.waits("wake"))
    @rule()
    def time_passes(self) -> None:
        self.world.wake()

    @precondition(lambda self: not self.world.over)
    @rule()
    def client_takes(self) -> None:
        self.world.take()

    @precondition(lambda self: not self.world.over)
    @rule(kind=st.sampled_from(["deadline", "fenced", "store", "drain"]))
    def stream_is_cut(self, kind: str) -> None:
        self.world.interrupt(kind)

    @precondition(lambda self: self.world.over)
    @rule()
    def client_resumes(self) -> None:
        self.world.start()

    @rule()
    def stale_replies_arrive(self) -> None:
        self.world.send(ev.Proposed(0, 3, b"", (1, 2), 5))
        self.world.send(ev.Verified(0, 3, (1,), 0, 0, 3, "f", more=True))
        self.world.send(ev.Failed(0, "long ago"))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.over:
            world.start()
        while not world.finish_stored:
            world.run_to_end()
            if not world.finish_stored:
                world.start()
        assert world.seen == world.truth[3:]


TestAnyInterleaving = SessionMachine.TestCase
TestAnyInterleaving.settings = settings(max_examples=80, stateful_step_count=60)


@pytest.fixture(params=[0, 2, 32])
def credit(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("spoil_at", [None, 0, 2])
def test_a_wrong_draft_changes_nothing(lie: str, spoil_at: int | None, credit: int) -> None:
    honest, lied = World(spec(), SessionLimits(credit=0)), World(spec(), SessionLimits(credit=credit))
    honest.run_to_end()
    lied.run_to_end(lie=lie, spoil_at=spoil_at)
    assert lied.seen == honest.seen
    assert lied.seen_text == honest.seen_text


def test_every_accepted_count_occurs(credit: int) -> None:
    counts: set[int] = set()
    for first in range(6):
        for spoil_at in (0, 1, 2, 3, None):
            world = World(spec(prompt=(first, 2, 3)), SessionLimits(credit=credit))
            world.run_to_end(spoil_at=spoil_at)
            counts |= world.accepted_counts
    assert counts == {0, 1, 2, 3, 4}


def test_rounds_do_not_wait_for_commits_but_stop_at_the_window(credit: int) -> None:
    world = World(spec(k=0, stop_token_ids=frozenset()), SessionLimits(window=5, credit=credit))
    rounds = 0
    while world.pool_waits:
        world.reply()
        rounds += 1
    assert rounds == 5
    assert not world.seen, "nothing is streamed before it is logged"
    world.store()
    assert len(world.seen) == 1


def test_a_stalled_client_stops_its_session(credit: int) -> None:
    world = World(spec(k=0), SessionLimits(buffer=4, credit=credit))
    for _ in range(20):
        if world.pool_waits:
            world.reply()
        if "commit" in world.waiting:
            world.store()
    assert len(world.seen) == 4
    world.take()
    assert world.pool_waits


def test_a_dead_target_ends_the_stream_after_its_timeout(credit: int) -> None:
    world = World(spec(), SessionLimits(target_timeout_ns=100 * MS, credit=credit))
    while not world.over:
        if world.pool_waits:
            world.reply(fail=True)
        else:
            world.wake()
    assert world.end is not None
    assert isinstance(world.end.error, TargetUnavailable)
    assert isinstance(world.end.error, Unavailable)


def test_a_failed_draft_cools_down(credit: int) -> None:
    limits = SessionLimits(draft_cooldown_ns=10 * MS, credit=credit)
    world = World(spec(stop_token_ids=frozenset()), limits)
    world.reply(fail=True)
    requests = 0
    for _ in range(8):
        if "commit" in world.waiting:
            world.store()
        requests += "draft" in world.waiting
        world.reply()
    assert 0 < requests < 8


def test_draining_ends_after_a_round_with_everything_logged(credit: int) -> None:
    world = World(spec(), SessionLimits(credit=credit))
    world.interrupt("drain")
    assert not world.over, "the round under way is finished"
    world.run_to_end()
    assert world.end is not None
    assert isinstance(world.end.error, Unavailable)
    assert world.seen == world.log[3:]
    assert world.seen


def test_an_invalid_verdict_is_an_internal_error(credit: int) -> None:
    good: dict[str, object] = {
        "position": 3,
        "tokens": (1,),
        "accepted": 0,
        "verified": 0,
        "cache_len": 3,
        "fingerprint": "f",
    }
    for wrong in (
        {"position": 4},
        {"tokens": ()},
        {"tokens": (1, 2)},
        {"accepted": 1, "verified": 1},
        {"verified": 1},
        {"tokens": (99,)},
    ):
        world = World(spec(k=0), SessionLimits(credit=credit))
        [request] = world.to_target
        world.send(ev.Verified(request.request_id, **{**good, **wrong}))  # type: ignore[arg-type]
        assert world.end is not None
        assert isinstance(world.end.error, Broken), wrong
        assert "commit" not in world.waiting


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_cache_that_missed_is_used_by_content_and_not_by_length(role: str, credit: int) -> None:
    for have, held, start in (
        (2, (1, 2), 2),
        (2, (1, 9), 0),
        (3, (1, 2), 0),
        (4, (1, 2, 3, 4), 0),
        (-1, (), 0),
    ):
        world = World(spec(), SessionLimits(credit=credit))
        if role == "draft":
            first = world.waiting.pop("draft")
            assert isinstance(first, ev.Propose)
        else:
            while not world.to_target:
                world.draft_answers()
            opened = world.to_target.pop(0)
            assert isinstance(opened, ev.Verify)
            world.open_request, first = None, opened
        world.send(ev.CacheMissed(first.request_id, have, prefix_hash(held)))
        again = world.waiting["draft"] if role == "draft" else world.to_target[-1]
        assert isinstance(again, ev.Propose | ev.Verify)
        assert (again.slice.start, again.slice.tokens) == (start, (1, 2, 3)[start:])
        assert again.slice.prefix_hash == prefix_hash((1, 2, 3)[:start])


def test_an_illegal_event_raises(credit: int) -> None:
    world = World(spec(), SessionLimits(credit=credit))
    request = world.waiting["draft"]
    assert isinstance(request, ev.Propose)
    with pytest.raises(Broken, match="Verified"):
        world.session.step(ev.Verified(request.request_id, 3, (1,), 0, 0, 3, "f"), now=0)
    with pytest.raises(Broken, match="event FinishStored in phase"):
        world.session.step(ev.FinishStored(), now=0)


def test_a_client_with_other_tokens_gets_data_loss(credit: int) -> None:
    world = World(spec(), SessionLimits(credit=credit))
    world.run_to_end()
    world.seen = [0, 0, 0]
    world.start()
    assert world.end is not None
    assert isinstance(world.end.error, LogLost)


def test_a_client_ahead_of_the_log_is_served_from_its_index(credit: int) -> None:
    world = World(spec(), SessionLimits(credit=credit))
    while len(world.seen) < 6:
        world.store() if "commit" in world.waiting else world.reply()
    world.interrupt("deadline")
    assert world.end is not None
    assert isinstance(world.end.error, DeadlinePassed)
    world.lose_log_tail(4)
    world.check = lambda: None  # type: ignore[method-assign]  # the client is ahead of the log for once
    seen = list(world.seen)
    world.start()
    world.run_to_end()
    assert world.seen[: len(seen)] == seen
    assert world.seen == world.truth[3:]


def test_mutant_stream_before_commit_is_caught() -> None:
    World(spec(), SessionLimits()).run_to_end()
    with pytest.raises(AssertionError, match="streamed what the log does not hold"):
        World(spec(), SessionLimits(), StreamsBeforeCommit).run_to_end()
