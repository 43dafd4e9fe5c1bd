"""Answers of a real gateway, with its counts of their rounds.

An arm is a way of speculating: `off`, `auto` (the gateway chooses) or `<strategy>-<k>`, such as `ngram-4`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from galley.bench.answers import Answer, Prompt, Rounds
from galley.bench.closed_loop import Load, LoopBlock, no_clock, run_load
from galley.client.client import AsyncClient
from galley.client.options import Message, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb

OFF, AUTO = "off", "auto"


def speculation_of(arm: str) -> Speculation:
    """Return the request's speculation for an arm. Raises ValueError if it is no arm."""
    if arm == OFF:
        return Speculation(off=True)
    if arm == AUTO:
        return Speculation()
    strategy, dash, k = arm.rpartition("-")
    if not (strategy and dash and k.isdigit()):
        raise ValueError(f"arm: must be {OFF}, {AUTO} or <strategy>-<k>, got {arm!r}")
    return Speculation(k=int(k), strategy=strategy)


class GatewayLoop:
    """Closed loops through a gateway, with the speculation of an arm (None: of the load's arm)."""

    def __init__(
        self, client: AsyncClient, cpu_s: Callable[[], float] = no_clock, speculation: str | None = None
    ) -> None:
        self._client = client
        self._cpu_s = cpu_s
        self._speculation = speculation

    async def run(self, load: Load) -> LoopBlock:
        arm = load.arm if self._speculation is None else self._speculation

        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self.answer(
                arm,
                prompt,
                temperature=load.temperature,
                seed=seed,
                max_tokens=prompt.max_tokens or load.max_tokens,
            )

        return await run_load(load, answer, self._cpu_s)

    async def answer(
        self, arm: str, prompt: Prompt, *, temperature: float, seed: int, max_tokens: int
    ) -> Answer:
        """Return one streamed answer. Raises GalleyRpcError."""
        at_s: list[float] = []
        began_s = time.perf_counter()
        stream = self._client.generate(
            [Message("user", prompt.text)],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            workload=prompt.label,
            speculation=speculation_of(arm),
        )
        async for event in stream:
            at_s += [time.perf_counter() - began_s] * len(event.chunk.token_ids)
        wall_s = time.perf_counter() - began_s
        if stream.finished is None:
            raise RuntimeError(f"{arm}: {prompt.id} ended without a reason")
        return Answer(tuple(stream.token_ids), tuple(at_s), wall_s, _rounds(stream.finished.speculation))


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
        round_ns=stats.round_ns,
        exposed_draft_ns=stats.exposed_draft_ns,
        draft_compute_ns=stats.draft_compute_ns,
        target_compute_ns=stats.verify_compute_ns,
    )
