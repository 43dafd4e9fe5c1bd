"""Convert output tokens to text, one token at a time.

What a token adds to the text depends only on the tokens up to it, so a stream resumed anywhere continues
exactly. Text is held back while it ends in an incomplete UTF-8 character, or may become a stop string. A
character that the prompt begins and the output completes is text of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that are decoded along, for decoders that treat the start of a text specially."""

_MAX_HELD_TOKENS = 16
"""A UTF-8 character has at most four bytes, so this many visible tokens without one are not UTF-8."""

_MAX_OPEN_TOKENS = 3
"""The last tokens may still begin a character: all of its bytes but one."""

_REPLACEMENT = "�"


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token added; `stop` is the stop string that it completed, cut from the text."""

    text: str
    stop: str | None = None


class TextStream:
    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._held = ""
        # A sliding window, so that a token costs the same anywhere; its first `_settled` tokens are decoded.
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._settled = len(self._window)

    def push(self, token: int, *, may_stop: bool = True) -> Piece:
        """Add one token. With `may_stop` False, its text is not searched for stop strings."""
        self._held += self._text_of(token)
        if not (may_stop and self._stops):
            return Piece(self._release(len(self._held)))
        found = self._find_stop()
        if found is not None:
            at, stop = found
            text = self._release(at)
            self._held = ""
            return Piece(text, stop)
        return Piece(self._release(len(self._held) - self._possible_stop()))

    def flush(self) -> str:
        """Return the text that was held back, when no token follows."""
        text = self._new_text(len(self._window))
        self._settled = len(self._window)
        return self._release(len(self._held)) + text

    def _find_stop(self) -> tuple[int, str] | None:
        """Return (position, stop string) of the first stop string in the text, the first listed of a tie."""
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(hits, key=itemgetter(0), default=None)

    def _possible_stop(self) -> int:
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        end = len(self._window)
        text = self._new_text(end)
        if not text or text.endswith(_REPLACEMENT):
            if self._is_hidden(token):
                self._window.pop()
                return ""
            if end - self._settled < _MAX_HELD_TOKENS:
                return ""
            end -= _MAX_OPEN_TOKENS
            text = self._new_text(end)
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


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
