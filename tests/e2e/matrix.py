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
DRAFT_LENGTHS = (1, 4, 8)
CONCURRENCIES = (1, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """`spoil` is the oracle's rate of wrong tokens; None for other strategies.

    The strategy "auto" leaves k, and the strategy, to the gateway; "off" does without.
    """

    strategy: str
    k: int
    concurrency: int
    spoil: float | None = None

    def __str__(self) -> str:
        spoil = "" if self.spoil is None else f"-spoil{self.spoil}"
        return f"{self.strategy}{spoil}-k{self.k}-x{self.concurrency}"

    @property
    def speculation(self) -> Speculation:
        if self.strategy == "off":
            return Speculation(off=True)
        if self.strategy == "auto":
            return Speculation()
        return Speculation(k=self.k, strategy=self.strategy)


def all_cases() -> list[Case]:
    """Every strategy with every k, alone and eight at a time."""
    drafts: list[tuple[str, float | None]] = [
        (names.NO_STRATEGY, None),
        (names.NGRAM, None),
        (names.MODEL, None),
        (names.HYBRID, None),
        *((names.ORACLE, spoil) for spoil in SPOILS),
    ]
    return [
        *(Case("off", 0, concurrency) for concurrency in CONCURRENCIES),
        *(Case("auto", 0, concurrency) for concurrency in CONCURRENCIES),
        *(Case("auto", 0, concurrency, spoil) for spoil in SPOILS for concurrency in CONCURRENCIES),
        *(
            Case(strategy, k, concurrency, spoil)
            for strategy, spoil in drafts
            for k in DRAFT_LENGTHS
            for concurrency in CONCURRENCIES
        ),
    ]


def pairwise_cases() -> list[Case]:
    """A subset in which every strategy meets every k, both concurrencies, and every k both concurrencies."""
    cases = [Case("off", 0, 8), *(Case("auto", 0, 8, spoil) for spoil in (None, 0.3, 0.7))]
    for at, (strategy, spoil) in enumerate(
        [
            (names.NO_STRATEGY, None),
            (names.NGRAM, None),
            (names.MODEL, None),
            (names.HYBRID, None),
            *((names.ORACLE, spoil) for spoil in SPOILS),
        ]
    ):
        for step, k in enumerate(DRAFT_LENGTHS):
            cases.append(Case(strategy, k, CONCURRENCIES[(at + step) % 2], spoil))
    return cases


def rotated_cases(turn: int, spoil: float) -> list[Case]:
    """No draft in company, then every other one with every k, and left to the gateway.

    Each is alone or in company by turns: two turns after one another have every combination. The oracle is
    that of this rate.
    """
    drafts: list[tuple[str, float | None]] = [
        (names.NGRAM, None),
        (names.MODEL, None),
        (names.HYBRID, None),
        (names.ORACLE, spoil),
    ]
    return [
        Case("off", 0, CONCURRENCIES[-1]),
        Case("auto", 0, CONCURRENCIES[turn % 2]),
        Case("auto", 0, CONCURRENCIES[(turn + 1) % 2], spoil),
        *(
            Case(strategy, k, CONCURRENCIES[(at + step + turn) % 2], rate)
            for at, (strategy, rate) in enumerate(drafts)
            for step, k in enumerate(DRAFT_LENGTHS)
        ),
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a stream gave."""

    tokens: tuple[int, ...]
    text: str
    from_draft: tuple[bool, ...]
    stats: pb.SpeculationStats


async def ask(client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> Answer:
    """One answer to its end."""
    tokens: list[int] = []
    text = ""
    from_draft: list[bool] = []
    stats = pb.SpeculationStats()
    async for event in client.generate(prompt, **options):
        if event.WhichOneof("event") == "chunk":
            tokens += event.chunk.token_ids
            text += event.chunk.text
            from_draft += event.chunk.from_draft
        elif event.WhichOneof("event") == "finished":
            stats = event.finished.speculation
    return Answer(tuple(tokens), text, tuple(from_draft), stats)


async def ask_all(
    client: AsyncClient, prompts: Sequence[Prompt], options: GenerateOptions, case: Case
) -> list[Answer]:
    """The answers to all prompts, `case.concurrency` at a time."""
    places = asyncio.Semaphore(case.concurrency)

    async def one(prompt: Prompt) -> Answer:
        async with places:
            return await ask(client, prompt, {**options, "speculation": case.speculation})

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def accepted_per_round(answer: Answer) -> set[int]:
    """Which counts of accepted tokens occurred: `accepted_at[i]` rounds accepted more than i."""
    at_least = [answer.stats.rounds, *answer.stats.accepted_at, 0]
    return {count for count in range(len(at_least) - 1) if at_least[count] > at_least[count + 1]}
