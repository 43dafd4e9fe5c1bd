"""Compute the goals of a soak and whether they were met, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.harness import Goal, at_most
from bench.soak.clients import NEVER, SLOW, UNREAD
from bench.soak.leaks import Left
from bench.soak.memory import REDIS_MEMORY, Growth, Sample, growth
from bench.soak.outcome import LEAST_BACK, Outcome, Overload, back_after_s, harm, rate
from galley.bench.summary import percentile

MOST_GROWTH = 0.05
MOST_HARM = 1.05
MOST_HARM_P99 = 1.1
MOST_REFUSAL_MS = 100.0
MOST_BACK_S = 10.0
_NAMED = 3
_MORE = 4
"""Descriptors or threads by which a process may grow: connections of clients and of the store come and go."""


def goals_of(outcome: Outcome) -> list[Goal]:
    """Return the goals in the order of the phases. Raises ValueError if the run was cut short."""
    if outcome.heard is None or outcome.overload is None or outcome.left is None:
        raise ValueError("outcome: must be that of a whole soak, was cut short")
    soaked = [sample for sample in outcome.samples if outcome.soaked.holds(sample.at_s)]
    heard = outcome.heard
    return [
        *memory_goals(growths(soaked)),
        _none("streams", f"of {outcome.streams} streams: wrong answers", heard.wrong),
        _none("streams", f"of {outcome.streams} streams: failed calls", heard.failures),
        _count("streams", f"of {outcome.streams} streams: refused calls", len(heard.refusals)),
        *_harm_goals(outcome),
        *overload_goals(outcome.overload),
        *left_goals(outcome.left),
    ]


def growths(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Return the memory growth of each process, and of Redis as it reports it."""
    names = [*samples[0].processes, REDIS_MEMORY]
    return {name: growth([sample.megabytes(name) for sample in samples]) for name in names}


def memory_goals(grown: Mapping[str, Growth]) -> list[Goal]:
    """Return a goal for each process: its growth is at most MOST_GROWTH."""
    bound = f"<= {MOST_GROWTH:+.0%}"
    return [
        Goal("memory", f"{name}: growth", str(one), bound, one.share <= MOST_GROWTH)
        for name, one in grown.items()
    ]


def _harm_goals(outcome: Outcome) -> list[Goal]:
    if outcome.heard is None:
        return []
    pace, gaps = harm(outcome.heard, outcome.blocks)
    ended = outcome.heard.ended
    unread, slow = ended.get(f"{NEVER}: {UNREAD}", 0), ended.get(f"{SLOW}: {UNREAD}", 0)
    return [
        at_most("misreaders", "others' time a token, with over without", pace, MOST_HARM),
        at_most("misreaders", "others' p99 gap, with over without", gaps, MOST_HARM_P99),
        Goal("misreaders", "never-readers ended by the gateway", str(unread), ">= 1", unread >= 1),
        _count("misreaders", "slow readers ended by the gateway", slow),
    ]


def overload_goals(overload: Overload) -> list[Goal]:
    """Return the goals of the overload and the time after it."""
    refusals = [
        one
        for heard in (overload.ordinary, overload.extra)
        for one in heard.refusals
        if overload.during.holds(one.at_s)
    ]
    took_ms = percentile([1000 * one.took_s for one in refusals] or [float("inf")], 99)
    unhinted = sum(one.retry_after_s is None for one in refusals)
    back_s = back_after_s(overload)
    bad = [*overload.ordinary.failures, *overload.extra.failures]
    wrong = [*overload.ordinary.wrong, *overload.extra.wrong]
    arrivals = [*overload.ordinary.arrivals, *overload.extra.arrivals]
    before, after = rate(arrivals, overload.before), rate(arrivals, overload.after)
    what = f"{len(refusals)} refusals, p99 until the client knows"
    return [
        Goal("overload", what, f"{took_ms:.0f} ms", f"<= {MOST_REFUSAL_MS:g} ms", took_ms <= MOST_REFUSAL_MS),
        _count("overload", "refusals that do not say when to come back", unhinted),
        _none("overload", "calls that failed otherwise", bad),
        _none("overload", "admitted streams that ended wrong", wrong),
        Goal(
            "overload",
            f"back at {LEAST_BACK:.0%} of {before:.0f} tokens/s ({after:.0f} over all the time after)",
            "never" if back_s is None else f"{back_s:.0f} s",
            f"<= {MOST_BACK_S:g} s",
            back_s is not None and back_s <= MOST_BACK_S,
        ),
    ]


def left_goals(left: Left) -> list[Goal]:
    """Return the goals that nothing is left over."""
    within = f"{left.gone_s:.0f} s after the last call"
    of = f"{left.places} of {left.max_sessions}"
    return [
        _count("left", f"keys of sessions in the store, {within}", left.session_keys),
        _count("left", "blocks of the target that a live session holds", left.blocks_held),
        _count("left", "items that wait at target and draft", left.waiting),
        Goal("left", "streams admitted at once", of, "all", left.places == left.max_sessions),
        _few("more descriptors than at first", left.more_descriptors),
        _few("more threads than at first", left.more_threads),
        _few("tasks that outlived their service", left.tasks or {}),
        _none("left", f"errors in the logs; all stopped in {left.drained_s:.1f} s", left.errors),
    ]


def _count(name: str, what: str, count: int) -> Goal:
    return Goal(name, what, str(count), "0", count == 0)


def _none(name: str, what: str, which: Sequence[str]) -> Goal:
    some = ", ".join(dict.fromkeys(which[:_NAMED]))
    return Goal(name, what, f"{len(which)} {some}".strip(), "0", not which)


def _few(what: str, by_part: Mapping[str, int | None]) -> Goal:
    counts = ", ".join(f"{part} {count}" for part, count in by_part.items())
    met = all(count is not None and count <= _MORE for count in by_part.values())
    return Goal("left", what, counts, f"<= {_MORE} each", bool(by_part) and met)
