"""The keys of the live dashboard: what is sorted, filtered and shown. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from galley.top.screen import Replica, Screen

UP_KEY, DOWN_KEY, ENTER, ESCAPE, BACKSPACE = "up", "down", "enter", "escape", "backspace"
_ARROWS = {"\x1b[A": UP_KEY, "\x1b[B": DOWN_KEY, "\x1bOA": UP_KEY, "\x1bOB": DOWN_KEY}
_NAMED = {"\r": ENTER, "\n": ENTER, "\x1b": ESCAPE, "\x7f": BACKSPACE, "\b": BACKSPACE}
_END = {"q", "Q", "\x03", "\x04"}
_MAX_FILTER = 40

_SORTS: dict[str, Callable[[Replica], float | None]] = {
    "sess": lambda row: row.sessions,
    "queue": lambda row: row.queue,
    "oldest": lambda row: row.oldest_s,
    "rows": lambda row: row.rows,
    "KV": lambda row: row.kv.used / row.kv.all if row.kv is not None and row.kv.all else None,
}
SORTS = ("pool", *_SORTS)


def keys_of(text: str) -> list[str]:
    """Split what a terminal sent into keys: characters, and names of arrows, Enter, Escape and Backspace."""
    keys = []
    while text:
        arrow = next((sequence for sequence in _ARROWS if text.startswith(sequence)), "")
        key = _ARROWS[arrow] if arrow else _NAMED.get(text[0], text[0])
        keys.append(key)
        text = text[len(arrow) or 1 :]
    return keys


@dataclass(slots=True)
class Controls:
    """The state that keys change. `selected` is the address of a row, or its name if it has none."""

    sort: str = SORTS[0]
    filter: str = ""
    is_typing: bool = False
    selected: str = ""
    has_details: bool = False
    has_help: bool = False
    is_over: bool = False

    def press(self, key: str, screen: Screen) -> None:
        """Apply a key to what `arrange(screen)` shows."""
        if key in _END and not (self.is_typing and key.isprintable()):
            self.is_over = True
        elif self.is_typing:
            self._type(key)
        elif self.has_help or self.has_details:
            self._leave(key)
        elif key in {UP_KEY, DOWN_KEY, "k", "j"}:
            self._move(-1 if key in {UP_KEY, "k"} else 1, self.arrange(screen).replicas)
        elif key == ENTER:
            self._open(self.arrange(screen).replicas)
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "/":
            self.is_typing = True
        elif key == ESCAPE:
            self.filter = ""
        elif key in {"?", "h"}:
            self.has_help = True

    def arrange(self, screen: Screen) -> Screen:
        """Return the screen with the rows that contain the filter, sorted: the highest first."""
        text = self.filter.lower()
        rows = [
            row
            for row in screen.replicas
            if text in f"{row.pool} {row.name} {row.state} {row.address}".lower()
        ]
        if (value := _SORTS.get(self.sort)) is not None:
            rows.sort(key=lambda row: (value(row) is None, -(value(row) or 0.0)))
        workloads = [row for row in screen.workloads if text in row.name.lower()]
        # A filter for a pool or a state leaves no workload.
        return replace(screen, replicas=rows, workloads=workloads or screen.workloads)

    def details(self, screen: Screen) -> Replica | None:
        """Return the replica whose details are shown; None if there are none, or if it is gone."""
        if not self.has_details:
            return None
        return next((row for row in screen.replicas if key_of(row) == self.selected), None)

    def _type(self, key: str) -> None:
        if key == ENTER:
            self.is_typing = False
        elif key == ESCAPE:
            self.is_typing, self.filter = False, ""
        elif key == BACKSPACE:
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter = (self.filter + key)[:_MAX_FILTER]

    def _leave(self, key: str) -> None:
        if key in {ENTER, ESCAPE, "?", "h", "b"}:
            self.has_help = self.has_details = False

    def _move(self, by: int, rows: list[Replica]) -> None:
        keys = [key_of(row) for row in rows]
        at = keys.index(self.selected) + by if self.selected in keys else 0
        if keys:
            self.selected = keys[min(max(at, 0), len(keys) - 1)]

    def _open(self, rows: list[Replica]) -> None:
        if self.selected not in map(key_of, rows):
            self._move(1, rows)
        self.has_details = bool(rows)


def key_of(row: Replica) -> str:
    return row.address or row.name
