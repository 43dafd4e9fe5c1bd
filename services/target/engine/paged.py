"""The target's engine: one ragged forward pass over a paged KV pool, then all rows sampled in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from galley.core.step import StepChunk, StepOutcome, StepPlan, StepTrace
from galley.engine.batch import ModelInfo
from galley.engine.sampler import draw_all
from galley.engine.sampling.draw import warm_up
from services.target.engine.protocol import EngineInfo

if TYPE_CHECKING:
    from galley.engine.model import KvPool


class PagedModel(Protocol):
    """The interface of a model: `galley.engine.model.CausalModel`, or one sharded over ranks."""

    @property
    def info(self) -> ModelInfo:
        """Return what the whole model is."""

    @property
    def kv(self) -> KvPool:
        """Return the pool whose blocks the chunks name."""

    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
    ) -> Tensor:
        """Return float32 logits [sum of want_logits, vocab], rows in the order of the chunks."""


class PagedEngine:
    """A `TargetEngine` over a `PagedModel`."""

    def __init__(self, model: PagedModel, fingerprint: str, *, ranks: int = 1) -> None:
        warm_up()
        self._model = model
        self._info = _engine_info(model, fingerprint, ranks)

    @property
    def info(self) -> EngineInfo:
        """Return what the model is."""
        return self._info

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        """Run one step; what cannot be sampled, such as NaN, is the outcome of its chunk alone."""
        logits = self._model.run(plan.chunks, plan.copies, watch)  # [logit rows, vocab]
        drawn = iter(draw_all(logits, [chunk.draw for chunk in plan.chunks if chunk.draw is not None]))
        return [None if chunk.draw is None else next(drawn) for chunk in plan.chunks]


def _engine_info(model: PagedModel, fingerprint: str, ranks: int) -> EngineInfo:
    info, kv = model.info, model.kv
    return EngineInfo(
        model=info.name,
        tokenizer_hash=info.tokenizer_hash,
        context_window=min(info.context_window, kv.blocks * kv.block_tokens),
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        fingerprint=fingerprint,
        deterministic=info.deterministic,
        dtype=info.dtype,
        device=info.device,
        ranks=ranks,
        kv_block_tokens=kv.block_tokens,
        kv_blocks=kv.blocks,
    )
