"""Draft each token by lookup or by model, whichever is more likely right.

While the lookup is nearly certain, the model takes no step, so a copied passage is cheap. Elsewhere the model
takes a step and the likelier token of the two is drafted (`ensemble.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from galley.core.content import common_prefix_len
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.ensemble import Candidate, Candidates, Ensemble
from services.draft.strategies.history import DraftHistory
from services.draft.strategies.lookups import PRIOR, ByKind, Lookups, SessionLookups, class_of
from services.draft.strategies.model_steps import ModelProposal, ModelSteps, rules_of

_WORKLOADS = 256
# A token that is less likely to be accepted is not worth a step.
_LEAST_SURVIVAL = 0.03


@dataclass(slots=True)
class _HybridSession:
    """The state of a session: `known` are its tokens and draft tokens at the last call.

    `ensemble` is that of its workload; `lookups` is None while a long prompt is still being indexed.
    """

    ensemble: Ensemble
    lookups: SessionLookups | None = None
    known: list[int] = field(default_factory=list)
    history: DraftHistory[Candidates] = field(default_factory=DraftHistory)


class HybridStrategy:
    """Combine lookups and a model, calibrated by tenant and workload."""

    def __init__(self, lookups: Lookups, steps: ModelSteps) -> None:
        self._lookups = lookups
        self._steps = steps
        self._sessions: WeakKeyDictionary[DraftSession, _HybridSession] = WeakKeyDictionary()
        self._ensembles = ByKind(Ensemble, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """Return proposals with what can be reused and copied."""
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Draft one token each with the model, then copy; none while a long prompt is being prefilled."""
        for drawn in self._steps.advance(
            [proposal for proposal in proposals if isinstance(proposal, ModelProposal)]
        ):
            candidates = Candidates(
                self._lookup_candidate(drawn.proposal), Candidate(drawn.token, drawn.bucket)
            )
            self._add(drawn.proposal, candidates)
            self._copy(drawn.proposal)

    def _begin(self, job: DraftJob) -> ModelProposal:
        proposal, tokens = self._steps.open(job), job.session.tokens
        session = self._session_of(job)
        agreed = common_prefix_len(session.known, tokens)
        for candidates, _, confirmed in session.history.compare(job.session, agreed):
            session.ensemble.record(candidates, confirmed)
        session.known = list(tokens)
        session.lookups = self._lookups.follow(job)
        proposal.limit = job.k  # a lookup has no context window
        proposal.settle()
        for token, candidates in session.history.ready(len(tokens), proposal.limit, rules_of(job.slice)):
            proposal.add(token, session.ensemble.choose(candidates)[1])
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
        """Return the lookup's candidate for the next token."""
        session = proposal.job.session
        lookups = self._sessions[session].lookups
        if lookups is None:
            return None
        match = lookups.find([*session.tokens[session.confirmed :], *proposal.tokens], 1)
        if not match.found.tokens:
            return None
        evidence = class_of(match) + (0 if proposal.job.slice.sampling.greedy else len(PRIOR))
        return Candidate(match.found.tokens[0], evidence)

    def _copy(self, proposal: ModelProposal) -> None:
        """Draft while the lookup is certain; finish where the model's context window ends."""
        ensemble = self._sessions[proposal.job.session].ensemble
        while not proposal.done:
            found = self._lookup_candidate(proposal)
            if found is None or not ensemble.is_sure(found):
                proposal.done = len(proposal.tokens) >= proposal.reach
                return
            self._add(proposal, Candidates(found, None))

    def _add(self, proposal: ModelProposal, candidates: Candidates) -> None:
        session = self._sessions[proposal.job.session]
        token, chance = session.ensemble.choose(candidates)
        session.history.append(token, candidates)
        session.known.append(token)
        proposal.add(token, chance)
        proposal.done = proposal.done or proposal.survival[-1] < _LEAST_SURVIVAL
