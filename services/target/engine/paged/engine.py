"""The target's engine: one ragged forward pass over a paged KV pool, then all rows sampled in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from galley.core.cost.model import StepTimes
from galley.core.step import StepOutcome, StepPlan, StepTrace
from galley.engine.masking import MaskThread
from galley.engine.sampler import draw_masked
from galley.engine.sampling.draw import warm_up
from galley.engine.states import with_states
from services.target.engine.paged.measurement import measure
from services.target.engine.paged.target import PagedTarget
from services.target.engine.protocol import EngineInfo, EngineLost, Limits

if TYPE_CHECKING:
    from galley.engine.model import CausalModel
    from services.target.ranks.sharded import ShardedModel


class PagedEngine:
    """A `LoadedEngine` over a model, which may be sharded over ranks."""

    def __init__(
        self, model: CausalModel | ShardedModel, fingerprint: str, weights_digest: str = "", *, ranks: int = 1
    ) -> None:
        warm_up()
        self._model = model
        self._masks = MaskThread()
        info, kv = model.info, model.kv
        self._info = EngineInfo(
            model=info.name,
            tokenizer_hash=info.tokenizer_hash,
            context_window=min(info.context_window, kv.blocks * kv.block_tokens),
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            fingerprint=fingerprint,
            weights_digest=weights_digest,
            deterministic=info.deterministic,
            trees=info.trees,
            dtype=info.number_types,
            device=info.device,
            ranks=ranks,
            kv_block_tokens=kv.block_tokens,
            kv_blocks=kv.blocks,
            directory=info.directory,
            feature_size=info.hidden_size,
            feature_layers=info.layers,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def measure(self) -> StepTimes:
        return measure(self)

    def serve(self, times: StepTimes, limits: Limits) -> PagedTarget:
        return PagedTarget(self, times, limits, lambda: self._masks.waited_ns)

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        """Run one step; what cannot be sampled, such as NaN, is the outcome of its chunk alone.

        Raise EngineLost where the device fails: CUDA then refuses all that this process asks of it.
        """
        try:
            return self._run(plan, watch)
        except torch.AcceleratorError as error:
            raise EngineLost(f"the device {self.info.device} has failed") from error

    def _run(self, plan: StepPlan, watch: StepTrace | None) -> list[StepOutcome]:
        draws = [chunk.draw for chunk in plan.chunks if chunk.draw is not None]
        with self._masks.beside(draws, watch=watch) as masks:
            # [logit rows, vocab] and [feature rows, layers, hidden]
            logits, states = self._model.run_with_states(plan.chunks, plan.copies, watch, moves=plan.moves)
        drawn = iter(draw_masked(logits, draws, masks))
        outcomes = [None if chunk.draw is None else next(drawn) for chunk in plan.chunks]
        return with_states(plan.chunks, outcomes, states)
