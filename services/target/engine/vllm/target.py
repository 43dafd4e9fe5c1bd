"""A target over vLLM's engine core: Galley's scheduler chooses what is verified, vLLM what fits into a step.

The scheduler names all active sessions in each step, with the draft tokens that pay. vLLM divides prompts,
allocates blocks and preempts; a session that it does not finish in a step only gets its result later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError, Unavailable
from galley.core.scheduler.messages import BatchInfo, VerifyRequest
from galley.core.scheduler.scheduler import Linger
from galley.core.step import Computed, Sampled, StepOutcome, StepPlan, StepTrace
from services.target.engine.protocol import Limits, TargetEngine
from services.target.engine.vllm.measurement import measure
from services.target.engine.vllm.protocol import CoreFacts, CoreLost, SequenceStep, SteppedCore
from services.target.engine.vllm.sessions import Orders, VllmSessions


class VllmEngine:
    """A loaded core, until it serves."""

    def __init__(self, core: SteppedCore) -> None:
        self.info = core.info
        self._core = core

    def measure(self) -> StepTimes:
        return measure(self._core)

    def serve(self, times: StepTimes, limits: Limits) -> VllmTarget:
        return VllmTarget(self._core, times, limits)


class VllmTarget(TargetEngine):
    def __init__(self, core: SteppedCore, times: StepTimes, limits: Limits) -> None:
        info = core.info
        most = min(limits.max_sessions, core.max_sequences)
        self._sessions = VllmSessions(info.kv_blocks, info.kv_block_tokens, most)
        super().__init__(self._sessions, info, times, limits, divides_prompts=True)
        self.max_draft_tokens = min(limits.max_draft_tokens, core.max_draft_tokens)
        self._core = core
        self._is_lost = False
        self._orders = Orders((), (), {})  # of the step in progress, or of the last one
        self._done: tuple[list[SequenceStep], CoreFacts] | None = None  # what it has done, chunk by chunk

    def submit(self, message: VerifyRequest, now: int) -> int:
        item = super().submit(message, now)
        self._sessions.expect(message)
        return item

    def plan(self, now: int) -> StepPlan | Linger | None:
        step = super().plan(now)
        if isinstance(step, StepPlan):
            self._done = None
            self._orders = self._sessions.orders(
                [(self._active[chunk.key].message, chunk.draw) for chunk in step.chunks if chunk.draw]
            )
        return step

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:  # noqa: ARG002  # planned with its orders
        """Run the planned step on the engine's thread. Raise CoreLost if the core has failed."""
        orders, began_ns = self._orders, time.perf_counter_ns()
        try:
            self._core.end(orders.ended)
            for sequence in orders.added:
                self._core.add(sequence)
            steps = self._core.step(orders.drafts, orders.constrained)
            facts = self._core.facts()
        except CoreLost:
            self._is_lost = True
            raise
        if watch is not None:
            watch.forward_ns = forward_ns = time.perf_counter_ns() - began_ns
            if self.info.ranks == 1:
                watch.rank_ns = lambda: (forward_ns,)
        done = [steps[name] for name in orders.drafts]
        self._done = done, facts
        return [_outcome(step) for step in done]

    def conclude(
        self, plan: StepPlan, outcomes: Sequence[StepOutcome], now: int, batch_span: bytes = b""
    ) -> BatchInfo:
        steps, facts = self._done or ([], CoreFacts(0))
        for chunk, step in zip(plan.chunks, steps, strict=True):
            self._sessions.record(chunk.key, step)
            if step.rows and chunk.draw is not None:
                reached = len(chunk.draw.history) if isinstance(step.outcome, Sampled) else step.computed
                self.record_fed(chunk.key, max(0, reached - step.rows), step.verified)
        self._sessions.note(facts)
        return super().conclude(plan, outcomes, now, batch_span)

    def fail(self, plan: StepPlan, error: GalleyError) -> None:
        """End a failed step; once the core is lost, all requests end with it."""
        self._sessions.undo(self._orders, [chunk.key for chunk in plan.chunks])
        if self._done is not None:
            self._sessions.note(self._done[1])
        super().fail(plan, error)
        if self._is_lost:
            self.abandon(Unavailable("the engine core has failed"))

    def abandon(self, error: GalleyError) -> None:
        """End all requests, with their sequences; those too that a step was to end that has never run."""
        self._sessions.undo(self._orders, ())
        super().abandon(error)


def _outcome(step: SequenceStep) -> StepOutcome:
    return Computed(step.computed) if step.outcome is None else step.outcome
