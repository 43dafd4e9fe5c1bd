"""The rounds of an answer, for a client that asks for them (`return_rounds`)."""

from __future__ import annotations

from collections import deque
from typing import Any

from galley.core.session.events import RoundEnded

_MS = 1_000_000


class Rounds:
    """Rounds that have ended, until the client has their first token. Times are in ms.

    `at_ms` counts from the start of the first round of this response; the parts of a round sum to its time.
    """

    def __init__(self, ended: deque[RoundEnded], prompt_len: int) -> None:
        self._ended = ended
        self._prompt_len = prompt_len
        self._first_ns: int | None = None

    def take(self, end: int) -> list[dict[str, Any]]:
        """Remove and return the rounds that begin before output token `end`."""
        taken = []
        while self._ended and self._ended[0].verdict.position - self._prompt_len < end:
            taken.append(self._describe(self._ended.popleft()))
        return taken

    def _describe(self, done: RoundEnded) -> dict[str, Any]:
        if self._first_ns is None:
            self._first_ns = done.started_ns
        parts = done.parts
        times = {
            "at_ms": done.started_ns - self._first_ns,
            "draft_ms": parts.draft_ns,
            "queue_ms": parts.queue_ns,
            "compute_ms": parts.compute_ns,
            "wire_ms": parts.wire_ns,
        }
        tree = done.tree
        ranks = (
            {}
            if tree is None
            else {"ranks": list(zip(tree.accepted_by_rank, tree.verified_by_rank, strict=True))}
        )
        return {
            "index": done.verdict.position - self._prompt_len,
            "verified": done.verdict.verified,
            "accepted": done.accepted,
            "confirmed": done.confirmed,
            "strategy": done.strategy,
            "sources": {of.source: [of.accepted, of.verified] for of in done.sources if of.verified},
            **ranks,
            "reads_prompt": done.reads_prompt,
            **{name: round(time_ns / _MS, 3) for name, time_ns in times.items()},
        }
