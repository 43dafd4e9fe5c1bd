"""Convert output tokens to text, one token at a time.

What a token adds to the text depends only on the tokens up to it, so a stream resumed anywhere continues
exactly. Text is held back while it ends in an incomplete UTF-8 character, or may become a stop string. A
character that the prompt begins and the output completes is text of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from galley.core.answer.stops import StopMatcher
from galley.core.values import value

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that are decoded along, for decoders that treat the start of a text specially."""

_MAX_HELD_TOKENS = 16
"""A UTF-8 character has at most four bytes, so this many visible tokens without one are not UTF-8."""

_MAX_OPEN_TOKENS = 3
"""The last tokens may still begin a character: all of its bytes but one."""

_REPLACEMENT = "�"


@value
class Piece:
    """The text that one token added; `stop` is the stop string that it completed, cut from the text."""

    text: str
    stop: str | None = None


class TextStream:
    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._stops = StopMatcher(stops)
        self._held = ""
        # A sliding window, so that a token costs the same anywhere; its first `_settled` tokens are decoded.
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._settled = len(self._window)
        self._unfinished = 0
        """Length of the text of tokens that are not settled, with U+FFFD for an unfinished character."""

    @property
    def held_length(self) -> int:
        """Return how many characters of the tokens so far are held back."""
        return len(self._held) + self._unfinished

    def push(self, token: int, *, may_stop: bool = True) -> Piece:
        """Add one token. With `may_stop` False, its text is not searched for stop strings."""
        text, held = self._text_of(token), len(self._held)
        self._held += text
        if not may_stop:
            return Piece(self._release())
        found = self._stops.search(text)
        if found is None:
            return Piece(self._release(self._stops.pending))
        at, stop = found
        return Piece(self._release()[: held + at], stop)

    def flush(self) -> str:
        """Return the text that was held back, when no token follows."""
        text = self._new_text(len(self._window))
        self._settled = len(self._window)
        self._unfinished = 0
        return self._release() + text

    def _release(self, keep: int = 0) -> str:
        """Return the text that was held back but for the last `keep` characters, which may begin a stop."""
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        if not keep:
            self._stops.reset()
        return text

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        end = len(self._window)
        text = self._new_text(end)
        self._unfinished = 0
        if not text or text.endswith(_REPLACEMENT):
            self._unfinished = len(text)
            if self._is_hidden(token):
                self._window.pop()
                return ""
            if end - self._settled < _MAX_HELD_TOKENS:
                return ""
            end -= _MAX_OPEN_TOKENS
            text = self._new_text(end)
            self._unfinished -= len(text)
        del self._window[: self._settled]
        self._settled = end - self._settled
        return text

    def _is_hidden(self, token: int) -> bool:
        """Return True for a control token, which the decoder leaves out.

        A space at the start of a text may decode to nothing too, but not twice.
        """
        return not self._decode((token, token))

    def _new_text(self, end: int) -> str:
        before = self._decode(self._window[: self._settled])
        text = self._decode(self._window[:end])
        if not text.startswith(before):
            # The prompt ends inside a character, which reads as U+FFFD until the answer completes it.
            return text[_common(before, text) :]
        return text[len(before) :]


def _common(one: str, other: str) -> int:
    """Return how many characters both texts begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
