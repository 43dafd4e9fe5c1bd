"""The interface of a target's engines, at the level of requests.

The service, the step loop, the lease, metrics and spans know only this. `loading.load_engine` returns a
`LoadedEngine`. It is measured, and then serves: `serve` makes it a `TargetEngine`, which decides on the event
loop what a step computes, and computes it on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from galley.core.cost.model import StepTimes
from galley.core.scheduler.memory import KvMemory
from galley.core.scheduler.scheduler import MAX_ROWS, Scheduler
from galley.core.step import StepOutcome, StepPlan, StepTrace


class EngineLost(Exception):
    """The engine cannot run a step any more, such as after an error of its device."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a target. Each rank holds its shard of all `kv_blocks`.

    `fingerprint` names its build, `weights_digest` the model's files, which are in `directory`; empty if
    unknown. `lora_adapters` names the LoRA adapters that a request may choose; the fingerprint covers their
    weights. `trees` is True if the engine verifies trees; otherwise it verifies their main paths. It returns
    states of `feature_size` numbers after any of `feature_layers` layers; of no numbers: it returns none.
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
    weights_digest: str = ""
    directory: Path = Path()
    lora_adapters: tuple[str, ...] = ()
    trees: bool = False
    feature_size: int = 0
    feature_layers: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    max_draft_tokens: int = 16
    max_waiting: int = 1024
    max_sessions: int = 64
    max_rows: int = MAX_ROWS
    max_linger_ms: float = 0.0
    max_itl_ms: float = 0.0


class LoadedEngine(Protocol):
    """An engine whose model is loaded, before it serves."""

    @property
    def info(self) -> EngineInfo:
        """Return facts that never change."""

    def measure(self) -> StepTimes:
        """Return what steps cost on this machine; blocks for seconds. Call it before `serve`."""

    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine: ...


class TargetEngine(Scheduler):
    """A scheduler with the engine that runs its steps. All is called on the event loop, except `run`."""

    def __init__(
        self,
        kv: KvMemory,
        info: EngineInfo,
        times: StepTimes,
        limits: Limits,
        *,
        max_itl_ns: int = 0,
        divides_prompts: bool = False,
    ) -> None:
        """Keep `times` as measured at the start; the scheduler learns from there."""
        super().__init__(
            kv,
            times,
            max_rows=limits.max_rows,
            max_waiting=limits.max_waiting,
            max_linger_ns=round(limits.max_linger_ms * 1e6),
            max_itl_ns=max_itl_ns,
            divides_prompts=divides_prompts,
        )
        self.max_draft_tokens = limits.max_draft_tokens
        self.info = info
        self.limits = limits
        self.times = times

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        """Return the outcome of each chunk, in order; blocks. A `watch` gets the times.

        Raise if the whole step failed; the KV that its chunks were to write is then undefined.
        """
        raise NotImplementedError
