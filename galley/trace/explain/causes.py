"""The rules that find the cause of a slow round.

Each rule checks one cause and returns a clause with its numbers, or None. The first rule that applies gives
the cause. All thresholds are in `thresholds.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from galley.core import names
from galley.trace.explain.case import Case, Cause, Part
from galley.trace.explain.thresholds import THRESHOLDS
from galley.trace.read.spans import Event
from galley.trace.show.summary import count, ms, one_line, percent

# Parts in which the target does nothing for the session.
_WAITING = (Part.BEFORE, Part.QUEUE, Part.WIRE)


class Finding(NamedTuple):
    """A cause and the clause that explains it."""

    cause: Cause
    clause: str


def cause_of(case: Case) -> Finding:
    """Return the first cause that applies; there is always one."""
    for rule in _RULES:
        if (finding := rule(case)) is not None:
            return finding
    return Finding(Cause.IDLE, "the trace does not show why")


def _no_verdict(case: Case) -> Finding | None:
    if case.round.confirmed or names.COMPUTE_PART in case.round.span.attributes:
        return None
    error = one_line(case.round.span.text(names.ERROR_TYPE))
    why = f" ({error})" if error else " before the request ended"
    return Finding(Cause.NO_VERDICT, f"the target sent no response{why}")


def _stalled_client(case: Case) -> Finding | None:
    stalled_ns = case.stalled_ns()
    if case.part in _WAITING and stalled_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Finding(
            Cause.STALLED_CLIENT,
            f"the client read nothing for {ms(stalled_ns)} ms of it while its buffer was full",
        )
    return None


def _slow_log(case: Case) -> Finding | None:
    if case.part is not Part.LOG:
        return None
    tries = case.last_event(names.STORE_RETRIED)
    again = " after a retry" if tries else ""
    return Finding(
        Cause.SLOW_STORE,
        f"the session store took {ms(case.lost_ns)} ms for the commit{again}, "
        "and tokens are sent only after it",
    )


def _store_held_up(case: Case) -> Finding | None:
    committing_ns = case.committing_ns()
    if case.part in _WAITING and committing_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Finding(
            Cause.SLOW_STORE,
            f"a commit to the session store was under way for {ms(committing_ns)} ms of it "
            f"(it took {ms(case.longest_commit_ns())} ms), and the number of unlogged tokens is bounded",
        )
    return None


def _lost_replica(case: Case) -> Finding | None:
    if case.part not in _WAITING:
        return None
    if (moved := case.last_event(names.SESSION_MOVED, "target")) is not None:
        return Finding(
            Cause.LOST_REPLICA,
            f"{ms(case.lost_ns)} ms passed until the session moved from target {_text(moved, names.SOURCE)} "
            f"to target {_text(moved, names.TO)}{_because(moved)}{_and_read(case)}",
        )
    if (retried := case.last_event(names.REQUEST_RETRIED, "target")) is not None:
        return Finding(
            Cause.LOST_REPLICA,
            f"{ms(case.lost_ns)} ms passed until the request to the target was retried{_because(retried)}",
        )
    return None


def _and_read(case: Case) -> str:
    missing = case.missing_tokens
    if not missing or missing < THRESHOLDS.cold_tokens:
        return ""
    return f", which recomputed {count(missing, 'token')} in {ms(case.round.parts.compute_ns)} ms"


def _slow_draft(case: Case) -> Finding | None:
    if case.part is not Part.DRAFT:
        return None
    computed_ns = case.round.span.integer(names.DRAFT_COMPUTE_NS)
    draft = f"draft {one_line(case.round.draft)}" if case.round.draft else "the draft"
    if computed_ns >= THRESHOLDS.share * case.lost_ns:
        did = f", which computed for {ms(computed_ns)} ms"
    else:
        did = f", which computed for only {ms(computed_ns)} ms; the rest is its queue or the network"
    degraded = case.last_event(names.DRAFT_DEGRADED)
    then = f"; drafting then fell back to {_text(degraded, names.TO)}{_because(degraded)}" if degraded else ""
    return Finding(Cause.SLOW_DRAFT, f"it waited {ms(case.lost_ns)} ms for {draft}{did}{then}")


def _no_blocks(case: Case) -> Finding | None:
    batch = case.round.batch
    free = batch.free_blocks if batch is not None else None
    preempted = case.last_event(names.KV_PREEMPTED)
    if case.part is not Part.QUEUE or (free != 0 and preempted is None):
        return None
    why = "an older session had taken its KV blocks" if preempted else "KV blocks were short"
    left = f" ({free:,} were free)" if free is not None else ""
    return Finding(Cause.NO_BLOCKS, f"it queued for {ms(case.lost_ns)} ms at the target because {why}{left}")


def _queue(case: Case) -> Finding | None:
    if case.part is not Part.QUEUE:
        return None
    batch = case.round.batch
    others = f" with {count(batch.waiting, 'other request')}" if batch is not None and batch.waiting else ""
    return Finding(Cause.QUEUE, f"it queued for {ms(case.lost_ns)} ms at the target{others}")


def _cold_cache(case: Case) -> Finding | None:
    missing, one = case.missing_tokens, case.round
    if case.part is not Part.COMPUTE or missing is None or missing < THRESHOLDS.cold_tokens:
        return None
    had = f"{one.reused or 0:,} of {count(one.position, 'token')}"
    if one.index == 0 and not case.request.resumed and case.last_event(names.SESSION_MOVED) is None:
        return Finding(
            Cause.PROMPT,
            f"it read the prompt, of which the cache held {had}, and computed for {ms(case.lost_ns)} ms",
        )
    return Finding(
        Cause.COLD_CACHE,
        f"{_why_cold(case)}the target's cache held {had}, "
        f"and recomputing the other {missing:,} took {ms(case.lost_ns)} ms",
    )


def _why_cold(case: Case) -> str:
    moved = case.last_event(names.SESSION_MOVED, "target")
    if moved is not None:
        return f"after the session moved from target {_text(moved, names.SOURCE)}{_because(moved)}, "
    return "after other sessions had taken the session's KV blocks, " if case.is_evicted else ""


def _slow_rank(case: Case) -> Finding | None:
    times = case.round.batch.rank_ns if case.round.batch is not None else ()
    if case.part is not Part.COMPUTE or len(times) < 2:
        return None
    slowest = max(times)
    rank = times.index(slowest)
    others = median(times[:rank] + times[rank + 1 :])
    if slowest < THRESHOLDS.rank_skew * others or slowest - others < THRESHOLDS.share * case.lost_ns:
        return None
    return Finding(
        Cause.SLOW_RANK,
        f"rank {rank} took {ms(slowest)} ms for its part of the step, the others {ms(others)} ms",
    )


def _prefill_of_others(case: Case) -> Finding | None:
    batch = case.round.batch
    own = case.missing_tokens or 0
    if case.part is not Part.COMPUTE or batch is None or own >= THRESHOLDS.cold_tokens:
        return None
    if batch.prefill_share < THRESHOLDS.prefill_share:
        return None
    return Finding(
        Cause.PREFILL,
        f"it computed for {ms(case.lost_ns)} ms in a step with prompts of other sessions: "
        f"{batch.prefill_rows:,} of its {count(batch.rows, 'row')} ({percent(batch.prefill_share, 1)})",
    )


def _full_batch(case: Case) -> Finding | None:
    sessions, batch = case.round.sessions, case.round.batch
    if case.part is not Part.COMPUTE or sessions < THRESHOLDS.full_sessions:
        return None
    rows = f" and {count(batch.rows, 'row')}" if batch is not None and batch.rows else ""
    return Finding(
        Cause.FULL_BATCH, f"it computed for {ms(case.lost_ns)} ms in a step of {sessions:,} sessions{rows}"
    )


def _compute(case: Case) -> Finding | None:
    if case.part is not Part.COMPUTE:
        return None
    return Finding(Cause.COMPUTE, f"its step computed for {ms(case.lost_ns)} ms, and nothing else delayed it")


def _wire(case: Case) -> Finding | None:
    if case.part is not Part.WIRE:
        return None
    return Finding(
        Cause.WIRE,
        f"{ms(case.lost_ns)} ms of it passed on the network to the target, or in the gateway",
    )


def _beginning(case: Case) -> Finding | None:
    if case.part is not Part.BEFORE or case.round is not case.request.rounds[0]:
        return None
    store_ns = case.store_calls_ns()
    if store_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Finding(Cause.SLOW_STORE, f"creating the session in the store took {ms(store_ns)} ms of it")
    return Finding(Cause.BEGINNING, "the request was admitted and tokenized, and its session was created")


_RULES: tuple[Callable[[Case], Finding | None], ...] = (
    _no_verdict,
    _stalled_client,
    _slow_log,
    _store_held_up,
    _lost_replica,
    _slow_draft,
    _no_blocks,
    _queue,
    _cold_cache,
    _slow_rank,
    _prefill_of_others,
    _full_batch,
    _compute,
    _wire,
    _beginning,
)


def _text(event: Event, key: str) -> str:
    return one_line(event.text(key)) or "unknown"


def _because(event: Event) -> str:
    reason = one_line(event.text(names.REASON))
    return f" ({reason})" if reason else ""
