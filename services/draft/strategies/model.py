"""Draft with a small model that has the target's tokenizer.

Draft tokens are kept beside the KV cache, so those that the next request of a session still needs cost no
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from galley.core.content import common_prefix_len
from galley.core.lookup.calibration import Calibration
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.history import DraftHistory
from services.draft.strategies.lookups import ByKind
from services.draft.strategies.model_steps import CONFIDENCES, ModelProposal, ModelSteps, rules_of

# Weight of the prior, in verdicts; and workloads whose acceptance rate is kept.
_STRENGTH = 8.0
_WORKLOADS = 256


class ModelStrategy:
    """Draft with a model, calibrated by tenant and workload."""

    def __init__(self, steps: ModelSteps) -> None:
        self._steps = steps
        # Draft tokens of each session, with their confidence buckets.
        self._history: WeakKeyDictionary[DraftSession, DraftHistory[int]] = WeakKeyDictionary()
        self._calibrations = ByKind(_calibration, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """Return proposals that hold the reusable tokens of earlier ones."""
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Draft one token each, but none while a long prompt is being prefilled."""
        for drawn in self._steps.advance(
            [proposal for proposal in proposals if isinstance(proposal, ModelProposal)]
        ):
            job = drawn.proposal.job
            self._history[job.session].append(drawn.token, drawn.bucket)
            drawn.proposal.add(drawn.token, self._calibrations.of(job).chance(drawn.bucket))

    def _begin(self, job: DraftJob) -> ModelProposal:
        proposal, session = self._steps.open(job), job.session
        history = self._history.setdefault(session, DraftHistory())
        calibration = self._calibrations.of(job)
        agreed = common_prefix_len(proposal.cache.tokens, session.tokens)
        for bucket, drafted, confirmed in history.compare(session, agreed):
            calibration.record(bucket, drafted == confirmed)
        proposal.settle()
        for token, bucket in history.ready(len(session.tokens), proposal.limit, rules_of(job.slice)):
            proposal.add(token, calibration.chance(bucket))
        self._steps.cut_back(proposal)
        return proposal


def _calibration() -> Calibration:
    prior = CONFIDENCES * 2
    return Calibration(prior, _STRENGTH)
