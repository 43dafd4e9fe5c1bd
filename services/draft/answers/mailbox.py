"""Pass recent answers between the worker, which follows them, and the event loop, which shares them.

Both only append to deques and take from them, which is atomic: a proposal waits for nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TypeAlias

from galley.core.lookup.lookup import AnswerPart, RecentAnswers

# The kind of a session: its tenant's salt and its workload.
Kind: TypeAlias = tuple[bytes, str]

MOST_PART_TOKENS = 256
"""The worker indexes a part in about a millisecond."""
SESSION_BYTES = 8
_PERSON = b"galley.session"
# Parts that wait for the other thread; beyond, the oldest are dropped.
_MOST_WAITING = 8192
# How far a log was read: its birth, and its length then.
Position: TypeAlias = tuple[bytes, int]
_START: Position = (b"", 0)


@dataclass(slots=True, eq=False)
class SharedKind:
    """The answers of a kind, and how far each of its two logs was read."""

    kind: Kind
    answers: RecentAnswers
    read: tuple[Position, Position] = (_START, _START)


class SharedAnswers:
    def __init__(self) -> None:
        self._published: deque[tuple[SharedKind, str, int, Sequence[int]]] = deque(maxlen=_MOST_WAITING)
        self._received: deque[tuple[SharedKind, AnswerPart]] = deque(maxlen=_MOST_WAITING)

    # ----------------------------------------------------------------------------- on the worker --

    def publish(self, kind: SharedKind, session_id: str, start: int, tokens: Sequence[int]) -> None:
        """Share the tokens of a session from position `start` on; without any, only read those of others."""
        self._published.append((kind, session_id, start, tokens))

    @property
    def has_work(self) -> bool:
        return bool(self._received)

    def work(self) -> None:
        """Index some of the received tokens, in about a millisecond."""
        tokens = 0
        while self._received and tokens < MOST_PART_TOKENS:
            kind, part = self._received.popleft()
            kind.answers.receive(part)
            tokens += len(part.tokens)

    # ------------------------------------------------------------------------- on the event loop --

    def take(self) -> dict[SharedKind, list[AnswerPart]]:
        """Return the parts published since the last call, joined, by kind; a kind may have none."""
        published: dict[SharedKind, dict[str, list[AnswerPart]]] = {}
        while self._published:
            kind, session_id, start, tokens = self._published.popleft()
            sessions = published.setdefault(kind, {})
            if tokens:
                part = AnswerPart(_session_hash(kind.kind, session_id), start, tokens)
                _join(sessions.setdefault(session_id, []), part)
        return {kind: list(_cut(chain(*sessions.values()))) for kind, sessions in published.items()}

    def deliver(self, kind: SharedKind, parts: Iterable[AnswerPart]) -> None:
        """Have the worker add these parts of other replicas to the answers of the kind."""
        self._received.extend((kind, part) for part in parts)


def _session_hash(kind: Kind, session_id: str) -> bytes:
    return blake2b(session_id.encode(), key=kind[0], digest_size=SESSION_BYTES, person=_PERSON).digest()


def _join(parts: list[AnswerPart], part: AnswerPart) -> None:
    """Append a part to the last one, without what that has already, or as a new one after a gap."""
    if not parts or part.start > parts[-1].end:
        parts.append(part)
        return
    last = parts[-1]
    parts[-1] = AnswerPart(last.session, last.start, [*last.tokens, *part.tokens[last.end - part.start :]])


def _cut(parts: Iterable[AnswerPart]) -> Iterable[AnswerPart]:
    for part in parts:
        for at in range(0, len(part.tokens), MOST_PART_TOKENS):
            yield AnswerPart(part.session, part.start + at, part.tokens[at : at + MOST_PART_TOKENS])
