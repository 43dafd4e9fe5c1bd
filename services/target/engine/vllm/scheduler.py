"""vLLM's scheduler, told before each step which sequences take part and what their draft tokens are.

vLLM verifies whatever `Request.spec_token_ids` holds when it schedules: any number of tokens, or none. So the
tokens are set at the last moment. Rules:

1. Only the requested sequences take part. The others keep their blocks, out of vLLM's sight for one step.
2. If blocks run short, paused sequences lose theirs first, the one that has been paused longest before the
   others. After them vLLM preempts the running one of the lowest priority, then the youngest.
3. The oldest sequence that waits always gets on: if there was no room for it, younger ones pause too.
4. Sequences that draw are scheduled before prompts that go on, so that a long prompt delays nobody's token.
5. The masks of sequences with a grammar are computed beside the forward pass, for the draft tokens that are
   verified. They reach the ranks in place of vLLM's own grammar bitmasks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from galley.core.errors import GalleyError
from galley.core.step import Draw
from galley.engine.masking import Mask, MaskThread


class StepScheduler(Scheduler):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """Schedules the `drafts` of one step; `scheduled` and `cached` say what the step took.

    `constrained` are the draws of the sequences of the step that have a grammar; `unmasked` are the errors of
    those whose mask failed in the last step.
    """

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafts: Mapping[str, tuple[int, ...]] = {}
        self.constrained: Mapping[str, Draw] = {}
        self.unmasked: dict[str, GalleyError] = {}
        self._mask_thread = MaskThread()
        self._masks: tuple[list[str], Future[list[Mask | None]]] | None = None
        self.scheduled: Mapping[str, int] = {}  # rows of the last step
        self.verified: Mapping[str, list[int]] = {}  # draft tokens among them
        self.cached: Mapping[str, int] = {}  # cached tokens of the sequences first scheduled in it
        self.kv_events: list[Any] = []  # until taken
        self.kv_event_publisher.publish = lambda batch: self.kv_events.extend(batch.events)
        self._paused: list[Request] = []  # running, but not in this step; the longest paused first
        self._aside: list[Request] = []  # waiting, but not in this step
        self._refused: Request | None = None  # found no room in the last step
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate

    def update_draft_token_ids(self, draft_token_ids: object) -> None:
        """Ignore vLLM's own proposer, which proposes nothing."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        requested = sorted(self.requests[name] for name in self.drafts if name in self.requests)
        self._set_aside(requested)
        self._pause(requested)
        for request in self.running:
            request.spec_token_ids = self._draft_tokens(request)
        self._refused = None
        try:
            output: SchedulerOutput = super().schedule(throttle_prefills)
        finally:
            self.running = [*self._paused, *self.running]
            for request in self._aside:
                self._enqueue_waiting_request(request)
        self.scheduled = output.num_scheduled_tokens
        self.verified = output.scheduled_spec_decode_tokens
        self.cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self._masks = self._start_masks()
        return output

    def _start_masks(self) -> tuple[list[str], Future[list[Mask | None]]] | None:
        drawing = [
            name
            for name in self.constrained
            if name in self.scheduled and not self.requests[name].is_prefill_chunk
        ]
        if not drawing:
            return None
        draws = [
            replace(self.constrained[name], draft_tokens=tuple(self.verified.get(name, ())))
            for name in drawing
        ]
        return drawing, self._mask_thread.start(draws)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> dict[str, Any] | None:  # noqa: ARG002  # vLLM's
        """Return the masks of the step's draws by sequence; vLLM calls it once the forward pass has begun."""
        self.unmasked = {}
        if self._masks is None:
            return None
        names, computed = self._masks
        masks = dict(zip(names, computed.result(), strict=True))
        self.unmasked = {name: mask for name, mask in masks.items() if isinstance(mask, GalleyError)}
        return {name: mask for name, mask in masks.items() if name not in self.unmasked}

    def forget_blocks(self, request: Request) -> list[int]:
        """Drop the blocks that only this sequence holds from the prefix cache; return their ids."""
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        own = {block.block_id for group in groups for block in group if block.ref_cnt == 1}
        self.kv_cache_manager.evict_blocks(own)
        return sorted(own)

    def recompute(self, request: Request) -> None:
        """Take a sequence's blocks; it is computed anew when it is next requested, without draft tokens."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def _set_aside(self, requested: Iterable[Request]) -> None:
        """Take the waiting sequences that are not requested out of vLLM's queues."""
        ids = {request.request_id for request in requested}
        self._aside = []
        for queue in (self.waiting, self.kv_holding_waiting):
            others = [request for request in queue if request.request_id not in ids]
            queue.remove_requests(others)
            self._aside += others

    def _pause(self, requested: Iterable[Request]) -> None:
        """Keep only those in `running` that take part, the ones that draw first."""
        oldest = min(self.waiting, default=None)
        taking = [
            request
            for request in requested
            if request.status == RequestStatus.RUNNING
            # Only the blocks of paused sequences can go to one that waits.
            and not (oldest is not None and oldest is self._refused and oldest < request)
        ][: self.max_num_running_reqs]
        ids = {request.request_id for request in taking}
        self._paused = [request for request in self.running if request.request_id not in ids]
        self.running = sorted(taking, key=_has_prompt)

    def _draft_tokens(self, request: Request) -> list[int]:
        return [] if _has_prompt(request) else list(self.drafts[request.request_id][: self.num_spec_tokens])

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does; if there are too few blocks, take those of paused sequences."""
        while (blocks := self._allocate_slots(request, *args, **kwargs)) is None:
            if not self._paused:
                if request.status != RequestStatus.RUNNING:
                    self._refused = request
                break
            victim = self._paused.pop(0)
            self._preempt_request(victim, time.monotonic())
            self.waiting.remove_request(victim)
            self._aside.append(victim)
        return blocks


def _has_prompt(request: Request) -> bool:
    """Return True if more than the last token is without KV."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
