"""Prompt lookup: propose what followed the last tokens before, in the session or in answers of its kind.

A session searches only the answers of its own tenant and workload.
The survival of its tokens is the acceptance rate of matches of that length in the tenant and workload.
Answers may be shared with the other replicas of the pool (`SharedAnswers`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from galley.core import names
from galley.core.lookup.calibration import Calibration, ProposalOutcomes
from galley.core.lookup.lookup import AnswerLookup, LookupResult, RecentAnswers, SessionLookup
from galley.core.lru import LruCache
from services.draft.answers.mailbox import Kind, SharedAnswers, SharedKind
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.grammars import DraftGrammars

# Kinds whose answers are kept beside those of the sessions that the draft knows: 8 MB each at most.
MOST_KINDS = 32
# Tokens of a session that one step indexes, in some milliseconds: a long prompt must not delay the others.
_MAX_INDEXED = 1024
# Number of known tokens that are compared again beside those of the slice.
_TAIL = 32

# The shortest match of each class.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# The prior probability of a match of n tokens is n / (n + this), in the session's own tokens and in recent
# answers.
_OWN_DOUBT = 2
_ANSWERS_DOUBT = 4
STRENGTH = 10.0
# Classes of matches in the session itself, then in answers.
PRIOR = tuple(n / (n + doubt) for doubt in (_OWN_DOUBT, _ANSWERS_DOUBT) for n in LENGTHS)


def kind_of(job: DraftJob) -> Kind:
    return job.slice.key[0], job.workload


class Learned(Protocol):
    """Statistics of verdicts, such as a `Calibration`."""

    def child(self) -> Self: ...


T = TypeVar("T")
V = TypeVar("V", bound=Learned)


class KindCache(Generic[T]):
    """A value for each kind of session. It stays while one of its sessions does, or its use is recent."""

    def __init__(self, make: Callable[[], T], capacity: int) -> None:
        """Keep the `capacity` values that were used last, and those that sessions use."""
        self._make = make
        self._recent: LruCache[Kind, T] = LruCache(make, capacity)
        self._kept: WeakValueDictionary[Kind, T] = WeakValueDictionary()
        self._by_session: WeakKeyDictionary[DraftSession, T] = WeakKeyDictionary()

    def of(self, job: DraftJob, make: Callable[[], T] | None = None) -> T:
        kind = kind_of(job)
        value = self._recent.get(kind, lambda: self._kept.get(kind) or (make or self._make)())
        self._kept[kind] = self._by_session[job.session] = value
        return value


class ByKind(Generic[V]):
    """A value for each kind of session, which starts from that of all sessions of its tenant."""

    def __init__(self, make: Callable[[], V], capacity: int) -> None:
        self._kinds = KindCache(make, capacity)
        self._tenants: LruCache[bytes, V] = LruCache(make, capacity)

    def of(self, job: DraftJob) -> V:
        return self._kinds.of(job, self._tenants.get(job.slice.key[0]).child)


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that followed a match before, and whether that was in the session's `own` tokens."""

    found: LookupResult
    own: bool

    @property
    def source(self) -> str:
        return names.SHARED if self.found.is_shared else names.NGRAM


def class_of(match: Match, further: int = 0) -> int:
    """Return the class, an index of PRIOR, of a match after `further` accepted tokens."""
    length = bisect_right(LENGTHS, match.found.matched + further) - 1
    return length if match.own else length + len(LENGTHS)


def match_calibration() -> Calibration:
    return Calibration(PRIOR, STRENGTH)


class SessionLookups:
    def __init__(self, own: SessionLookup, answers: AnswerLookup) -> None:
        self._own = own
        self._answers = answers

    def find(self, ahead: Sequence[int], count: int) -> Match:
        """Return at most `count` tokens that followed the longest match of the session's last tokens."""
        own, answer = self._own.find(ahead, count), self._answers.find(ahead, count)
        return Match(answer, own=False) if answer.matched > own.matched else Match(own, own=True)


