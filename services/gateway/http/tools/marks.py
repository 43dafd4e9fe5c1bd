"""Tell the marks of calls and of reasoning from texts that only spell them.

Where the tokenizer has a mark as a token, a model that means the mark writes that token, and grammars know
the mark by it alone. A parser then sees the token as a sign: a lone surrogate, which decoded text never has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from galley.common.models.tokenizer import Tokenizer
from services.gateway.http.tools.deltas import CallBegins, Delta

_FIRST_SIGN = 0xDFF0
_MOST_DUE = 64
"""Marks that wait at most: bounds the work of one token.

It takes a stop string of so many marks. Beyond, the oldest is read at once; it is text if that is held back.
"""


class _Mark(NamedTuple):
    decoded: str
    """How it reads in decoded text; empty for a control token."""
    sign: str


class Marks:
    """The marks of one answer.

    `begins` are marks that decide what a text is, and have signs. `others` stay text, also if they are
    control tokens, which decoded text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, begins: Sequence[str], others: Sequence[str]) -> None:
        self._signs: dict[str, str] = {}
        self._marks: dict[int, _Mark] = {}
        for number, text in enumerate((*begins, *others)):
            token = tokenizer.added_token(text)
            if token is None or text in self._signs:
                continue
            decoded = text if tokenizer.decode([token]) else ""
            # Only these are tokens for grammars, too. Others may be spelled as any text.
            if text in begins and (text.startswith("<") or not decoded):
                self._signs[text] = chr(_FIRST_SIGN + number)
            if text in self._signs or not decoded:
                self._marks[token] = _Mark(decoded, self.sign(text))
        self._texts = {ord(sign): text for text, sign in self._signs.items()}
        self._length = 0
        """The length of the text so far."""
        self._held = ""
        self._due = deque[tuple[int, _Mark]]()
        """Marks before which text was held back, each with the length of the text up to its end."""

    def sign(self, text: str) -> str:
        """Return how the mark `text` appears in what `read` returns."""
        return self._signs.get(text, text)

    def hidden_text(self, token: int) -> str:
        """Return the text of a mark that decoded text leaves out; empty for all other tokens."""
        mark = self._marks.get(token)
        return "" if mark is None or mark.decoded else mark.sign.translate(self._texts)

    def read(self, token: int, text: str, held_length: int) -> str:
        """Return the text that a token adds, with signs for marks.

        Of the text up to the token, `held_length` characters come with later tokens, as they may begin a stop
        string or are unfinished. They may be before a mark, or the mark itself.
        """
        self._length += len(text)
        mark = self._marks.get(token)
        if mark is None and not self._due:
            return text
        self._held += text
        if mark is not None:
            self._due.append((self._length + held_length, mark))
        ready = ""
        while self._due and (self._due[0][0] <= self._length or len(self._due) > _MOST_DUE):
            end, mark = self._due.popleft()
            at = max(0, len(self._held) - self._length + end)
            before, self._held = self._held[:at], self._held[at:]
            # The end of a stop string may have cut the mark.
            sign = mark.sign if before.endswith(mark.decoded) else ""
            ready += (before.removesuffix(mark.decoded) if sign else before) + sign
        if not self._due:
            ready, self._held = ready + self._held, ""
        return ready

    def is_due(self, sign: str) -> bool:
        """Return True if a mark with this sign waits for text before it."""
        return any(mark.sign == sign for _, mark in self._due)

    def finish(self) -> str:
        """Return the text that was held back, once no text follows."""
        return self._held

    def restore(self, delta: Delta) -> Delta:
        """Return a delta with the texts of marks in place of their signs."""
        if isinstance(delta, CallBegins) or delta.text.isascii():
            return delta
        return delta._replace(text=delta.text.translate(self._texts))
