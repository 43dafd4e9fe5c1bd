"""Tell the marks of calls and of reasoning from texts that only spell them.

Where the tokenizer has a mark as a token, a model that means the mark writes that token, and grammars know
the mark by it alone. A parser then sees the token as a sign: a lone surrogate, which decoded text never has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from galley.common.models.tokenizer import Tokenizer
from services.gateway.http.tools.deltas import CallBegins, Delta

_FIRST_SIGN = 0xDFF0


class _Mark(NamedTuple):
    text: str
    sign: str


class Marks:
    """The marks of one answer.

    `begins` are marks that decide what a text is, and have signs. `others` stay text, also if they are
    control tokens, which decoded text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, begins: Sequence[str], others: Sequence[str]) -> None:
        self._signs: dict[str, str] = {}
        self._hidden: dict[int, _Mark] = {}
        self._visible: dict[int, _Mark] = {}
        for number, text in enumerate((*begins, *others)):
            token = tokenizer.added_token(text)
            if token is None or text in self._signs:
                continue
            is_visible = bool(tokenizer.decode([token]))
            # Only these are tokens for grammars, too. Others may be spelled as any text.
            if text in begins and (text.startswith("<") or not is_visible):
                self._signs[text] = chr(_FIRST_SIGN + number)
            if text in self._signs or not is_visible:
                marks = self._visible if is_visible else self._hidden
                marks[token] = _Mark(text, self.sign(text))
        self._texts = {ord(sign): text for text, sign in self._signs.items()}
        self._due: list[_Mark] = []
        self._held = ""

    def sign(self, text: str) -> str:
        """Return how the mark `text` appears in what `read` returns."""
        return self._signs.get(text, text)

    def read(self, token: int, text: str) -> str:
        """Return the text that a token adds, with signs for marks."""
        if (mark := self._hidden.get(token)) is not None:
            return text + mark.sign
        if (mark := self._visible.get(token)) is not None:
            self._due.append(mark)
        elif not self._due:
            return text
        # A stop string may hold back the end of a mark, which then comes with the text of later tokens.
        ready, self._held = "", self._held + text
        while self._due:
            before, found, after = self._held.partition(self._due[0].text)
            if not found:
                return ready
            ready, self._held = ready + before + self._due.pop(0).sign, after
        ready, self._held = ready + self._held, ""
        return ready

    def finish(self) -> str:
        """Return the text that was held back, once no text follows."""
        return self._held

    def restore(self, delta: Delta) -> Delta:
        """Return a delta with the texts of marks in place of their signs."""
        if isinstance(delta, CallBegins) or delta.text.isascii():
            return delta
        return delta._replace(text=delta.text.translate(self._texts))
