"""Find the tokens whose text a delta of content has: some text is held back until later tokens decide."""

from __future__ import annotations

from collections import deque


class ContentTokens:
    """The tokens that were read and have no delta yet."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[int | None, str]]()
        """Each with the rest of its text; one that had a delta for the beginning of it has no index."""

    def read(self, index: int, text: str) -> None:
        """Take up output token `index`, which adds `text`."""
        self._waiting.append((index, text))

    def drop(self, keep: int = 0) -> None:
        """Forget all tokens but the last `keep`: their text is no content."""
        while len(self._waiting) > keep:
            self._waiting.popleft()

    def take(self, text: str, *, is_first: bool) -> list[int]:
        """Return the tokens that a delta of content brings; before the first of an item, others may wait."""
        if is_first:
            self._skip(max("".join(rest for _, rest in self._waiting).rfind(text), 0))
        taken: list[int] = []
        left = len(text)
        while left > 0 and self._waiting:
            index, rest = self._waiting.popleft()
            if index is not None:
                taken.append(index)
            if len(rest) > left:
                self._waiting.appendleft((None, rest[left:]))
            left -= len(rest)
        return taken

    def _skip(self, length: int) -> None:
        while length > 0:
            index, rest = self._waiting.popleft()
            if len(rest) > length:
                self._waiting.appendleft((index, rest[length:]))
            length -= len(rest)
