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

from galley.core.content import BlockChain, SessionKey
from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError
from galley.core.scheduler.batch import SchedulerCounts
from galley.core.scheduler.memory import KvFacts
from galley.core.scheduler.messages import BatchInfo, Extend, Response, VerifyRequest
from galley.core.scheduler.scheduler import MAX_ROWS, Linger
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


class TargetEngine(Protocol):
    """An engine that serves requests. All is called on the event loop, except `run`; one step at a time.

    Requests, responses and steps are those of `galley.core.scheduler.scheduler`, which documents the calls.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def times(self) -> StepTimes:
        """Return the times of steps as measured at the start."""

    @property
    def kv(self) -> KvFacts: ...

    @property
    def counts(self) -> SchedulerCounts: ...

    @property
    def queue_depth(self) -> int: ...

    @property
    def queue_times_ns(self) -> Sequence[int]:
        """Return the queue times, in ns, of the requests that started in the last step."""

    @property
    def current_batch(self) -> BatchInfo: ...

    def block_chain(self, key: SessionKey, start: int, prefix_hash: bytes) -> BlockChain | None: ...

    def submit(self, message: VerifyRequest, now: int) -> int: ...

    def extend(self, request_id: int, extension: Extend, now: int) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def expire(self, now: int) -> None: ...

    def drain(self) -> None: ...

    def abandon(self, error: GalleyError) -> None: ...

    def take_responses(self) -> list[Response]: ...

    def plan(self, now: int) -> StepPlan | Linger | None: ...

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        """Return the outcome of each chunk, in order; blocks. A `watch` gets the times.

        Raise if the whole step failed; the KV that its chunks were to write is then undefined.
        """

    def conclude(
        self, plan: StepPlan, outcomes: Sequence[StepOutcome], now: int, batch_span: bytes = b""
    ) -> BatchInfo: ...

    def fail(self, plan: StepPlan, error: GalleyError) -> None: ...
