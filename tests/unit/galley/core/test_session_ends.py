"""How a session ends, where two things happen at once."""

from __future__ import annotations

import pytest

from galley.core.answer.answer import Answer, Ending, Reason
from galley.core.content import prefix_hash
from galley.core.errors import Broken, InvalidField, LogLost, TargetUnavailable
from galley.core.records import TokenRecord
from galley.core.session import events as ev
from galley.core.session.machine import Phase, Session, SessionLimits
from galley.core.session.verifying import Verifying
from galley.core.store import LogBehind, SessionEnded
from tests.fakes.session_world import MS, World, spec
from tests.fakes.truth import letters

OUTPUT = (1, 2, 3)


def resumed(stream_from: int, ending: Ending | None, seen_hash: bytes = b"") -> list[ev.Effect]:
    answer = Answer(spec(), letters)
    for token in OUTPUT:
        answer.append(token, TokenRecord())
    return Session(answer, stream_from=stream_from, seen_hash=seen_hash, finished=ending).start(0)


def test_a_client_ahead_of_a_finished_answer_gets_data_loss() -> None:
    for ending in (Ending(Reason.STOP, 7), Ending(Reason.ABORTED)):
        [end] = resumed(4, ending)
        assert isinstance(end, ev.End)
        assert isinstance(end.error, LogLost)


def test_a_client_with_the_whole_answer_gets_its_end() -> None:
    assert resumed(3, Ending(Reason.ABORTED)) == [ev.End(ending=Ending(Reason.ABORTED))]


@pytest.mark.parametrize("ending", [None, Ending(Reason.STOP, 7)], ids=["live", "finished"])
@pytest.mark.parametrize("stream_from", range(1, len(OUTPUT) + 1))
def test_other_tokens_at_the_end_of_the_log_are_data_loss(stream_from: int, ending: Ending | None) -> None:
    seen = [*OUTPUT[: stream_from - 1], 9]
    [end] = resumed(stream_from, ending, prefix_hash(seen))
    assert isinstance(end, ev.End)
    assert isinstance(end.error, LogLost)
    served = resumed(stream_from, ending, prefix_hash(OUTPUT[:stream_from]))
    assert not any(isinstance(effect, ev.End) and effect.error for effect in served)


def finishing() -> World:
    world = World(spec(max_position=4), SessionLimits())
    while world.session.phase is not Phase.FINISHING:
        world.store() if "commit" in world.waiting else world.reply()
    return world


def test_the_store_decides_between_finish_and_abort() -> None:
    world = finishing()
    world.send(ev.Aborted())
    assert not world.over
    world.store()
    assert world.end == ev.End(ending=Ending(Reason.LENGTH))

    session = finishing().session
    assert session.step(ev.Aborted(), now=0) == []
    refusal = ev.StoreFailed(SessionEnded("s"))
    assert session.step(refusal, now=0) == [ev.End(ending=Ending(Reason.ABORTED))]


def test_a_target_is_retried_after_doubling_pauses_until_its_timeout() -> None:
    verifying = Verifying(0, 4, retry_ns=10, max_retry_ns=25, timeout_ns=100)
    now, retries = 5, []
    while (at := verifying.next_retry_ns(now, "s", now)) is not None:
        retries.append(at - now)
        now = at
    assert 100 <= now <= 105, "the last one at the end of the timeout"
    for retry_ns, longest_ns in zip(retries[:-1], [10, 20, 25, 25, 25, 25, 25], strict=False):
        assert longest_ns / 2 <= retry_ns <= longest_ns


def test_sessions_that_failed_together_retry_at_different_times() -> None:
    fresh = (Verifying(0, 4, retry_ns=1000, max_retry_ns=1000, timeout_ns=2000) for _ in range(100))
    times = {verifying.next_retry_ns(5, str(number), 5) for number, verifying in enumerate(fresh)}
    assert len(times) > 80


def test_a_draft_that_missed_is_not_awaited_without_room() -> None:
    """A log that lost its tail leaves no room to draft in: the target decides the next token alone."""
    world = World(spec(k=4, stop_token_ids=frozenset[int]()), SessionLimits(credit=0, window=8))
    for _ in range(2):
        world.store()
        world.draft_answers()
        world.target_answers()
    assert "draft" in world.waiting
    world.lose_log_tail(len(world.log) - len(world.session.answer.tokens) + 7)
    world.draft_cache.clear()
    world.store()
    world.draft_answers()
    assert world.session.phase is Phase.VERIFYING


