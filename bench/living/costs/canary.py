"""Measure what a split of sessions between two versions of the draft costs at 16 streams.

One stack with two draft replicas of the same weights; the second has them under the version `canary`. So only
the machinery is measured: draws, routing, counts, and the rule. Where the rule ends a trial, by chance, the
block is left out. Each arm has a base with the same division of sessions between the two replicas:

- `half`: a canary with half of the sessions; its base `none` has no split, so that both replicas serve all.
- `small`: a canary with 5 % of the sessions; its base `drained` gives the second replica no session.

Each round has two tokens of the draft's model. So each round of each session uses the split. In mode AUTO few
rounds would, at 16 streams, and its decisions would differ from block to block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from bench.harness import Goal, at_least, at_most
from bench.living.costs.blocks import (
    STREAMS,
    Comparison,
    Figures,
    compare,
    differing,
    load_of,
    new_prompts,
    next_prompts,
    open_loops,
    report,
    run_block,
    temperature_of,
)
from bench.loops.sides import write_keys
from galley.bench.closed_loop import WARM_UP, LoopBlock, fixed_arm
from galley.common.draft_loading import send_draft
from galley.common.registry.trials import DraftVersions
from galley.core.names import MODEL
from galley.core.versions.split import Split
from galley.core.versions.state import VersionEvent
from galley.stack.options import StackOptions
from galley.stack.stack import Stack
from services.gateway.versions.keeper import READ_S

NONE, HALF, DRAINED, SMALL = "none", "half", "drained", "small"
BASES = {HALF: NONE, SMALL: DRAINED}
SHARES = {HALF: 0.5, SMALL: 0.05}
MOST_LOST = 0.005
CANARY = "canary"
_SPECULATION = fixed_arm(MODEL, 2)
_TURNS = 2
_APPLIED_S = READ_S + 0.3
"""Time in which a gateway has read a new split, or stored its counts."""
_TRIAL_TOKENS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CanaryCosts:
    """`sessions` has for each arm with a canary how many sessions it counted, and those of the canary."""

    figures: Sequence[Figures]
    sessions: Mapping[str, tuple[int, int]]
    differing_answers: int

    def compared(self) -> dict[str, Comparison]:
        return {arm: compare(self.figures, arm, base) for arm, base in BASES.items()}

    def goals(self) -> list[Goal]:
        goals = []
        for arm, of in self.compared().items():
            how = f"canary with {SHARES[arm]:.0%} of the sessions"
            goals.append(at_least("canary", f"tokens/s, {how}", of.speed, 1 - MOST_LOST, "x", digits=4))
            goals.append(at_most("canary", f"CPU a token, {how}", of.cpu, 1 + MOST_LOST, "x", digits=4))
        return goals


async def measure_canary(folder: Path, draft: Path, pairs: int, max_tokens: int) -> CanaryCosts:
    file = folder / "canary-keys.toml"
    keys = write_keys(file, (*BASES, *BASES.values()))
    options = StackOptions(drafts=2, max_load_mib=512, extra_args={"gateway": ["--api-keys-file", str(file)]})
    async with Stack(options) as stack, open_loops(stack, keys, _SPECULATION) as loops:
        async with grpc.aio.insecure_channel(stack.address("draft-2")) as channel:
            await send_draft(channel, draft, CANARY)
        trial = Trial(DraftVersions(stack.store_url))
        blocks: list[LoopBlock] = []
        found: list[Figures] = []
        prompts = new_prompts("canary")
        for pair in range(WARM_UP, pairs):
            chosen = next_prompts(prompts, STREAMS * _TURNS)
            for arm in _order(pair):
                await trial.begin(arm)
                load = load_of(pair, arm, temperature_of(pair), chosen, max_tokens)
                block, figures = await run_block(stack, loops[arm], load)
                if not await trial.end(arm):
                    print(f"canary: pair {pair + 1}, {arm}: the rule ended the trial; left out", flush=True)
                elif pair != WARM_UP:
                    blocks.append(block)
                    found.append(figures)
                    report("canary", figures)
        await trial.versions.close()
    return CanaryCosts(found, trial.sessions, differing(blocks))


class Trial:
    """The split of each arm, and the sessions that counted in it."""

    def __init__(self, versions: DraftVersions) -> None:
        self.versions = versions
        self.sessions = dict.fromkeys(BASES, (0, 0))
        self._epoch = 0

    async def begin(self, arm: str) -> None:
        """Put the split of an arm in force."""
        if arm in SHARES:
            state = await self.versions.try_version(CANARY, SHARES[arm], tokens=_TRIAL_TOKENS)
        else:
            before = await self.versions.read()
            split = Split(drained=frozenset({CANARY} if arm == DRAINED else ()))
            state = replace(before, split=split, epoch=before.epoch + 1)
            if not await self.versions.change(before.epoch, state, VersionEvent("drain", CANARY)):
                raise RuntimeError("the split has changed meanwhile")
        self._epoch = state.epoch
        await asyncio.sleep(_APPLIED_S)

    async def end(self, arm: str) -> bool:
        """Count the sessions of the arm. Return False, and count none, if its split did not last so long."""
        if arm in SHARES:
            await asyncio.sleep(_APPLIED_S)
        if (await self.versions.read()).epoch != self._epoch:
            return False
        if arm in SHARES:
            counts = await self.versions.counts(("", CANARY))
            stable, canary = counts[""].sessions, counts[CANARY].sessions
            of_all, of_canary = self.sessions[arm]
            self.sessions[arm] = of_all + stable + canary, of_canary + canary
        return True


def _order(pair: int) -> list[str]:
    """Return the arms, each beside its base; which is first rotates."""
    halves = [[HALF, NONE], [SMALL, DRAINED]]
    if pair % 2:
        halves = [half[::-1] for half in halves]
    if pair // 2 % 2:
        halves.reverse()
    return [arm for half in halves for arm in half]
