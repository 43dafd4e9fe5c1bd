"""Measure by how much a swap of the draft's weights delays streams that have drafts in every round.

One stack with one draft replica. Blocks alternate: all streams answer one prompt each with four tokens of the
draft's model in each round; in `swap` the replica is given weights meanwhile, in `calm` it is not. The
answers of a pair are the same, so each stream of `swap` is compared with itself in `calm`:

- `missed`: rounds that verified no draft token, by the gateway's count of each answer.
- `longest`: the longest time between two messages with tokens, in units of the median of `calm`. It counts
  whole if a part of it is between the begin of the load and half a second after its end. In `calm` it is the
  same time.

The weights are those that serve already, under another version, and pass through all of a load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import grpc

from bench.harness import Goal
from bench.living.costs.blocks import new_prompts, next_prompts, temperature_of
from bench.loops.sides import write_keys
from galley.bench.closed_loop import fixed_arm, speculation_of
from galley.bench.summary import MS, Interval, median_interval
from galley.bench.workloads import Prompt
from galley.client.client import AsyncClient
from galley.client.options import Message
from galley.common.draft_loading import send_draft
from galley.core.names import MODEL
from galley.stack.options import StackOptions
from galley.stack.stack import Stack

CALM, SWAP = "calm", "swap"
MOST_ROUNDS = 1
_LEAST_DRAFTED = 0.5
"""Share of the rounds of `calm` with draft tokens, below which a swap takes nothing away."""
_SPECULATION = fixed_arm(MODEL, 4)
_BEFORE_S = 0.5
"""Time from the first token of the last stream until the load."""
_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer: when its messages with tokens came, its rounds, and those that verified no draft token."""

    at_s: tuple[float, ...]
    tokens: tuple[int, ...]
    rounds: int
    missed: int

    def gaps(self, from_s: float, to_s: float) -> list[float]:
        """Return the times between two messages that were at least in part within this time."""
        return [after - before for before, after in pairwise(self.at_s) if after >= from_s and before <= to_s]

    def messages(self, from_s: float, to_s: float) -> int:
        """Return the number of messages within this time."""
        return sum(from_s <= at_s <= to_s for at_s in self.at_s)


@dataclass(frozen=True, slots=True)
class Swapped:
    """One pair; lists have a value for each stream. `load_s` is the time of the load.

    `missed` are rounds without draft tokens in `swap` less those in `calm`, where `calm_drafted` is the share
    of rounds with some. Gaps are in units of `round_ms`, the median of `calm`. `speed` is the ratio of
    messages within the time of the load, swap over calm.
    """

    streams: int
    load_s: float
    missed: Sequence[int]
    calm_missed: Sequence[int]
    calm_drafted: float
    round_ms: float
    longest: Sequence[float]
    calm_longest: Sequence[float]
    speed: float
    differing_answers: int

    @property
    def delays(self) -> list[float]:
        """Return by how many rounds the longest gap of each stream was longer than in `calm`."""
        return [swap - calm for swap, calm in zip(self.longest, self.calm_longest, strict=True)]


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """The pairs, and the numbers of streams that were to be measured."""

    pairs: Sequence[Swapped]
    streams: Sequence[int]

    def of(self, streams: int) -> list[Swapped]:
        return [pair for pair in self.pairs if pair.streams == streams]

    def delay(self, streams: int) -> Interval:
        """Return the median over swaps of the largest delay of a stream, in rounds."""
        return median_interval([max(pair.delays) for pair in self.of(streams)])

    def goals(self) -> list[Goal]:
        return [goal for streams in self.streams for goal in self._goals(streams)]

    def _goals(self, streams: int) -> list[Goal]:
        pairs = self.of(streams)
        if not pairs:
            what = f"pairs whose answers lasted as long as the load, {streams} streams"
            return [Goal("swap", what, "0", ">= 1", met=False)]
        delay = self.delay(streams)
        missed = [of for pair in pairs for of in pair.missed]
        drafted = min(pair.calm_drafted for pair in pairs)
        has_drafts = drafted >= _LEAST_DRAFTED
        rounds = Goal(
            "swap",
            f"rounds that a swap took the draft tokens from, most of a stream, {streams} streams",
            f"{max(missed)} (median {median(missed):g}; calm: tokens in {drafted:.0%} of the rounds)",
            f"<= {MOST_ROUNDS}",
            has_drafts and max(missed) <= MOST_ROUNDS,
        )
        gap = Goal(
            "swap",
            f"longest gap of the most delayed stream beside calm, in rounds, median swap, {streams} streams",
            str(delay),
            f"<= {MOST_ROUNDS}",
            has_drafts and delay.median <= MOST_ROUNDS,
        )
        return [rounds, gap]


