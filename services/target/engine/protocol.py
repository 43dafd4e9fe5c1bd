"""The seam behind which the target's engine can be replaced whole: plans of plain values in, outcomes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from galley.core.step import StepOutcome, StepPlan, StepTrace


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a target says of itself; `fingerprint` names the build that its bits depend on.

    Over all `ranks` it has `kv_blocks` blocks of `kv_block_tokens` tokens each; `context_window` is no more
    than they hold.
    """

    model: str
    tokenizer_hash: str
    context_window: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    deterministic: bool
    dtype: str
    device: str
    ranks: int
    kv_block_tokens: int
    kv_blocks: int


class TargetEngine(Protocol):
    """Called from one thread, one plan at a time."""

    @property
    def info(self) -> EngineInfo:
        """Fixed for the life of the engine."""

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        """Carry out one pass; the outcome of each chunk, in order. A `watch` is told what it took.

        Raises if the whole pass came to nothing; what its chunks were to write is then unknown.
        """