class _Answers:
    def __init__(self) -> None:
        self.recent = RecentAnswers()
        self.lookups: WeakKeyDictionary[DraftSession, AnswerLookup] = WeakKeyDictionary()
        self.shared: SharedKind | None = None


class Lookups:
    """The lookups of all sessions of a draft, shared by its strategies."""

    def __init__(self, shared: SharedAnswers | None = None) -> None:
        """Share answers by `shared`, if given."""
        self._shared = shared
        self._sessions: WeakKeyDictionary[DraftSession, SessionLookup] = WeakKeyDictionary()
        self._kinds = KindCache(_Answers, MOST_KINDS)

    def follow(self, job: DraftJob) -> SessionLookups | None:
        """Advance the session's lookups towards its confirmed tokens; return None until they are complete."""
        answers = self._kinds.of(job)
        confirmed = job.session.tokens[: job.session.confirmed]
        lookup = self._sessions.get(job.session)
        # The hash of the slice vouches for the tokens before it.
        if lookup is None or not lookup.is_prefix_of(
            confirmed, max(0, min(job.slice.start, len(lookup) - _TAIL))
        ):
            lookup = self._sessions[job.session] = SessionLookup()
            answers.lookups.pop(job.session, None)
        at = len(lookup)
        lookup.follow(confirmed[at : at + _MAX_INDEXED])
        among = answers.lookups.get(job.session)
        if among is None:
            among = answers.lookups[job.session] = AnswerLookup(answers.recent)
        first = among.follow(confirmed, job.slice.prompt_len)
        if self._shared is not None:
            kind = answers.shared = answers.shared or SharedKind(kind_of(job), answers.recent)
            self._shared.publish(kind, job.slice.key[1], first, confirmed[first:])
        return SessionLookups(lookup, among) if len(lookup) == len(confirmed) else None


class NgramStrategy:
    """Finish a proposal when it begins, unless many tokens are new: a step indexes a part of them."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waiting: WeakKeyDictionary[DraftSession, ProposalOutcomes] = WeakKeyDictionary()
        self._calibrations = ByKind(match_calibration, MOST_KINDS)
        self._grammars = DraftGrammars()

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        proposals = [Proposal(job) for job in jobs]
        self.advance(proposals)
        return proposals

    def advance(self, proposals: Sequence[Proposal]) -> None:
        for proposal in proposals:
            session = proposal.job.session
            waiting = self._waiting.setdefault(session, ProposalOutcomes())
            waiting.confirm(session.tokens[: session.confirmed])
            following = self._lookups.follow(proposal.job)
            proposal.done = following is not None
            if following is not None:
                self._look_up(proposal, following, waiting)

    def _look_up(self, proposal: Proposal, following: SessionLookups, waiting: ProposalOutcomes) -> None:
        job = proposal.job
        ahead = job.session.tokens[job.session.confirmed :]
        match = following.find(ahead, job.k)
        calibration = self._calibrations.of(job)
        tokens = _up_to_a_stop(match.found, job.slice.stop_token_ids)
        if (state := self._grammars.state_of(job)) is not None:
            tokens = tokens[: state.allowed_prefix(tokens, ahead)]
        proposal.survival = calibration.survival(class_of(match, i) for i in range(len(tokens)))
        proposal.tokens = list(tokens[: len(proposal.survival)])
        proposal.sources = [match.source] * len(proposal.tokens)
        if proposal.tokens:
            record = partial(_record, calibration, match)
            waiting.add(job.session.confirmed, ahead, tuple(proposal.tokens), record)


def _record(calibration: Calibration, match: Match, i: int, accepted: bool) -> None:
    """Record whether the i-th token after the match was accepted, those before having been."""
    calibration.record(class_of(match, i), accepted)


def _up_to_a_stop(found: LookupResult, stop_token_ids: frozenset[int]) -> tuple[int, ...]:
    tokens = found.tokens
    if stop_token_ids.isdisjoint(tokens):
        return tokens
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in stop_token_ids)]
