"""Find earlier occurrences of the last tokens, in a session and in recent answers of its workload.

Answers are looked up in by sessions of their own tenant and workload alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

from galley.core.lookup.lookup import AnswerLookup, LookupResult, RecentAnswers, SessionLookup
from galley.core.lru import LruCache
from services.draft.strategies.base import DraftJob, DraftSession

# Of sessions: the tenant's salt and the workload.
Kind: TypeAlias = tuple[bytes, str]

# Kinds whose answers are kept: 8 MB each at most.
MOST_KINDS = 32
# Tokens of a session that one step follows, some milliseconds: a long prompt must not hold up the others.
_MOST_AT_ONCE = 1024
# Of the tokens known already, how many are compared again beside those that the slice brings.
_TAIL = 32


def kind_of(job: DraftJob) -> Kind:
    """Whose answers a session may look into."""
    return job.slice.key[0], job.workload


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that followed a match before, and whether that was in the session's `own` tokens."""

    found: LookupResult
    own: bool


class SessionLookups:
    """One session's lookups, which have followed all its confirmed tokens."""

    def __init__(self, own: SessionLookup, answers: AnswerLookup) -> None:
        self._own = own
        self._answers = answers

    def find(self, ahead: Sequence[int], count: int) -> Match:
        """At most `count` tokens that followed the longer match of the session's tokens and `ahead`."""
        own, answer = self._own.find(ahead, count), self._answers.find(ahead, count)
        return Match(answer, own=False) if answer.matched > own.matched else Match(own, own=True)


class _Answers:
    """The recent answers of one workload, and the lookups over them."""

    def __init__(self) -> None:
        self.recent = RecentAnswers()
        self.lookups: WeakKeyDictionary[DraftSession, AnswerLookup] = WeakKeyDictionary()


class Lookups:
    """The lookups of all sessions of a draft, shared by its strategies."""

    def __init__(self) -> None:
        self._sessions: WeakKeyDictionary[DraftSession, SessionLookup] = WeakKeyDictionary()
        self._kinds: LruCache[Kind, _Answers] = LruCache(_Answers, MOST_KINDS)

    def follow(self, job: DraftJob) -> SessionLookups | None:
        """Advance the session's lookups towards its confirmed tokens; return None until they are complete.

        They start again if earlier tokens have changed.
        """
        answers = self._kinds.get(kind_of(job))
        confirmed = job.session.tokens[: job.session.confirmed]
        lookup = self._sessions.get(job.session)
        # What stands before the slice its hash has vouched for.
        if lookup is None or not lookup.is_prefix_of(
            confirmed, max(0, min(job.slice.start, len(lookup) - _TAIL))
        ):
            lookup = self._sessions[job.session] = SessionLookup()
            answers.lookups.pop(job.session, None)
        at = len(lookup)
        lookup.follow(confirmed[at : at + _MOST_AT_ONCE])
        among = answers.lookups.get(job.session)
        if among is None:
            among = answers.lookups[job.session] = AnswerLookup(answers.recent)
        among.follow(confirmed, job.slice.prompt_len)
        return SessionLookups(lookup, among) if len(lookup) == len(confirmed) else None
