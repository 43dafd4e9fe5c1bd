"""Walk along known answers with the draft's own strategies.

A seeded answer is what the target samples, whatever is proposed. So it is known at each of its positions
which draft tokens would be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from bench.acceptance.prices import Visit
from galley.core.content import prefix_hash
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from galley.core.trees import depths, follow
from galley.engine.model import CausalModel
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.draft.strategies.trees import TreeProposal, TreeStrategy

# Draft tokens of a chain and of a tree.
CHAIN_TOKENS = 16
TREE_NODES = 32


@dataclass(frozen=True, slots=True)
class Walk:
    """The visits of an answer, by position: chains, trees, and the draft's first candidates."""

    chains: tuple[Visit, ...]
    trees: tuple[Visit, ...]
    listed: tuple[tuple[int, ...], ...]


class Walker:
    """Propose at every position of answers; what was accepted before is learned from, as in service."""

    def __init__(self, model: CausalModel, width: int) -> None:
        steps = ModelSteps(model)
        self._chains, self._trees = ModelStrategy(steps), TreeStrategy(steps)
        self._width = width
        self.step_s = 0.0
        """The mean time of a step of the draft that reads one token."""
        self._steps = 0

    def walk(self, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams) -> Walk:
        chain, tree = DraftSession(), DraftSession()
        chains, trees, listed = [], [], []
        for end in range(len(answer)):
            tokens, rest = [*prompt, *answer[:end]], answer[end:]
            proposal = self._chain(_job(chain, tokens, len(prompt), sampling, CHAIN_TOKENS, 1))
            chains.append(_visit(proposal, rest))
            (grown,) = self._trees.begin([_job(tree, tokens, len(prompt), sampling, TREE_NODES, self._width)])
            while not grown.done:
                self._trees.advance([grown])
            trees.append(_visit(grown, rest))
            listed.append(_listed(grown))
        return Walk(tuple(chains), tuple(trees), tuple(listed))

    def _chain(self, job: DraftJob) -> Proposal:
        (proposal,) = self._chains.begin([job])
        while not proposal.done:
            began_s, known = perf_counter(), len(proposal.tokens)
            self._chains.advance([proposal])
            if known:
                self._steps += 1
                self.step_s += (perf_counter() - began_s - self.step_s) / self._steps
        return proposal


def _job(
    session: DraftSession, tokens: list[int], prompt_len: int, sampling: SamplingParams, k: int, width: int
) -> DraftJob:
    own = Slice(
        key=(f"{sampling.temperature}".encode(), "heldout"),
        start=0,
        tokens=tokens,
        prefix_hash=prefix_hash(()),
        prompt_len=prompt_len,
        max_position=len(tokens) + k + 1,
        sampling=sampling,
    )
    session.tokens, session.confirmed = tokens, len(tokens)
    return DraftJob(own, session, k, width=width)


def _visit(proposal: Proposal, rest: Sequence[int]) -> Visit:
    accepted = follow(proposal.tokens, proposal.parents, rest)
    all_depths = depths(proposal.parents, len(proposal.tokens))
    return Visit(tuple(accepted), tuple(all_depths), tuple(proposal.survival))


def _listed(proposal: TreeProposal) -> tuple[int, ...]:
    candidates = proposal.end.place.candidates
    return () if candidates is None else tuple(candidate.token for candidate in candidates.model)
