"""Prompt lookup: propose what followed the last tokens before, in the session or in answers of its kind.

The survival of its tokens is the acceptance rate of matches of that length in the tenant and workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from galley.core.lookup.calibration import Calibration
from galley.core.lookup.lookup import LookupResult
from galley.core.lookup.proposal_outcomes import ProposalOutcomes
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.lookups import (
    MOST_KINDS,
    ByKind,
    Lookups,
    Match,
    SessionLookups,
    class_of,
    match_calibration,
)

# A token that is less likely to be accepted is not worth its bytes.
_LEAST_SURVIVAL = 0.02


class NgramStrategy:
    """Finish a proposal when it begins, unless many tokens are new: a step indexes a part of them."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waiting: WeakKeyDictionary[DraftSession, ProposalOutcomes] = WeakKeyDictionary()
        self._calibrations = ByKind(match_calibration, MOST_KINDS)

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
        calibration = self._calibrations.of(job)
        tokens = _up_to_a_stop(match.found, job.slice.stop_token_ids)
        proposal.survival = _survival(calibration, match, len(tokens))
        proposal.tokens = list(tokens[: len(proposal.survival)])
        if proposal.tokens:
            record = partial(_record, calibration, match)
            waiting.add(job.session.confirmed, ahead, tuple(proposal.tokens), record)


def _record(calibration: Calibration, match: Match, i: int, accepted: bool) -> None:
    """Record whether the i-th token after the match was accepted, those before having been."""
    calibration.record(class_of(match, i), accepted)


def _survival(calibration: Calibration, match: Match, count: int) -> list[float]:
    """Return for each of `count` tokens the probability that it and those before it are accepted."""
    survival: list[float] = []
    surviving = 1.0
    for i in range(count):
        surviving *= calibration.chance(class_of(match, i))
        if surviving < _LEAST_SURVIVAL:
            break
        survival.append(surviving)
    return survival


def _up_to_a_stop(found: LookupResult, stop_token_ids: frozenset[int]) -> tuple[int, ...]:
    tokens = found.tokens
    if stop_token_ids.isdisjoint(tokens):
        return tokens
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in stop_token_ids)]
