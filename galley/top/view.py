"""Render the dashboard with Rich: a few lines of totals, then the replicas, then the workloads.

It fits 80 columns of 24 lines; where rows do not fit, it says how many are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galley.top.fleet import RATE_S, WINDOW_S
from galley.top.screen import (
    AWAY,
    CLOSED,
    DRAINING,
    LEASED,
    UP,
    Count,
    Kv,
    Overview,
    Replica,
    Screen,
    Times,
    Workload,
)

UNKNOWN = "-"
_TIMES = "×"
_UNITS = (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3))
_MOST_SHARE = 10.0


def number(value: float | None, digits: int = 1) -> str:
    """Format a number as 12.3, 1234 or 12.3k; a dash if unknown or not finite."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, least, size in _UNITS:
        if abs(value) >= least:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 1000 else f"{scaled:.0e}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share, 0.5 as 50%; a dash outside [0, 10]."""
    return UNKNOWN if value is None or not 0 <= value <= _MOST_SHARE else f"{value:.0%}"


def times_of(value: float | None) -> str:
    """Format a ratio as 1.82×."""
    written = number(value, 2)
    return written if written == UNKNOWN else written + _TIMES


def duration(seconds: float | None) -> str:
    """Format seconds as 340us, 1.2ms, 62ms, 1.2s or 3m."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 100:
        return f"{number(seconds / 60, 0)}m"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return _short(seconds / size) + unit
    return f"{seconds * 1e6:.0f}us" if seconds > 0 else "0"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


WIDE = 110
_STATES = {UP: "green", AWAY: "bold red", DRAINING: "yellow", LEASED: "dim"}
_USED, _CACHED, _FREE = "█", "▒", "░"
_BAR_CELLS = 12
_SPARKS = "▁▂▃▄▅▆▇█"
# Lines of every frame: title, three lines of figures, and a blank and a header for each table.
_FIXED_LINES = 8


def render(screen: Screen, width: int, height: int | None = None) -> RenderableType:
    wide = width >= WIDE
    replicas, workloads = screen.replicas, screen.workloads
    lines = [_title(screen, live=height is not None), *_figures(screen.overview)]
    if wide:
        lines.append(_history(screen.history))
    if screen.problem:
        lines.append(_line(("registry away: ", "red"), (screen.problem, "")))
    room = None if height is None else height - _FIXED_LINES - (len(lines) - 4)
    of_replicas, of_workloads = share(room, len(replicas), len(workloads))
    return Group(
        *lines,
        Text(),
        _replica_table(replicas, of_replicas, wide=wide),
        *_rest(len(replicas), of_replicas),
        Text(),
        _workload_table(workloads, of_workloads),
        *_rest(len(workloads), of_workloads),
    )


def share(room: int | None, first: int, second: int) -> tuple[int, int]:
    """Return how many rows of two tables fit into `room` lines, or all for None; hidden rows take a line."""
    if room is None or first + second <= room:
        return first, second
    least = max(2, room // 2)
    of_first = min(first, max(least, room - second))
    of_second = min(second, max(2, room - of_first))
    return _cut(first, of_first), _cut(second, of_second)


def _cut(count: int, room: int) -> int:
    return count if count <= room else room - 1


def _rest(count: int, visible: int) -> list[Text]:
    return [] if visible == count else [Text(f"and {count - visible} more", style="dim")]


# ----------------------------------------------------------------------------------------- figures --


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _title(screen: Screen, *, live: bool) -> Text:
    up = sum(row.state != AWAY for row in screen.replicas)
    sessions = number(screen.overview.sessions, 0)
    counts = f" · {up} of {len(screen.replicas)} up · {sessions} sessions"
    spans = f" · rates: {RATE_S:g} s, others: {WINDOW_S:g} s"
    return _line(("galley top", "bold"), (counts, ""), (spans + (" · q quits" if live else ""), "dim"))


def _figures(whole: Overview) -> list[Text]:
    speculation = whole.speculation
    breakers = [one for one in whole.breakers if one.state != CLOSED]
    open_breakers = [f"{one.pool} {one.replica} {one.state}" for one in breakers]
    return [
        _named(
            ("tokens/s", number(whole.tokens_per_s)),
            ("rounds/s", number(whole.rounds_per_s)),
            ("tokens/round", number(speculation.tokens_per_round, 2)),
            ("accepted", percent(speculation.acceptance)),
            ("speed-up", times_of(speculation.speed_up)),
        ),
        _named(
            ("p50/p99 first token", _both(whole.first_token)),
            ("per token", _both(whole.per_token)),
            ("commit", _both(whole.commit)),
        ),
        _named(
            ("rejected", _counted(whole.refused)),
            ("failovers", _counted(whole.failovers)),
            ("failed", _counted(whole.failed)),
            ("breakers", ", ".join(open_breakers) or ("closed" if whole.breakers else UNKNOWN)),
            alarm={"breakers"} if open_breakers else set(),
        ),
    ]


def _named(*pairs: tuple[str, str], alarm: set[str] | None = None) -> Text:
    parts: list[tuple[str, str]] = []
    for name, value in pairs:
        parts += [(f"{name} ", "dim"), (value, "bold red" if name in (alarm or ()) else "bold"), ("  ", "")]
    return _line(*parts[:-1])


def _both(of: Times) -> str:
    return f"{duration(of.median_s)}/{duration(of.high_s)}"


def _counted(count: Count) -> str:
    return number(count.total, 0) + (f" (+{number(count.lately, 0)})" if count.lately > 0 else "")


def _history(values: Sequence[float]) -> Text:
    highest = max(values, default=0.0)
    if highest <= 0:
        return _line(("tokens/s over time ", "dim"), (UNKNOWN, ""))
    bars = "".join(_spark(value / highest) for value in values)
    return _line(("tokens/s over time ", "dim"), (bars, "green"), (f" of {number(highest)}", "dim"))


def _spark(height: float) -> str:
    return _SPARKS[min(len(_SPARKS) - 1, int(height * len(_SPARKS)))] if height > 0 else " "


# ------------------------------------------------------------------------------------------ tables --


def _table(*columns: str, text: set[str], shrinkable: set[str]) -> Table:
    """Make a table: columns in `text` are left-aligned, those in `shrinkable` are cut if room is short."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        # Rich takes width from columns that may wrap; their cells are cut instead.
        table.add_column(
            name,
            justify="left" if name in text else "right",
            no_wrap=name not in shrinkable,
            overflow="ellipsis",
        )
    return table


