"""The interface behind which the target's engine can be replaced: plans of plain values in, outcomes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from galley.core.step import StepOutcome, StepPlan, StepTrace


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a target; `fingerprint` names the build that its bits depend on.

    Over all `ranks` it has `kv_blocks` blocks of `kv_block_tokens` tokens each, which bound
    `context_window`.
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
    """An engine; called from one thread, one plan at a time."""

    @property
    def info(self) -> EngineInfo:
        """Return the engine's facts, which never change."""

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        """Run one step; return the outcome of each chunk, in order. A `watch` gets the times.

        Raises if the whole step failed; the KV that its chunks were to write is then undefined.
        """
