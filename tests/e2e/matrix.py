"""The settings under which one prompt must give one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from galley.client.client import AsyncClient
from galley.client.options import GenerateOptions, Prompt, Speculation
from galley.core import names
from galley.pb.galley.v1 import galley_pb2 as pb

SPOILS = (0.0, 0.3, 0.7)
# Fewer processes, for the tests that run each time.
FEW_SPOILS = (0.0, 0.7)
DRAFT_LENGTHS = (1, 4, 8)
CONCURRENCIES = (1, 8)
# Trees: nodes, and the most of them for one position.
TREES = ((8, 2), (16, 3), (32, 4))


@dataclass(frozen=True, slots=True)
class Case:
    """Draft tokens of a round: `k` in all, at most `width` for one position.

    `spoil` is the oracle's rate of wrong tokens; None for other strategies.
    """

    strategy: str
    k: int
    concurrency: int
    spoil: float | None = None
    width: int = 1

    def __str__(self) -> str:
        spoil = "" if self.spoil is None else f"-spoil{self.spoil}"
        width = "" if self.width == 1 else f"-w{self.width}"
        return f"{self.strategy}{spoil}-k{self.k}{width}-x{self.concurrency}"

    @property
    def speculation(self) -> Speculation:
        if self.strategy == "off":
            return Speculation(off=True)
        if self.strategy == "auto":
            return Speculation()
        return Speculation(k=self.k, strategy=self.strategy, width=self.width)


_Kind = tuple[str, int, float | None]
"""Strategy, k, and the oracle's rate of wrong tokens."""


def _drafts(spoils: Sequence[float]) -> list[tuple[str, float | None]]:
    """The strategies, with the rates of the oracle."""
    plain = (names.NO_STRATEGY, names.NGRAM, names.MODEL, names.HYBRID)
    return [*((strategy, None) for strategy in plain), *((names.ORACLE, spoil) for spoil in spoils)]


def all_cases() -> list[Case]:
    """Return every strategy with every k, alone and eight at a time."""
    kinds: list[_Kind] = [("off", 0, None), *(("auto", 0, spoil) for spoil in (None, *SPOILS))]
    kinds += [(strategy, k, spoil) for strategy, spoil in _drafts(SPOILS) for k in DRAFT_LENGTHS]
    chains = [Case(strategy, k, count, spoil) for strategy, k, spoil in kinds for count in CONCURRENCIES]
    return chains + [tree for turn in range(2) for tree in tree_cases(turn)]


def tree_cases(turn: int) -> list[Case]:
    """Return the trees of models, alone or in company by turns; two turns have every combination."""
    return [
        Case(strategy, k, CONCURRENCIES[(at + step + turn) % 2], width=width)
        for at, strategy in enumerate((names.MODEL, names.HYBRID))
        for step, (k, width) in enumerate(TREES)
    ]


def pairwise_cases(spoils: Sequence[float] = SPOILS, turn: int = 0) -> list[Case]:
    """Return every strategy with every k, alone or in company by turns; two turns have every combination."""
    kinds: list[list[_Kind]] = [[("auto", 0, spoil)] for spoil in (None, *spoils)]
    kinds += [[(strategy, k, spoil) for k in DRAFT_LENGTHS] for strategy, spoil in _drafts(spoils)]
    return [
        Case("off", 0, CONCURRENCIES[-1]),
        *(
            Case(strategy, k, CONCURRENCIES[(at + step + turn) % 2], spoil)
            for at, steps in enumerate(kinds)
            for step, (strategy, k, spoil) in enumerate(steps)
        ),
        *tree_cases(turn)[turn % 2 :: 2],
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole stream."""

    tokens: tuple[int, ...]
    text: str
    from_draft: tuple[bool, ...]
    stats: pb.SpeculationStats


async def read_answer(client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> Answer:
    """Stream one answer to its end."""
    stream = client.stream(prompt, **options)
    text = ""
    from_draft: list[bool] = []
    async for event in stream:
        text += event.chunk.text
        from_draft += event.chunk.from_draft
    stats = pb.SpeculationStats() if stream.finished is None else stream.finished.speculation
    return Answer(tuple(stream.tokens), text, tuple(from_draft), stats)


async def read_answers(
    client: AsyncClient, prompts: Sequence[Prompt], options: GenerateOptions, case: Case
) -> list[Answer]:
    """Stream the answers to all prompts, `case.concurrency` at a time."""
    places = asyncio.Semaphore(case.concurrency)

    async def one(prompt: Prompt) -> Answer:
        async with places:
            return await read_answer(client, prompt, {**options, "speculation": case.speculation})

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def accepted_per_round(answer: Answer) -> set[int]:
    """Return the counts of accepted tokens that occurred: `accepted_at[i]` rounds accepted more than i."""
    at_least = [answer.stats.rounds, *answer.stats.accepted_at, 0]
    return {count for count in range(len(at_least) - 1) if at_least[count] > at_least[count + 1]}
