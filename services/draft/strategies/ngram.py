"""Prompt lookup: what followed the last tokens before, in the session or in recent answers of its kind.

A match is trusted as far as matches of its length have been right in its tenant and workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from galley.core.lookup.lookup import LookupResult
from galley.core.lookup.proposal_outcomes import ProposalOutcomes
from galley.core.lru import LruCache
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.lookups import MOST_KINDS, Kind, Lookups, Match, SessionLookups, kind_of
from services.draft.strategies.matches import MatchChances

# A token that survives more seldom is not worth its bytes.
_LEAST_SURVIVAL = 0.02


class NgramStrategy:
    """A proposal is done when it begins, but where many tokens are new: those are followed a piece a step."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waiting: WeakKeyDictionary[DraftSession, ProposalOutcomes] = WeakKeyDictionary()
        self._chances: LruCache[Kind, MatchChances] = LruCache(MatchChances, MOST_KINDS)
        self._overall: LruCache[bytes, MatchChances] = LruCache(MatchChances, MOST_KINDS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """Start a proposal; see `Strategy.begin`."""
        proposals = [Proposal(job) for job in jobs]
        self.advance(proposals)
        return proposals

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Extend the proposals; see `Strategy.advance`."""
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
        chances = self._chances_of(job)
        tokens = _up_to_a_stop(match.found, job.slice.stop_token_ids)
        proposal.survival = _survival(chances, match, len(tokens))
        proposal.tokens = list(tokens[: len(proposal.survival)])
        if proposal.tokens:
            record = partial(chances.record, match)
            waiting.add(job.session.confirmed, ahead, tuple(proposal.tokens), record)

    def _chances_of(self, job: DraftJob) -> MatchChances:
        overall = self._overall.get(job.slice.key[0])
        return self._chances.get(kind_of(job), overall.narrowed)


def _survival(chances: MatchChances, match: Match, count: int) -> list[float]:
    """Return the chances that each of `count` tokens after such a match is right."""
    survival: list[float] = []
    surviving = 1.0
    for i in range(count):
        surviving *= chances.chance(match, i)
        if surviving < _LEAST_SURVIVAL:
            break
        survival.append(surviving)
    return survival


def _up_to_a_stop(found: LookupResult, stop_token_ids: frozenset[int]) -> tuple[int, ...]:
    tokens = found.tokens
    if stop_token_ids.isdisjoint(tokens):
        return tokens
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in stop_token_ids)]
