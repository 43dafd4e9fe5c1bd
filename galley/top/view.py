"""Render the dashboard with Rich: a few lines of totals, then replicas, versions of drafts, and workloads.

It fits 80 columns of 24 lines; where rows do not fit, it says how many are not shown. Below 80 columns, lines
and names continue in the next line and tables have fewer columns, so that nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galley.top.controls import Controls, key_of
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
from galley.top.versions import Audits, DraftVersion

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


NARROW, WIDE = 80, 110
_NO_KEYS = Controls()
_HELP = (
    ("s", "sort the replicas by the next column, the highest first"),
    ("/", "show only rows with a text, such as a pool or a state; Escape shows all"),
    ("up, down, j, k", "select a replica"),
    ("Enter", "show all that is known of it; Enter or Escape goes back"),
    ("?", "show or leave this list"),
    ("q, Ctrl-C", "end"),
)
_STATES = {UP: "green", AWAY: "bold red", DRAINING: "yellow", LEASED: "dim"}
_USED, _CACHED, _FREE = "█", "▒", "░"
_BAR_CELLS = 12
_SPARKS = "▁▂▃▄▅▆▇█"
# A blank and a header for each table.
_HEAD_LINES = 2


def render(
    screen: Screen, width: int, height: int | None = None, controls: Controls = _NO_KEYS
) -> RenderableType:
    """Return a frame; one with a height is live and tells the keys."""
    if controls.has_help:
        return Group(_line(("galley top", "bold"), (" · keys", "")), Text(), _pairs(_HELP))
    if (row := controls.details(screen)) is not None:
        return Group(_line(("galley top", "bold"), (f" · {row.name}", "")), Text(), _details(row))
    screen = controls.arrange(screen)
    replicas, workloads, versions = screen.replicas, screen.workloads, screen.versions
    lines = [*_title(screen, width), *_figures(screen.overview, width), *_audit_line(screen.audits, width)]
    if width >= WIDE:
        lines.append(_history(screen.history))
    if screen.problem:
        lines.append(_folded(("registry away: ", "red"), (screen.problem, "")))
    away = _problems(replicas) if width < NARROW else []
    keys = [] if height is None else [_keys(controls)]
    fixed = len(lines) + len(away) + len(keys) + _HEAD_LINES * (3 if versions else 2)
    room = None if height is None else height - fixed
    of_versions = versions_within(room, len(versions), len(replicas) + len(workloads))
    if room is not None:
        room -= min(len(versions), of_versions + 1)
    of_replicas, of_workloads = share(room, len(replicas), len(workloads))
    return Group(
        *lines,
        Text(),
        _replica_table(replicas, of_replicas, width, controls.selected),
        *away,
        *_rest(len(replicas), of_replicas),
        *_versions(versions, of_versions, width),
        Text(),
        _workload_table(workloads, of_workloads, width),
        *_rest(len(workloads), of_workloads),
        *keys,
    )


def _keys(controls: Controls) -> Text:
    text = controls.filter + ("_" if controls.is_typing else "")
    parts = (f"s sort: {controls.sort}", f"/ filter: {text}" if text else "/ filter", "Enter details")
    return Text(" · ".join((*parts, "? help", "q quit")), style="dim", overflow="fold")


def _details(row: Replica) -> RenderableType:
    kv = row.kv
    blocks = "" if kv is None else f", {number(kv.used, 0)} of {number(kv.all, 0)} blocks in use"
    cached = "" if kv is None or kv.cached is None else f", {number(kv.cached, 0)} cached"
    return _pairs(
        (
            ("pool", row.pool or "?"),
            ("address", row.address or UNKNOWN),
            ("state", row.state + (f": {_why_away(row)}" if row.state == AWAY else "")),
            ("sessions", number(row.sessions)),
            ("queue", number(row.queue, 0)),
            ("oldest request, p99", duration(row.oldest_s)),
            ("rows a step", number(row.rows)),
            ("steps/s", number(row.batches_per_s)),
            ("preempted", number(row.preempted, 0)),
            ("KV", (percent(kv.used / kv.all) if kv is not None and kv.all else UNKNOWN) + blocks + cached),
            ("breaker", row.breaker or UNKNOWN),
        )
    )


def _pairs(pairs: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    return table


def share(room: int | None, first: int, second: int) -> tuple[int, int]:
    """Return how many rows of two tables fit into `room` lines, or all for None; hidden rows take a line."""
    if room is None or first + second <= room:
        return first, second
    least = max(2, room // 2)
    of_first = min(first, max(least, room - second))
    of_second = min(second, max(2, room - of_first))
    return _cut(first, of_first), _cut(second, of_second)


def versions_within(room: int | None, count: int, others: int) -> int:
    """Return how many of `count` versions to show in `room` lines that `others` rows need as well."""
    return count if room is None or count + others <= room else _cut(count, min(count, max(3, room // 4)))


def _cut(count: int, room: int) -> int:
    return count if count <= room else room - 1


def _rest(count: int, visible: int) -> list[Text]:
    return [] if visible == count else [Text(f"and {count - visible} more", style="dim")]


# ----------------------------------------------------------------------------------------- figures --


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _folded(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, overflow="fold")


def _title(screen: Screen, width: int) -> list[Text]:
    up = sum(row.state != AWAY for row in screen.replicas)
    sessions = number(screen.overview.sessions, 0)
    counts = f" · {up} of {len(screen.replicas)} up · {sessions} sessions"
    spans = f"rates: {RATE_S:g} s, others: {WINDOW_S:g} s"
    title = (("galley top", "bold"), (counts, ""))
    if width < NARROW:
        return [_line(*title), _line((spans, "dim"))]
    return [_line(*title, (f" · {spans}", "dim"))]


def _figures(whole: Overview, width: int) -> list[Text]:
    speculation = whole.speculation
    breakers = [one for one in whole.breakers if one.state != CLOSED]
    open_breakers = [f"{one.pool} {one.replica} {one.state}" for one in breakers]
    return [
        *_named(
            width,
            ("tokens/s", number(whole.tokens_per_s)),
            ("rounds/s", number(whole.rounds_per_s)),
            ("tokens/round", number(speculation.tokens_per_round, 2)),
            ("accepted", percent(speculation.acceptance)),
            ("speed-up", times_of(speculation.speed_up)),
        ),
        *_named(
            width,
            ("p50/p99 first token", _both(whole.first_token)),
            ("per token", _both(whole.per_token)),
            ("commit", _both(whole.commit)),
        ),
        *_named(
            width,
            ("rejected", _counted(whole.refused)),
            ("failovers", _counted(whole.failovers)),
            ("failed", _counted(whole.failed)),
            ("breakers", ", ".join(open_breakers) or ("closed" if whole.breakers else UNKNOWN)),
            alarm={"breakers"} if open_breakers else set(),
        ),
    ]


def _audit_line(audits: Audits | None, width: int) -> list[Text]:
    if audits is None:
        return []
    return _named(
        width,
        ("audited tokens", number(audits.compared, 0)),
        ("differing", number(audits.differing, 0)),
        *([("incidents", number(audits.incidents, 0))] if audits.incidents else []),
        alarm={"incidents"},
    )


def _named(width: int, *pairs: tuple[str, str], alarm: set[str] | None = None) -> list[Text]:
    """Return the pairs in as many lines as they need; one longer than a line is folded."""
    lines: list[Text] = []
    for name, value in pairs:
        style = "bold red" if name in (alarm or ()) else "bold"
        pair = _folded((f"{name} ", "dim"), (value, style))
        if lines and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1].append("  ").append_text(pair)
        else:
            lines.append(pair)
    return lines


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


def _table(*columns: str, text: set[str], shrinkable: set[str], width: int) -> Table:
    """Make a table: columns in `text` are left-aligned, those in `shrinkable` are cut if room is short.

    On a narrow terminal they are folded instead.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        # Rich takes width from columns that may wrap; their cells are cut instead.
        table.add_column(
            name,
            justify="left" if name in text else "right",
            no_wrap=name not in shrinkable,
            overflow="fold" if width < NARROW else "ellipsis",
        )
    return table