async def measure_swap(folder: Path, draft: Path, pairs: int, tokens_of: Mapping[int, int]) -> SwapCosts:
    """Measure with each number of streams; `tokens_of` has the length of their answers."""
    file = folder / "swap-keys.toml"
    keys = write_keys(file, (CALM, SWAP))
    options = StackOptions(max_load_mib=512, extra_args={"gateway": ["--api-keys-file", str(file)]})
    found = []
    async with (
        Stack(options) as stack,
        AsyncClient(stack.gateways[0], api_key=keys[CALM]) as calm,
        AsyncClient(stack.gateways[0], api_key=keys[SWAP]) as swap,
        grpc.aio.insecure_channel(stack.address("draft")) as channel,
    ):
        clients = {CALM: calm, SWAP: swap}
        for streams, tokens in tokens_of.items():
            prompts = new_prompts(f"swap-{streams}")
            for pair in range(-1, pairs):
                chosen = next_prompts(prompts, streams)

                runs = {}
                for arm in (CALM, SWAP) if pair % 2 else (SWAP, CALM):
                    block = _Block(clients[arm], temperature_of(pair), tokens)
                    version = f"swap-{streams}-{pair + 1}"
                    load = partial(send_draft, channel, draft, version) if arm == SWAP else _nothing
                    runs[arm] = await block.run(chosen, load)
                if pair < 0:
                    continue
                if (swapped := compared(runs[SWAP], runs[CALM])) is None:
                    print(
                        f"swap: pair {pair + 1}: answers ended before the load did: --swap-tokens", flush=True
                    )
                    continue
                found.append(swapped)
                _report(pair, swapped)
    return SwapCosts(found, list(tokens_of))


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of a block; the load began at `began_s` and took `load_s`. Times are of one clock."""

    streams: Sequence[Stream]
    began_s: float
    load_s: float


def compared(swap: Run, calm: Run) -> Swapped | None:
    """Return how the streams of a swap differ from the same ones without; None if a stream was too short."""
    window_s = swap.load_s + _AFTER_S
    gaps, messages = {}, {}
    for name, run in ((SWAP, swap), (CALM, calm)):
        ends_s = run.began_s + window_s
        if min(stream.at_s[-1] for stream in run.streams) < ends_s:
            return None
        gaps[name] = [stream.gaps(run.began_s, ends_s) for stream in run.streams]
        messages[name] = sum(stream.messages(run.began_s, ends_s) for stream in run.streams)
    round_s = median(gap for of in gaps[CALM] for gap in of)
    return Swapped(
        streams=len(swap.streams),
        load_s=swap.load_s,
        missed=[of.missed - base.missed for of, base in zip(swap.streams, calm.streams, strict=True)],
        calm_missed=[of.missed for of in calm.streams],
        calm_drafted=1 - sum(of.missed for of in calm.streams) / sum(of.rounds for of in calm.streams),
        round_ms=MS * round_s,
        longest=[max(of) / round_s for of in gaps[SWAP]],
        calm_longest=[max(of) / round_s for of in gaps[CALM]],
        speed=messages[SWAP] / messages[CALM],
        differing_answers=sum(
            of.tokens != base.tokens for of, base in zip(swap.streams, calm.streams, strict=True)
        ),
    )


class _Block:
    """The answers of one caller, all at once."""

    def __init__(self, client: AsyncClient, temperature: float, tokens: int) -> None:
        self._client = client
        self._temperature = temperature
        self._tokens = tokens

    async def run(self, prompts: Sequence[Prompt], load: Callable[[], Awaitable[object]]) -> Run:
        """Answer the prompts, and await `load` meanwhile."""
        first_tokens = [asyncio.Event() for _ in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._answer(prompt, event))
                for prompt, event in zip(prompts, first_tokens, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in first_tokens))
            await asyncio.sleep(_BEFORE_S)
            began_s = time.perf_counter()
            await load()
            load_s = time.perf_counter() - began_s
        return Run([task.result() for task in tasks], began_s, load_s)

    async def _answer(self, prompt: Prompt, first_tokens: asyncio.Event) -> Stream:
        at_s: list[float] = []
        stream = self._client.stream(
            [Message(**message) for message in prompt.messages],
            max_tokens=self._tokens,
            ignore_eos=True,
            temperature=self._temperature,
            seed=1,
            speculation=speculation_of(_SPECULATION),
        )
        async for event in stream:
            if event.chunk.token_ids:
                at_s.append(time.perf_counter())
                first_tokens.set()
        if stream.finished is None:
            raise RuntimeError(f"{prompt.id} ended without a reason")
        stats = stream.finished.speculation
        drafted = stats.verified_at[0] if stats.verified_at else 0
        return Stream(tuple(at_s), tuple(stream.tokens), stats.rounds, stats.rounds - drafted)


async def _nothing() -> None:
    """Load nothing."""


def _report(pair: int, of: Swapped) -> None:
    print(
        f"swap: pair {pair + 1}, {of.streams} streams: loaded in {of.load_s:.2f} s, a round takes "
        f"{of.round_ms:.0f} ms; rounds without drafts {list(of.missed)} more than {list(of.calm_missed)}; "
        f"longest gap {max(of.longest):.1f} rounds beside {max(of.calm_longest):.1f}; "
        f"messages meanwhile {of.speed:.2f}x; {of.differing_answers} answers differ",
        flush=True,
    )
