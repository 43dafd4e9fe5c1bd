"""Split an answer into the model's reasoning and what follows it."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.http.tools.deltas import Delta, MarkerSearch, Parser, Reasoning


class ReasoningSplit(Parser):
    """Read reasoning between two markers at the start of the answer; `rest` reads what follows.

    With `is_open`, the prompt has the opening marker already; the answer may repeat it.
    """

    def __init__(self, rest: Parser, opening: str, closing: str, *, is_open: bool) -> None:
        self._rest = rest
        self._opening = opening
        self._search = MarkerSearch(closing)
        self.is_open = is_open
        """True while the text is reasoning."""
        self._is_start = True
        self._skips_lines = True
        """The lines between the markers and the text are part of neither."""
        self._held = ""

    def push(self, text: str) -> Sequence[Delta]:
        if self._is_start:
            text = self._read_start(text)
        if not self.is_open or not text:
            return self._push_rest(text)
        if self._skips_lines:
            text = text.lstrip("\n")
            self._skips_lines = not text
        reasoning, _, after = self._search.push(text)
        deltas: list[Delta] = [Reasoning(reasoning)] if reasoning else []
        if after is not None:
            self.is_open, self._skips_lines = False, True
            deltas += self._push_rest(after)
        return deltas

    def finish(self) -> Sequence[Delta]:
        if self.is_open:
            held = self._held + self._search.finish()
            return [Reasoning(held)] if held else []
        return [*(self._rest.push(self._held) if self._held else ()), *self._rest.finish()]

    def _read_start(self, text: str) -> str:
        """Skip the opening marker; return the text once it is decided whether it has one."""
        held = self._held + text
        start = held.lstrip()
        if self._opening.startswith(start) and start != self._opening:
            self._held = held
            return ""
        self._is_start, self._held = False, ""
        if start.startswith(self._opening):
            self.is_open = True
            return start.removeprefix(self._opening)
        self._skips_lines = self.is_open
        return held

    def _push_rest(self, text: str) -> Sequence[Delta]:
        if self._skips_lines:
            text = text.lstrip("\n")
            self._skips_lines = not text
        return self._rest.push(text) if text else []
