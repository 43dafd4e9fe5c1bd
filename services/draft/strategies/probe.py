"""Have a model propose before it serves, so that no kernel is compiled for the first session."""

from __future__ import annotations

from galley.core.content import prefix_hash
from galley.core.errors import UnsupportedModel
from galley.core.features import States, state_bytes
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from galley.engine.model import CausalModel, prompt_of
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.draft.strategies.trees import ByWidth, TreeStrategy

_TOKENS = 4
_WIDTHS = (1, 2)
_SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))


def refuse_silent(steps: ModelSteps, model: CausalModel) -> None:
    """Raise UnsupportedModel unless the model proposes chains and trees, greedy and sampled."""
    strategy = ByWidth(ModelStrategy(steps), TreeStrategy(steps))
    for width in _WIDTHS:
        for sampling in _SAMPLING:
            proposal = _proposal(strategy, _job(model, sampling, width))
            if proposal.error is not None or not proposal.tokens:
                raise UnsupportedModel(f"{model.info.name}: must propose tokens, got {proposal.error}")


def _proposal(strategy: Strategy, job: DraftJob) -> Proposal:
    [proposal] = strategy.begin([job])
    while not proposal.done and proposal.error is None:
        strategy.advance([proposal])
    return proposal


def _job(model: CausalModel, sampling: SamplingParams, width: int) -> DraftJob:
    session = DraftSession()
    session.tokens = prompt_of(model.info)
    session.confirmed = len(session.tokens)
    if model.features is not None:
        known = 1
        size = state_bytes(len(model.features.layers), model.features.size)
        session.states = States(0, known, bytes(known * size))
    whole = Slice(
        key=(b"", ""),
        start=0,
        tokens=session.tokens,
        prefix_hash=prefix_hash(()),
        prompt_len=len(session.tokens),
        max_position=len(session.tokens) + _TOKENS + 1,
        sampling=sampling,
    )
    return DraftJob(whole, session, _TOKENS, width=width)