def _cell(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _replica_table(rows: Sequence[Replica], visible: int, *, wide: bool) -> Table:
    more = ("batches/s", "preempted", "breaker") if wide else ()
    table = _table(
        *("pool", "replica", "state", "sess", "queue", "oldest", "rows", *more, "KV"),
        text={"pool", "replica", "state", "KV"},
        shrinkable={"replica", "KV"},
    )
    for row in rows[:visible]:
        extra = (number(row.batches_per_s), number(row.preempted, 0), row.breaker or UNKNOWN) if wide else ()
        table.add_row(
            row.pool or "?",
            _cell(row.name),
            _cell(row.state, _STATES.get(row.state, "")),
            number(row.sessions),
            number(row.queue, 0),
            duration(row.oldest_s),
            number(row.rows),
            *extra,
            _away(row) if row.state == AWAY else _bar(row.kv),
        )
    return table


def _away(row: Replica) -> Text:
    since = f", for {duration(row.away_s)}" if row.away_s >= 1 else ""
    return _cell(row.problem + since, "red")


def _bar(kv: Kv | None) -> Text:
    if kv is None or not 0 < kv.all < math.inf:
        return _cell(UNKNOWN)
    share = kv.used / kv.all
    used = round(_BAR_CELLS * share)
    cached = round(_BAR_CELLS * (share + (kv.cached or 0.0) / kv.all)) - used
    return Text.assemble(
        (_USED * used, "cyan"),
        (_CACHED * cached, "blue"),
        (_FREE * (_BAR_CELLS - used - cached), "dim"),
        f" {percent(share)}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _workload_table(rows: Sequence[Workload], visible: int) -> Table:
    heads = ("workload", "tokens/s", "k", "accepted", "tokens/round", "speed-up")
    table = _table(*heads, text={"workload"}, shrinkable={"workload"})
    for row in rows[:visible]:
        speculation = row.speculation
        table.add_row(
            _cell(row.name or "(no label)"),
            number(row.tokens_per_s),
            number(row.k),
            percent(speculation.acceptance),
            number(speculation.tokens_per_round, 2),
            times_of(speculation.speed_up),
        )
    return table
