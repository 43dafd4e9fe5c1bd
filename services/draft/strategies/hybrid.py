"""Draft each token by lookup or by model, whichever is more likely right.

While the lookup is likely enough to be right, the model takes no step, so a copied passage is cheap.
Elsewhere the model takes a step and the likelier token of the two is drafted (`Ensemble`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakKeyDictionary

from galley.core import names
from galley.core.content import common_prefix_len
from galley.core.lookup.calibration import Calibration
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.model import (
    CONFIDENCES,
    LISTED,
    DraftHistory,
    ModelProposal,
    ModelSteps,
    rules_of,
)
from services.draft.strategies.ngram import (
    LENGTHS,
    PRIOR,
    STRENGTH,
    ByKind,
    Lookups,
    SessionLookups,
    class_of,
)

_WORKLOADS = 256
# A token that is less likely to be accepted is not worth a step.
_LEAST_SURVIVAL = 0.03
# A lookup this likely to be right needs no step of the model.
_SURE = 0.7
# Three classes of match lengths where both agree: each begins at one of these indices of LENGTHS.
_SHORT = (0, 1, 4)
# Greedy and sampled tokens have classes of their own, and so have the candidates of a list.
_BUCKETS = CONFIDENCES * 2 + LISTED
_CLASSES = PRIOR * 2
_BOTH = tuple(1 - (1 - confidence) * (1 - PRIOR[first]) for confidence in _BUCKETS for first in _SHORT)
# Where they differ at least one is wrong, a lookup more often than a model.
_LESS = tuple(chance**2 for chance in _CLASSES)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its evidence: the class of a match, or the bucket of the model's confidence."""

    token: int
    evidence: int
    source: str = names.MODEL


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates for one position: a lookup's, and those of a model, the first one first."""

    lookup: Candidate | None
    model: tuple[Candidate, ...]

    def source_of(self, token: int) -> str:
        """Return what drafted `token`: the model if it did, whatever a lookup found."""
        if self.lookup is None or any(candidate.token == token for candidate in self.model):
            return names.MODEL
        return self.lookup.source


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Ensemble:
    """Calibration of a lookup and a model: each alone, both agreeing, and each against the other."""

    lookup: Calibration = field(default_factory=lambda: Calibration(_CLASSES, STRENGTH))
    alone: Calibration = field(default_factory=lambda: Calibration(_BUCKETS, STRENGTH))
    both: Calibration = field(default_factory=lambda: Calibration(_BOTH, STRENGTH))
    lookup_against: Calibration = field(default_factory=lambda: Calibration(_LESS, STRENGTH))
    model_against: Calibration = field(default_factory=lambda: Calibration(_BUCKETS, STRENGTH))

    def child(self) -> Ensemble:
        tables = (self.lookup, self.alone, self.both, self.lookup_against, self.model_against)
        return Ensemble(*(table.child() for table in tables))

    def is_sure(self, lookup: Candidate) -> bool:
        return self.lookup.chance(lookup.evidence) >= _SURE

    def choose(self, candidates: Candidates) -> tuple[int, float]:
        """Return the likelier token, the model's if both are as likely, and its probability."""
        return self.ranked(candidates)[0]

    def ranked(self, candidates: Candidates) -> list[tuple[int, float]]:
        """Return each token and its probability, the likeliest first; of equals the model's."""
        evidence = self._evidence(candidates)
        found = [(token, table.chance(bucket)) for token, table, bucket in evidence]
        return sorted(found, key=itemgetter(1), reverse=True)

    def record(self, candidates: Candidates, confirmed: int) -> None:
        """Record the confirmed token of a position whose earlier draft tokens were all accepted."""
        lookup = candidates.lookup
        if lookup is not None:
            self.lookup.record(lookup.evidence, lookup.token == confirmed)
        if candidates.model:
            for token, table, bucket in self._evidence(candidates):
                table.record(bucket, token == confirmed)

    def _evidence(self, candidates: Candidates) -> list[tuple[int, Calibration, int]]:
        lookup, model = candidates.lookup, candidates.model
        if lookup is None:
            return [(candidate.token, self.alone, candidate.evidence) for candidate in model]
        if not model:
            return [(lookup.token, self.lookup, lookup.evidence)]
        evidence = [
            (candidate.token, self.both, _agreeing(lookup, candidate))
            if candidate.token == lookup.token
            else (candidate.token, self.model_against, candidate.evidence)
            for candidate in model
        ]
        if all(candidate.token != lookup.token for candidate in model):
            evidence.append((lookup.token, self.lookup_against, lookup.evidence))
        return evidence


