"""Answers through a real gateway, with what it counted of its rounds.

An arm is how to speculate: `off` (also `plain`), `auto` (the gateway chooses) or `<strategy>-<k>`, as
`ngram-4`.
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
class Ask:
    """How a prompt is put; the same to every arm."""

    prompt: Prompt
    temperature: float
    seed: int
    max_tokens: int


def speculation_of(arm: str) -> Speculation:
    """`off` is speculation off, `ngram-4` that strategy at that k; ValueError if it is no arm."""
    if arm in {OFF, PLAIN}:
        return Speculation(off=True)
    if arm == AUTO:
        return Speculation()
    strategy, dash, k = arm.rpartition("-")
    if not (strategy and dash and k.isdigit()):
        raise ValueError(f"no arm {arm!r}: {OFF}, {AUTO} or <strategy>-<k>")
    return Speculation(k=int(k), strategy=strategy)


def no_clock() -> float:
    """CPU seconds where nobody counts them."""
    return 0.0


class GatewaySide:
    """A gateway, asked through its client; `cpu_s` says the CPU seconds that its stack has taken so far."""

    def __init__(self, client: AsyncClient, cpu_s: Callable[[], float] = no_clock) -> None:
        self._client = client
        self._cpu_s = cpu_s

    async def answer(self, arm: str, ask: Ask) -> Answer:
        """Stream one answer; raises GalleyRpcError where the stream does."""
        tokens: list[int] = []
        at_s: list[float] = []
        from_draft: list[bool] = []
        prompt_tokens = 0
        finished: pb.Finished | None = None
        cpu_before = self._cpu_s()
        began = time.perf_counter()
        stream = self._client.generate(
            [Message("user", ask.prompt.text)],
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            workload=ask.prompt.label,
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
            raise RuntimeError(f"{arm} ended {ask.prompt.id} without saying so")
        return Answer(
            prompt_id=ask.prompt.id,
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
    """Closed loops through a gateway, as `speculation` says (None: as the load's arm does)."""

    def __init__(
        self, client: AsyncClient, cpu_s: Callable[[], float] = no_clock, speculation: str | None = None
    ) -> None:
        self._cpu_s = cpu_s
        self._side = GatewaySide(client)
        self._speculation = speculation

    async def run(self, load: Load) -> LoopBlock:
        """Stream every answer of the load; the CPU seconds are of the whole block."""
        arm = load.arm if self._speculation is None else self._speculation

        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self._side.answer(
                arm, Ask(prompt, load.temperature, seed, prompt.max_tokens or load.max_tokens)
            )

        cpu_before, began_s = self._cpu_s(), time.perf_counter()
        came = await in_streams(load, answer)
        wall_s = time.perf_counter() - began_s
        cpu_s = self._cpu_s() - cpu_before
        return LoopBlock(load, came.answers, wall_s, cpu_s, came.asked_s, came.busy_s)