def test_a_late_finish_is_not_taken_for_an_abort() -> None:
    world = finishing()
    world.lose_log_tail(1)
    world.store()
    assert "commit" in world.waiting, "the tail that was lost"
    refusal = ev.StoreFailed(SessionEnded("s"))
    [again] = world.session.step(refusal, now=world.now)
    assert isinstance(again, ev.StoreFinish), "who ended it is for the store to say"
    assert again.log_len == len(world.session.answer.tokens)
    assert world.session.step(ev.FinishStored(), now=world.now) == [ev.End(ending=Ending(Reason.LENGTH))]

    world = finishing()
    world.lose_log_tail(1)
    world.store()
    world.session.step(refusal, now=world.now)
    assert world.session.step(refusal, now=world.now) == [ev.End(ending=Ending(Reason.ABORTED))]


def test_a_log_with_part_of_a_commit_is_repaired() -> None:
    world = World(spec(k=0), SessionLimits(credit=0))
    while len(world.log) < len(world.spec.prompt) + 3:
        world.store() if "commit" in world.waiting else world.reply()
    world.lose_log_tail(3)
    while "commit" not in world.waiting:
        world.reply()
    world.store()
    commit = world.waiting.pop("commit")
    assert isinstance(commit, ev.Commit)
    assert len(commit.tokens) > 2
    world.log += commit.tokens[:2]
    world.records += commit.records[:2]
    world.known_logged = len(world.log)
    world.send(ev.StoreFailed(LogBehind("s", len(world.log), prefix_hash(world.log))))
    world.run_to_end()
    assert world.end is not None
    assert world.end.ending is not None


@pytest.mark.parametrize("at", ["commit", "finish"])
def test_a_shorter_log_of_other_tokens_is_not_repaired(at: str) -> None:
    world = World(spec(k=0), SessionLimits(credit=0))
    while at not in world.waiting:
        world.store() if "commit" in world.waiting else world.reply()
    other = [*world.log[:-1], world.log[-1] + 1]
    world.send(ev.StoreFailed(LogBehind("s", len(other), prefix_hash(other))))
    assert world.end is not None
    assert isinstance(world.end.error, LogLost)


def test_the_time_in_a_targets_queue_is_no_failure() -> None:
    world = World(spec(k=0), SessionLimits(target_timeout_ns=100 * MS, retry_ns=50 * MS))
    world.now += 1000 * MS
    world.reply(fail=True)
    assert world.session.phase is Phase.BACKING_OFF
    world.wake()
    world.now += 100 * MS
    world.reply(fail=True)
    assert world.end is not None
    assert isinstance(world.end.error, TargetUnavailable)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_silent_target_has_failed_since_it_got_the_request(elsewhere: bool) -> None:
    session = Session(Answer(spec(k=0), letters), SessionLimits(target_timeout_ns=100 * MS))
    session.start(0)
    [effect] = session.step(ev.Failed(1, "silent", elsewhere=elsewhere, late=True), now=200 * MS)
    if elsewhere:
        assert isinstance(effect, ev.Verify)
        [effect] = session.step(ev.Failed(2, "silent", late=True), now=250 * MS)
        assert isinstance(effect, ev.SetTimer), "it got the request 50 ms before"
        return
    assert isinstance(effect, ev.End)
    assert isinstance(effect.error, TargetUnavailable)


def test_the_time_of_another_replica_counts_anew() -> None:
    limits = SessionLimits(target_timeout_ns=100 * MS, retry_ns=50 * MS, max_retry_ns=50 * MS)
    session = Session(Answer(spec(k=0), letters), limits)
    session.start(0)
    session.step(ev.Failed(1, "away"), now=0)
    session.step(ev.TimerFired(), now=50 * MS)
    [again] = session.step(ev.Failed(2, "away", elsewhere=True), now=200 * MS)
    assert isinstance(again, ev.Verify)
    [timer] = session.step(ev.Failed(3, "away"), now=400 * MS)
    assert isinstance(timer, ev.SetTimer)


@pytest.mark.parametrize("refusal", [InvalidField("structured_output", "must allow a next token"), None])
def test_a_fault_of_the_caller_that_a_target_finds_is_the_callers(refusal: InvalidField | None) -> None:
    session = Session(Answer(spec(k=0), letters))
    [verify] = [effect for effect in session.start(0) if isinstance(effect, ev.Verify)]
    failed = ev.Failed(verify.request_id, "no", retryable=False, refusal=refusal)
    [end] = [effect for effect in session.step(failed, now=MS) if isinstance(effect, ev.End)]
    assert end.error is refusal if refusal else isinstance(end.error, Broken)


def test_what_one_target_refuses_another_one_gets() -> None:
    session = Session(Answer(spec(k=0), letters))
    [verify] = [effect for effect in session.start(0) if isinstance(effect, ev.Verify)]
    failed = ev.Failed(verify.request_id, "no", retryable=False, elsewhere=True)
    [again] = session.step(failed, now=MS)
    assert isinstance(again, ev.Verify)
