"""How far the log and the client have come with an answer.

What was confirmed is committed, one commit at a time; what the log holds is emitted, and nothing twice.
"""

from __future__ import annotations

from galley.core.answer.answer import Answer
from galley.core.errors import Broken, LogLost
from galley.core.session.events import Commit, Emit


class Delivery:
    """Of one stream. `logged` is how many tokens the log holds, the prompt's counted."""

    def __init__(self, answer: Answer, stream_from: int, seen_hash: bytes) -> None:
        """The log holds the answer as it is.

        The client has output tokens [0, stream_from), whose hash is `seen_hash` (empty: not checked).
        """
        self.logged = len(answer.tokens)
        self.stream_from = stream_from
        self._answer = answer
        self._seen_hash = seen_hash
        self._committing = False
        self._emitted = 0
        self._sent = 0

    @property
    def logged_output(self) -> int:
        """How many output tokens the log holds."""
        return self.logged - len(self._answer.spec.prompt)

    @property
    def unlogged(self) -> int:
        """How many tokens are confirmed and not logged."""
        return len(self._answer.tokens) - self.logged

    @property
    def unsent(self) -> int:
        """How many are confirmed and not taken by the client."""
        return self._answer.output_len - max(self._sent, self.stream_from)

    def commit(self, draft_cache_len: int, target_cache_len: int) -> Commit | None:
        """What is to be logged now, if anything."""
        tokens = self._answer.tokens[self.logged :]
        if self._committing or not tokens:
            return None
        self._committing = True
        return Commit(
            expected_len=self.logged,
            tokens=tuple(tokens),
            records=tuple(self._answer.records[max(0, self.logged_output) :]),
            draft_cache_len=min(draft_cache_len, len(self._answer.tokens)),
            target_cache_len=target_cache_len,
        )

    def committed(self, length: int) -> None:
        """The log holds so many tokens. Raises Broken if it cannot."""
        if not self.logged <= length <= len(self._answer.tokens):
            raise Broken(f"a commit logged {length} of {len(self._answer.tokens)} tokens")
        self.holds(length)

    def holds(self, length: int) -> None:
        """The log holds so many tokens, whatever was known of it; no commit is under way."""
        self.logged = length
        self._committing = False

    def emit(self) -> Emit | None:
        """What is logged and not emitted; raises LogLost if it contradicts what the client has."""
        logged = self.logged_output
        if self._emitted == 0 and logged >= self.stream_from:
            if not self._agrees_with_client():
                raise LogLost("the answer is not the one whose first tokens the client has seen")
            self._emitted = self.stream_from
        if logged <= self._emitted or logged <= self.stream_from:
            return None
        items = tuple(self._answer.chunks(self._emitted, logged))
        self._emitted = logged
        return Emit(items)

    def _agrees_with_client(self) -> bool:
        return not self._seen_hash or self._answer.output_hash(self.stream_from) == self._seen_hash

    def sent(self, index: int) -> None:
        """The client has taken all output tokens below `index`."""
        self._sent = max(self._sent, index)
