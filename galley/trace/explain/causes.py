"""The rules that say why: each looks at one cause, and gives the clause that shows it with its numbers, or
None.

The first that holds is the cause. All numbers that decide are in `thresholds.py`.
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

# Where time passes in which the target has nothing to do for the session, whoever had it wait.
_HELD_UP = (Part.BEFORE, Part.QUEUE, Part.WIRE)


class Found(NamedTuple):
    """A cause, and the clause that shows it."""

    cause: Cause
    clause: str


def cause_of(case: Case) -> Found:
    """The first cause that holds; there is always one."""
    for rule in _RULES:
        if (found := rule(case)) is not None:
            return found
    return Found(Cause.IDLE, "what held it up is not in the trace")


def _no_verdict(case: Case) -> Found | None:
    if case.round.confirmed or names.COMPUTE_PART in case.round.span.attributes:
        return None
    error = one_line(case.round.span.text(names.ERROR_TYPE))
    return Found(Cause.NO_VERDICT, f"no verdict came{f' ({error})' if error else ', the request had ended'}")


def _stalled_client(case: Case) -> Found | None:
    stalled_ns = case.stalled_ns()
    if case.part in _HELD_UP and stalled_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Found(
            Cause.STALLED_CLIENT,
            f"the client read nothing for {ms(stalled_ns)} ms of it, and its buffer was full",
        )
    return None


def _slow_log(case: Case) -> Found | None:
    if case.part is not Part.LOG:
        return None
    tries = case.happened(names.STORE_RETRIED)
    again = ", after it had to be asked again" if tries else ""
    return Found(
        Cause.SLOW_STORE,
        f"the store took {ms(case.lost_ns)} ms for the commit{again}, and they leave only then",
    )


def _store_held_up(case: Case) -> Found | None:
    committing_ns = case.committing_ns()
    if case.part in _HELD_UP and committing_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Found(
            Cause.SLOW_STORE,
            f"for {ms(committing_ns)} ms of it a commit to the store was under way "
            f"(it took {ms(case.longest_commit_ns())} ms), and only so much may be confirmed unlogged",
        )
    return None


def _lost_replica(case: Case) -> Found | None:
    if case.part not in _HELD_UP:
        return None
    if (moved := case.happened(names.SESSION_MOVED, "target")) is not None:
        return Found(
            Cause.LOST_REPLICA,
            f"{ms(case.lost_ns)} ms passed until target {_told(moved, names.SOURCE)} was given up"
            f"{_because(moved)} and target {_told(moved, names.TO)} asked{_and_read(case)}",
        )
    if (retried := case.happened(names.REQUEST_RETRIED, "target")) is not None:
        return Found(
            Cause.LOST_REPLICA,
            f"{ms(case.lost_ns)} ms passed until the target was asked again{_because(retried)}",
        )
    return None


def _and_read(case: Case) -> str:
    missing = case.missing_tokens
    if not missing or missing < THRESHOLDS.cold_tokens:
        return ""
    return f", which read {count(missing, 'token')} again in {ms(case.round.parts.compute_ns)} ms"


def _slow_draft(case: Case) -> Found | None:
    if case.part is not Part.DRAFT:
        return None
    computed_ns = case.round.span.integer(names.DRAFT_COMPUTE_NS)
    draft = f"draft {one_line(case.round.draft)}" if case.round.draft else "the draft"
    if computed_ns >= THRESHOLDS.share * case.lost_ns:
        did = f", which computed for {ms(computed_ns)} ms"
    else:
        did = f", which computed for only {ms(computed_ns)} ms: the rest is its queue, or the way to it"
    degraded = case.happened(names.DRAFT_DEGRADED)
    then = f"; then drafting fell back to {_told(degraded, names.TO)}{_because(degraded)}" if degraded else ""
    return Found(Cause.SLOW_DRAFT, f"{ms(case.lost_ns)} ms of it went on waiting for {draft}{did}{then}")


def _no_blocks(case: Case) -> Found | None:
    batch = case.round.batch
    free = batch.free_blocks if batch is not None else None
    preempted = case.happened(names.KV_PREEMPTED)
    if case.part is not Part.QUEUE or (free != 0 and preempted is None):
        return None
    why = "an older session took its KV blocks" if preempted else "it waited for KV blocks"
    left = f", of which {free:,} were free" if free is not None else ""
    return Found(Cause.NO_BLOCKS, f"it queued for {ms(case.lost_ns)} ms at the target, for {why}{left}")


def _queue(case: Case) -> Found | None:
    if case.part is not Part.QUEUE:
        return None
    batch = case.round.batch
    others = f", where {count(batch.waiting, 'item')} waited" if batch is not None and batch.waiting else ""
    return Found(Cause.QUEUE, f"it queued for {ms(case.lost_ns)} ms at the target{others}")


def _cold_cache(case: Case) -> Found | None:
    missing, one = case.missing_tokens, case.round
    if case.part is not Part.COMPUTE or missing is None or missing < THRESHOLDS.cold_tokens:
        return None
    had = f"{one.reused or 0:,} of {count(one.position, 'token')}"
    if one.index == 0 and not case.request.resumed and case.happened(names.SESSION_MOVED) is None:
        return Found(
            Cause.PROMPT,
            f"it read the prompt, of which the cache had {had}, and computed for {ms(case.lost_ns)} ms",
        )
    return Found(
        Cause.COLD_CACHE,
        f"{_why_cold(case)}the target's cache had {had}, "
        f"and reading the other {missing:,} took {ms(case.lost_ns)} ms",
    )


def _why_cold(case: Case) -> str:
    moved = case.happened(names.SESSION_MOVED, "target")
    if moved is not None:
        return f"after the session's move from target {_told(moved, names.SOURCE)}{_because(moved)} "
    return "after other sessions had taken the session's KV blocks, " if case.evicted else ""


def _slow_rank(case: Case) -> Found | None:
    times = case.round.batch.rank_ns if case.round.batch is not None else ()
    if case.part is not Part.COMPUTE or len(times) < 2:
        return None
    slowest = max(times)
    rank = times.index(slowest)
    others = median(times[:rank] + times[rank + 1 :])
    if slowest < THRESHOLDS.rank_skew * others or slowest - others < THRESHOLDS.share * case.lost_ns:
        return None
    return Found(
        Cause.SLOW_RANK,
        f"rank {rank} took {ms(slowest)} ms for its part of the pass, the others {ms(others)} ms",
    )


def _prefill_of_others(case: Case) -> Found | None:
    batch = case.round.batch
    own = case.missing_tokens or 0
    if case.part is not Part.COMPUTE or batch is None or own >= THRESHOLDS.cold_tokens:
        return None
    if batch.prefill_share < THRESHOLDS.prefill_share:
        return None
    return Found(
        Cause.PREFILL,
        f"it computed for {ms(case.lost_ns)} ms, in a pass with prompts of other sessions: "
        f"{batch.prefill_rows:,} of its {count(batch.rows, 'row')} ({percent(batch.prefill_share, 1)})",
    )


def _full_batch(case: Case) -> Found | None:
    sessions, batch = case.round.sessions, case.round.batch
    if case.part is not Part.COMPUTE or sessions < THRESHOLDS.full_sessions:
        return None
    rows = f" and {count(batch.rows, 'row')}" if batch is not None and batch.rows else ""
    return Found(
        Cause.FULL_BATCH, f"it computed for {ms(case.lost_ns)} ms, in a pass of {sessions:,} sessions{rows}"
    )


def _compute(case: Case) -> Found | None:
    if case.part is not Part.COMPUTE:
        return None
    return Found(
        Cause.COMPUTE, f"its pass computed for {ms(case.lost_ns)} ms, and nothing else was in its way"
    )


def _wire(case: Case) -> Found | None:
    if case.part is not Part.WIRE:
        return None
    return Found(
        Cause.WIRE,
        f"{ms(case.lost_ns)} ms of it went on the way between gateway and target, or in the gateway",
    )


def _beginning(case: Case) -> Found | None:
    if case.part is not Part.BEFORE or case.round is not case.request.rounds[0]:
        return None
    store_ns = case.store_calls_ns()
    if store_ns >= THRESHOLDS.share * case.lost_ns > 0:
        return Found(Cause.SLOW_STORE, f"the store took {ms(store_ns)} ms of it to begin the session")
    return Found(Cause.BEGINNING, "the request was admitted and tokenized, and its session begun")


_RULES: tuple[Callable[[Case], Found | None], ...] = (
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


def _told(event: Event, key: str) -> str:
    return one_line(event.text(key)) or "unknown"


def _because(event: Event) -> str:
    reason = one_line(event.text(names.REASON))
    return f" ({reason})" if reason else ""
