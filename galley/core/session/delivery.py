"""Delivery of an answer: how much of it the log holds, and how much the client was sent.

Confirmed tokens are committed, one commit at a time. Tokens are emitted once, after the log holds them.
"""

from __future__ import annotations

from galley.core.answer.answer import Answer
from galley.core.errors import Broken, LogLost
from galley.core.session.events import Commit, Emit
from galley.core.store import LogHashes


class Delivery:
    """The log and client positions of one stream. `logged` is the length of the log, prompt included."""

    def __init__(self, answer: Answer, stream_from: int, seen_hash: bytes) -> None:
        """Start with a log that holds the whole answer.

        The client has output tokens [0, stream_from), whose hash is `seen_hash` (empty: not checked).
        """
        self.logged = len(answer.tokens)
        self.stream_from = stream_from
        self._answer = answer
        self._seen_hash = seen_hash
        self.is_committing = False
        self._committed_hash = (-1, b"")
        """The length and hash of the log after the last commit."""
        self._emitted = 0
        self._sent = 0

    @property
    def logged_output(self) -> int:
        return self.logged - len(self._answer.spec.prompt)

    @property
    def log_hash(self) -> bytes:
        length, known = self._committed_hash
        return known if length == self.logged else self._answer.prefix_hash(self.logged)

    @property
    def unlogged(self) -> int:
        return len(self._answer.tokens) - self.logged

    @property
    def unsent(self) -> int:
        return self._answer.output_len - max(self._sent, self.stream_from)

    def commit(self, draft_cache_len: int, target_cache_len: int) -> Commit | None:
        """Return the next commit, or None if one is in progress or nothing is unlogged."""
        if self.is_committing or not self.unlogged:
            return None
        self.is_committing = True
        answer, before = self._answer, self.log_hash
        end = len(answer.tokens)
        self._committed_hash = end, answer.prefix_hash(end)
        return Commit(
            self.logged,
            tuple(answer.tokens[self.logged :]),
            tuple(answer.records[max(0, self.logged_output) :]),
            LogHashes(before, self._committed_hash[1]),
            min(draft_cache_len, end),
            target_cache_len,
        )

    def committed(self, length: int) -> None:
        if not self.logged <= length <= len(self._answer.tokens):
            raise Broken(f"a commit logged {length} of {len(self._answer.tokens)} tokens")
        self.holds(length)

    def holds(self, length: int) -> None:
        """Set the length of the log, whatever was known before; no commit is in progress now."""
        self.logged = length
        self.is_committing = False

    def emit(self) -> Emit | None:
        """Return what is logged and not emitted, or None. Raise LogLost if the client has something else."""
        logged = self.logged_output
        if self._emitted == 0 and logged >= self.stream_from:
            if self._seen_hash and self._answer.output_hash(self.stream_from) != self._seen_hash:
                raise LogLost("the answer is not the one whose first tokens the client has seen")
            self._emitted = self.stream_from
        if logged <= self._emitted or logged <= self.stream_from:
            return None
        start, self._emitted = self._emitted, logged
        return Emit(start, logged)

    def sent(self, index: int) -> None:
        """Record that the client was sent all output tokens below `index`."""
        self._sent = max(self._sent, index)
