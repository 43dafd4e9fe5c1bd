"""Compare structured answers of one stack: each must have its form, and the tokens of the first reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

from transformers import AutoConfig

from galley.client.client import AsyncClient
from galley.client.options import GenerateOptions
from galley.client.streams import AsyncStream
from galley.core.grammar.compiled import compile_grammar
from galley.core.grammar.vocabulary import Vocabulary
from galley.engine.load.module import eos_token_ids
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.stack.stack import Stack
from tests.e2e.matrix import Case
from tests.structured.forms import FormRequest

STRUCK_EVERY, RESUMED_EVERY = 6, 3
"""Of the answers that are read under kills: how many for one kill, and for one that is broken and resumed."""


Reader: TypeAlias = "Callable[[FormRequest, Case], Awaitable[FormAnswer]]"


@dataclass(frozen=True, slots=True)
class FormAnswer:
    tokens: tuple[int, ...]
    text: str
    reason: int
    stats: pb.SpeculationStats
    was_resumed: bool = False

    @property
    def is_finished(self) -> bool:
        return self.reason == pb.Finished.REASON_STOP


@dataclass
class Tally:
    """What was read, and what was wrong with it."""

    answers: int = 0
    finished: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    kills: int = 0
    resumed: int = 0
    different: int = 0
    """Answers with other tokens than the first."""
    sources: dict[str, int] = field(default_factory=dict)
    """Accepted tokens by source. No Counter, of which `asdict` makes one of pairs."""
    problems: list[str] = field(default_factory=list)

    def add(self, answer: FormAnswer) -> None:
        self.answers += 1
        self.finished += answer.is_finished
        self.resumed += answer.was_resumed
        self.tokens += len(answer.tokens)
        self.drafted += answer.stats.drafted
        self.accepted += answer.stats.accepted
        for source in answer.stats.sources:
            self.sources[source.source] = self.sources.get(source.source, 0) + source.accepted


class Trial:
    """The requests and their answers with speculation off, one at a time; later answers must equal these."""

    def __init__(self, requests: Sequence[FormRequest], vocabulary: Vocabulary | None = None) -> None:
        self.requests = list(requests)
        self.tally = Tally()
        self._vocabulary = vocabulary
        self._expected: dict[str, tuple[int, ...]] = {}

    async def learn(self, read: Reader) -> None:
        """Read the answers that later ones must equal."""
        await self._read_all(self.requests, Case("off", 0, 1), read)

    async def compare(
        self, read: Reader, case: Case, chosen: slice = slice(None), *, exact: bool = True
    ) -> None:
        """Read the answers to the chosen requests again, `case.concurrency` at a time.

        Unless they must be `exact`, other tokens are counted and no problem.
        """
        await self._read_all(self.requests[chosen], case, read, exact=exact)

    async def compare_under_kills(
        self, stack: Stack, parts: Sequence[str], case: Case, chosen: slice = slice(None)
    ) -> None:
        """Read the answers again while parts are killed by turns, and some streams break and are resumed."""
        async with AsyncClient(stack.gateways) as client, AsyncClient(stack.gateways[::-1]) as other:
            striker = _Striker(stack, cycle(parts))

            async def read(request: FormRequest, case: Case) -> FormAnswer:
                number = self.requests.index(request)
                middle = len(self._expected[str(request)]) // 2
                strike = striker.strike if number % STRUCK_EVERY == 0 else None
                successor = other if number % RESUMED_EVERY == 0 else None
                return await _read(client, request, case, middle, strike, successor)

            await self._read_all(self.requests[chosen], case, read)
            self.tally.kills += striker.kills

    async def _read_all(
        self,
        requests: Sequence[FormRequest],
        case: Case,
        read: Reader,
        *,
        exact: bool = True,
    ) -> None:
        places = asyncio.Semaphore(case.concurrency)

        async def one(request: FormRequest) -> None:
            async with places:
                self._judge(request, case, await read(request, case), exact=exact)

        await asyncio.gather(*(one(request) for request in requests))

    def _judge(self, request: FormRequest, case: Case, answer: FormAnswer, *, exact: bool) -> None:
        self.tally.add(answer)
        expected = self._expected.setdefault(str(request), answer.tokens)
        wrong = self._form_problem(request, answer)
        if answer.tokens != expected:
            self.tally.different += 1
            wrong = f"tokens {answer.tokens} are not {expected}" if exact else wrong
        if wrong:
            self.tally.problems.append(f"{request}, {case}: {wrong}")

    def _form_problem(self, request: FormRequest, answer: FormAnswer) -> str:
        if request.form.spec is not None and self._vocabulary is not None:
            grammar = compile_grammar(self._vocabulary, request.form.spec)
            allowed = grammar.start().allowed_prefix(answer.tokens)
            if allowed < len(answer.tokens):
                return f"token {allowed} of {answer.text!r} is not of its grammar"
        if answer.is_finished and not request.form.is_right(answer.text):
            return f"{answer.text!r} has not its form"
        if not answer.is_finished and answer.reason != pb.Finished.REASON_LENGTH:
            return f"it ended by {pb.Finished.Reason.Name(pb.Finished.Reason.ValueType(answer.reason))}"
        return ""


async def vocabulary_of(client: AsyncClient, model: Path) -> Vocabulary:
    """Return the vocabulary of the model in a folder, which the client's gateway serves."""
    info = await client.model_info()
    ends = eos_token_ids(model, AutoConfig.from_pretrained(model, local_files_only=True))
    text = (model / "tokenizer.json").read_text(encoding="utf-8")
    return Vocabulary.of_tokenizer(text, info.vocab_size, ends, time.monotonic_ns)


class _Striker:
    """Kills parts of a stack by turns; each is running again before the next one is killed."""

    def __init__(self, stack: Stack, parts: Iterator[str]) -> None:
        self.kills = 0
        self._stack = stack
        self._parts = parts
        self._lock = asyncio.Lock()

    async def strike(self) -> None:
        async with self._lock:
            part = next(self._parts)
            self.kills += 1
            await self._stack.kill(part)
            await self._stack.restart(part)


def reader(client: AsyncClient) -> Reader:
    return lambda request, case: _read(client, request, case)


async def _read(
    client: AsyncClient,
    request: FormRequest,
    case: Case,
    middle: int = 0,
    strike: Callable[[], Awaitable[None]] | None = None,
    successor: AsyncClient | None = None,
) -> FormAnswer:
    """Read one answer. After `middle` tokens `strike`, or break the stream and let `successor` resume it."""
    options: GenerateOptions = {**request.options, "speculation": case.speculation}
    stream = client.stream(list(request.prompt), **options)
    striking: asyncio.Future[None] | None = None
    async for _ in stream:
        if len(stream.tokens) < middle:
            continue
        if strike is not None and striking is None:
            striking = asyncio.ensure_future(strike())
        if successor is not None and stream.finished is None:
            stream.cancel()
            break
    is_broken = successor is not None and stream.finished is None
    if successor is not None and is_broken:
        stream = successor.resume_stream(stream)
        async for _ in stream:
            pass
    if striking is not None:
        await striking
    return _answer(stream, was_resumed=is_broken)


def _answer(stream: AsyncStream, *, was_resumed: bool) -> FormAnswer:
    finished = stream.finished
    if finished is None:
        raise RuntimeError("the stream ended before its answer")
    tokens, text = tuple(stream.tokens), stream.output.text
    return FormAnswer(tokens, text, finished.reason, finished.speculation, was_resumed)