def _agreeing(lookup: Candidate, model: Candidate) -> int:
    length = lookup.evidence % len(LENGTHS)
    return model.evidence * len(_SHORT) + sum(length >= first for first in _SHORT) - 1


@dataclass(slots=True)
class _HybridSession:
    """The state of a session: `known` includes draft tokens; `lookups` is None while a prompt is indexed."""

    ensemble: Ensemble
    lookups: SessionLookups | None = None
    known: list[int] = field(default_factory=list)
    history: DraftHistory[Candidates] = field(default_factory=DraftHistory)


def lookup_candidate(
    lookups: SessionLookups | None, proposal: ModelProposal, path: Sequence[int]
) -> Candidate | None:
    """Return what a lookup proposes after the session's tokens and `path`, if the grammar allows it."""
    if lookups is None:
        return None
    session = proposal.job.session
    ahead = [*session.tokens[session.confirmed :], *path]
    match = lookups.find(ahead, 1)
    if not match.found.tokens:
        return None
    if proposal.state is not None and not proposal.state.allowed_prefix(match.found.tokens, ahead):
        return None
    evidence = class_of(match) + (0 if proposal.job.slice.sampling.is_greedy else len(PRIOR))
    return Candidate(match.found.tokens[0], evidence, match.source)


class HybridStrategy:
    """Combine lookups and a model, calibrated by tenant and workload."""

    def __init__(self, lookups: Lookups, steps: ModelSteps) -> None:
        self._lookups = lookups
        self._steps = steps
        self._sessions: WeakKeyDictionary[DraftSession, _HybridSession] = WeakKeyDictionary()
        self._ensembles = ByKind(Ensemble, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Draft one token each with the model, then copy; none while a long prompt is being prefilled."""
        for drawn in self._steps.advance(
            [proposal for proposal in proposals if isinstance(proposal, ModelProposal)]
        ):
            candidates = Candidates(
                self._lookup_candidate(drawn.proposal), (Candidate(drawn.token, drawn.bucket),)
            )
            self._add(drawn.proposal, candidates)
            self._copy(drawn.proposal)

    def forget(self, session: DraftSession) -> None:
        self._sessions.pop(session, None)

    def _begin(self, job: DraftJob) -> ModelProposal:
        proposal, tokens = self._steps.open(job), job.session.tokens
        session = self._session_of(job)
        agreed = common_prefix_len(session.known, tokens)
        for candidates, _, confirmed in session.history.compare(job.session, agreed):
            session.ensemble.record(candidates, confirmed)
        session.known = list(tokens)
        session.lookups = self._lookups.follow(job)
        proposal.limit = job.k  # a lookup has no context window
        most = 0 if self._steps.read_states(proposal) else proposal.limit
        proposal.settle()
        for token, candidates in session.history.ready(len(tokens), most, rules_of(job.slice)):
            proposal.add(token, session.ensemble.choose(candidates)[1])
            proposal.sources.append(candidates.source_of(token))
            session.known.append(token)
        self._copy(proposal)
        self._steps.cut_back(proposal)
        return proposal

    def _session_of(self, job: DraftJob) -> _HybridSession:
        ensemble = self._ensembles.of(job)
        session = self._sessions.setdefault(job.session, _HybridSession(ensemble))
        session.ensemble = ensemble
        return session

    def _lookup_candidate(self, proposal: ModelProposal) -> Candidate | None:
        lookups = self._sessions[proposal.job.session].lookups
        return lookup_candidate(lookups, proposal, proposal.tokens)

    def _copy(self, proposal: ModelProposal) -> None:
        """Draft while `is_sure` of the lookup; finish where the model's context window ends."""
        ensemble = self._sessions[proposal.job.session].ensemble
        while not proposal.done:
            found = self._lookup_candidate(proposal)
            if found is None or not ensemble.is_sure(found):
                proposal.done = len(proposal.tokens) >= proposal.reach
                return
            self._add(proposal, Candidates(found, ()))

    def _add(self, proposal: ModelProposal, candidates: Candidates) -> None:
        session = self._sessions[proposal.job.session]
        token, chance = session.ensemble.choose(candidates)
        session.history.append(token, candidates)
        session.known.append(token)
        proposal.add(token, chance)
        proposal.sources.append(candidates.source_of(token))
        proposal.done = proposal.done or proposal.survival[-1] < _LEAST_SURVIVAL
