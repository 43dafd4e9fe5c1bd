"""Streams that request the same answer again and again and compare it with an undisturbed reference."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median

import grpc

from galley.client.client import AsyncClient
from galley.client.errors import GalleyRpcError
from galley.client.options import GenerateOptions, Retries, Speculation
from galley.client.streams import AsyncStream
from galley.core.names import NGRAM
from tests.chaos.disturbances import CLIENT_PATIENCE_S, PLANS
from tests.fakes.tiny_model import VOCAB
from tests.fakes.waiting import Watch

PROMPT_TOKENS = 24
_RETRIES = Retries(CLIENT_PATIENCE_S, CLIENT_PATIENCE_S, longest_pause_s=0.5)
_GIVEN_UP = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
"""Statuses with which a client raises once it has tried to resume for long enough."""


class WrongToken(Exception):
    """A stream differs from its undisturbed reference."""


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts as token ids; every other one repeats four tokens, so that drafts are often right."""
    chance = Random(seed)
    made = []
    for number in range(count):
        tokens = [chance.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)]
        made.append(tokens if number % 2 else tokens[:4] * (PROMPT_TOKENS // 4))
    return made


def options(max_tokens: int, number: int) -> GenerateOptions:
    """Return the options of stream `number`: greedy or sampled, in one of the modes of speculation."""
    ways = (Speculation(), Speculation(k=4, strategy=NGRAM), Speculation(off=True))
    return GenerateOptions(
        max_tokens=max_tokens,
        temperature=(0.0, 0.8)[number % 2],
        seed=number,
        ignore_eos=True,
        speculation=ways[number % len(ways)],
    )


@dataclass
class Stream:
    """A stream under disturbance.

    Each answer has a client of its own, which tries the first of `gateways` again even if it had died
    before. Once the client has given up, the session is resumed as an application does. A call that a busy
    gateway refused, before it named a session, is repeated and counts as `refused`. No other error is
    forgiven, except those that `may_end` names: then the answer counts as `ended`, and another one is
    requested. After `patience_s` without a token the stream counts as lost. `rebuilt` counts changes of the
    target build.
    """

    prompt: list[int]
    options: GenerateOptions
    gateways: tuple[str, ...]
    reference: list[int] = field(default_factory=list)
    reference_text: str = ""
    answers: int = 0
    tokens: int = 0
    heard_s: list[float] = field(default_factory=lambda: [0.0])
    asked_s: list[float] = field(default_factory=list)
    over: bool = False
    given_up: int = 0
    refused: int = 0
    rebuilt: int = 0
    patience_s: float = PLANS["paged"].patience_s
    ended: Counter[str] = field(default_factory=Counter)
    _ends: frozenset[grpc.StatusCode] = frozenset()
    _later_ends: frozenset[grpc.StatusCode] = frozenset()
    watch: Watch = field(default_factory=Watch)

    async def learn(self) -> None:
        """Read the reference, without speculation; call it while nothing is disturbed."""
        options: GenerateOptions = {**self.options, "speculation": Speculation(off=True)}
        async with self._client() as client:
            stream = client.stream(self.prompt, **options)
            texts = [event.chunk.text async for event in stream]
            self.reference, self.reference_text = list(stream.tokens), "".join(texts)

    async def run(self) -> None:
        """Request the answer until `over` is set. Raise WrongToken, or the error if a stream is lost."""
        while not self.over:
            self.asked_s.append(time.monotonic())
            self._ends = self._later_ends
            await self._answer()

    async def _answer(self) -> None:
        async with self._client() as client:
            await self._answer_by(client)

    async def _answer_by(self, client: AsyncClient) -> None:
        stream = client.stream(self.prompt, **self.options)
        while True:
            asked_s = time.monotonic()
            try:
                await self._hear(stream)
            except GalleyRpcError as error:
                if error.code in self._ends:
                    self.ended[error.code.name] += 1
                    return
                waited_s = time.monotonic() - max(asked_s, self.heard_s[-1])
                pause_s = max(error.retry_after_s or 0.0, _RETRIES.longest_pause_s)
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not stream.session_id:
                    self.refused += 1
                    await asyncio.sleep(error.retry_after_s or _RETRIES.longest_pause_s)
                elif error.code in _GIVEN_UP and waited_s >= CLIENT_PATIENCE_S - pause_s:
                    self.given_up += 1
                else:
                    raise
                if stream.session_id:
                    stream = client.resume_stream(stream)
                else:
                    stream = client.stream(self.prompt, **self.options)
            else:
                self.answers += 1
                return

    def may_end(self, codes: frozenset[grpc.StatusCode], *, later: bool = False) -> None:
        """Allow the present answer to end with one of these: what the store holds of it may be lost.

        With `later`, allow it to those that begin until the next call, too.
        """
        self._ends = codes
        self._later_ends = codes if later else frozenset()

    def _client(self) -> AsyncClient:
        return AsyncClient(self.gateways, retries=_RETRIES)

    async def _hear(self, stream: AsyncStream) -> None:
        async for event in stream:
            if not event.chunk.token_ids:
                self.rebuilt += event.HasField("numerics_changed")
                continue
            end = len(stream.tokens)
            start = end - len(event.chunk.token_ids)
            if stream.tokens[start:end] != self.reference[start:end]:
                raise WrongToken(f"{stream.session_id}: other tokens at {start}")
            self.tokens += end - start
            self.heard_s.append(time.monotonic())
            self.watch.changed()
        if stream.tokens != self.reference or stream.finished is None:
            raise WrongToken(f"{stream.session_id}: ended after {len(stream.tokens)} tokens")

    async def heard_after(self, since_s: float) -> None:
        """Wait for a token that arrives after `since_s`. Raise TimeoutError."""
        await self.watch.until(lambda: self.heard_s[-1] > since_s, self.patience_s)

    def forget(self, before_s: float) -> None:
        """Drop the times of tokens and requests before `before_s`, except that of the last token."""
        self.asked_s = [time_s for time_s in self.asked_s if time_s >= before_s]
        self.heard_s = [time_s for time_s in self.heard_s[:-1] if time_s >= before_s] + self.heard_s[-1:]


def longest_wait(heard: Sequence[float], since: float, until: float) -> float:
    """Return the longest wait that began before `until` and ended after `since`, counted from `since` on.

    Tokens in flight when something breaks still arrive at once, so the first wait after `since` may be short
    and a later one counts.
    """
    times = [since, *(time for time in heard if time > since)]
    return max((after - before for before, after in pairwise(times) if before < until), default=0.0)


def longest_within(heard: Sequence[float], since: float, until: float, asked: Sequence[float] = ()) -> float:
    """Return the longest time without a token between `since` and `until`; both ends bound a wait.

    A wait in which an answer was requested (`asked`) is not one for a next token and does not count.
    """
    times = [since, *(time for time in heard if since < time < until), until]
    return max(
        (
            after - before
            for before, after in pairwise(times)
            if not any(before <= time <= after for time in asked)
        ),
        default=0.0,
    )


def usual_wait(heard: Sequence[float], since: float, until: float) -> float | None:
    """Return the median time between two tokens in the interval; None if it has fewer than two."""
    times = [time for time in heard if since <= time <= until]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else None
