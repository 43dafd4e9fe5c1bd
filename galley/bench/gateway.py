"""Answers of a real gateway, with its counts of their rounds.

An arm is a way of speculating: `off` (also `plain`), `auto` (the gateway chooses) or `<strategy>-<k>`, such
as `ngram-4`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from galley.bench.answers import Answer, Prompt, Rounds
from galley.bench.closed_loop import Load, LoopBlock, in_streams
from galley.client.client import AsyncClient, Message, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb

OFF, PLAIN, AUTO = "off", "plain", "auto"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its options, the same for every arm."""

    prompt: Prompt
    temperature: float
    seed: int
    max_tokens: int


def speculation_of(arm: str) -> Speculation:
    """Return the request's speculation for an arm. Raises ValueError if it is no arm."""
    if arm in {OFF, PLAIN}:
        return Speculation(off=True)
    if arm == AUTO:
        return Speculation()
    strategy, dash, k = arm.rpartition("-")
    if not (strategy and dash and k.isdigit()):
        raise ValueError(f"arm: must be {OFF}, {AUTO} or <strategy>-<k>, got {arm!r}")
    return Speculation(k=int(k), strategy=strategy)


def no_clock() -> float:
    """Return 0 CPU seconds, where they are not measured."""
    return 0.0


class GatewaySide:
    """A gateway behind its client; `cpu_s` returns the CPU seconds that its stack has used so far."""

    def __init__(self, client: AsyncClient, cpu_s: Callable[[], float] = no_clock) -> None:
        self._client = client
        self._cpu_s = cpu_s

    async def answer(self, arm: str, request: Request) -> Answer:
        """Return one streamed answer. Raises GalleyRpcError."""
        tokens: list[int] = []
        at_s: list[float] = []
        from_draft: list[bool] = []
        prompt_tokens = 0
        finished: pb.Finished | None = None
        cpu_before = self._cpu_s()
        began = time.perf_counter()
        stream = self._client.generate(
            [Message("user", request.prompt.text)],
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            workload=request.prompt.label,
            speculation=speculation_of(arm),
        )
        async for event in stream:
            now = time.perf_counter() - began
            match event.WhichOneof("event"):
                case "started":
                    prompt_tokens = event.started.prompt_tokens
                case "chunk":
                    tokens += event.chunk.token_ids
                    from_draft += event.chunk.from_draft
                    at_s += [now] * len(event.chunk.token_ids)
                case "finished":
                    finished = event.finished
                case _:
                    pass
        wall_s = time.perf_counter() - began
        if finished is None:
            raise RuntimeError(f"{arm}: {request.prompt.id} ended without a reason")
        return Answer(
            prompt_id=request.prompt.id,
            prompt_tokens=prompt_tokens,
            tokens=tuple(tokens),
            at_s=tuple(at_s),
            wall_s=wall_s,
            cpu_s=self._cpu_s() - cpu_before,
            from_draft=tuple(from_draft),
            rounds=_rounds(finished.speculation),
        )


def _rounds(stats: pb.SpeculationStats) -> Rounds:
    return Rounds(
        rounds=stats.rounds,
        proposed=stats.proposed,
        cancelled=stats.cancelled,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        accepted_at=tuple(stats.accepted_at),
        verified_at=tuple(stats.verified_at),
        orchestration_ns=tuple(stats.orchestration_ns),
        round_ns=stats.round_ns,
        exposed_draft_ns=stats.exposed_draft_ns,
        draft_compute_ns=stats.draft_compute_ns,
        target_compute_ns=stats.verify_compute_ns,
    )


class GatewayLoop:
    """Closed loops through a gateway, with the speculation of an arm (None: of the load's arm)."""

    def __init__(
        self, client: AsyncClient, cpu_s: Callable[[], float] = no_clock, speculation: str | None = None
    ) -> None:
        self._cpu_s = cpu_s
        self._side = GatewaySide(client)
        self._speculation = speculation

    async def run(self, load: Load) -> LoopBlock:
        """Run the load; the CPU seconds are of the whole block."""
        arm = load.arm if self._speculation is None else self._speculation

        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self._side.answer(
                arm, Request(prompt, load.temperature, seed, prompt.max_tokens or load.max_tokens)
            )

        cpu_before, began_s = self._cpu_s(), time.perf_counter()
        looped = await in_streams(load, answer)
        wall_s = time.perf_counter() - began_s
        cpu_s = self._cpu_s() - cpu_before
        return LoopBlock(load, looped.answers, wall_s, cpu_s, looped.requested_s, looped.busy_s)