def _cell(text: str, style: str = "", *, folds: bool = False) -> Text:
    return Text(text, style=style, no_wrap=not folds, overflow="fold" if folds else "ellipsis")


def _replica_table(rows: Sequence[Replica], visible: int, width: int, selected: str) -> Table:
    wide, narrow = width >= WIDE, width < NARROW
    more = ("batches/s", "preempted", "breaker") if wide else ()
    table = _table(
        *("pool", "replica", "state", "sess", "queue", "oldest", "rows", *more, "KV"),
        text={"pool", "replica", "state", "KV"},
        shrinkable={"replica"} if narrow else {"replica", "KV"},
        width=width,
    )
    for row in rows[:visible]:
        extra = (number(row.batches_per_s), number(row.preempted, 0), row.breaker or UNKNOWN) if wide else ()
        table.add_row(
            row.pool or "?",
            _cell(row.name, folds=narrow),
            _cell(row.state, _STATES.get(row.state, "")),
            number(row.sessions),
            number(row.queue, 0),
            duration(row.oldest_s),
            number(row.rows),
            *extra,
            _share_of(row.kv) if narrow else _away(row) if row.state == AWAY else _bar(row.kv),
            style="reverse" if selected and key_of(row) == selected else None,
        )
    return table


def _why_away(row: Replica) -> str:
    return row.problem + (f", for {duration(row.away_s)}" if row.away_s >= 1 else "")


def _away(row: Replica) -> Text:
    return _cell(_why_away(row), "red")


def _problems(rows: Sequence[Replica]) -> list[Text]:
    """Return why replicas are away, for which a narrow table has no room."""
    return [_folded((f"{row.name}: {_why_away(row)}", "red")) for row in rows if row.state == AWAY]


def _share_of(kv: Kv | None) -> Text:
    is_known = kv is not None and 0 < kv.all < math.inf
    return _cell(percent(kv.used / kv.all) if kv is not None and is_known else UNKNOWN)


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


def _workload_table(rows: Sequence[Workload], visible: int, width: int) -> Table:
    heads = ("workload", "tokens/s", "k", "accepted", "tokens/round", "speed-up")
    table = _table(*heads, text={"workload"}, shrinkable={"workload"}, width=width)
    for row in rows[:visible]:
        speculation = row.speculation
        table.add_row(
            _cell(row.name or "(no label)", folds=width < NARROW),
            number(row.tokens_per_s),
            number(row.k),
            percent(speculation.acceptance),
            number(speculation.tokens_per_round, 2),
            times_of(speculation.speed_up),
        )
    return table


def _versions(rows: Sequence[DraftVersion], visible: int, width: int) -> list[RenderableType]:
    """Return a blank line and the table of versions; nothing without versions."""
    if not rows:
        return []
    heads = ("draft version", "arm", "replicas", "share", "sessions", "gain")
    table = _table(*heads, text={"draft version", "arm"}, shrinkable={"draft version"}, width=width)
    for row in rows[:visible]:
        table.add_row(
            _cell(row.name, folds=width < NARROW),
            _cell(row.arm or UNKNOWN),
            number(row.replicas, 0),
            percent(row.share),
            number(row.sessions, 0),
            percent(row.gain),
        )
    return [Text(), table, *_rest(len(rows), visible)]
