"""One Valkey, one fake target, one fake draft, and as many real gateways as a test wants."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.options import Prompt
from galley.common.models.files import tokenizer_hash
from galley.common.server.server import Parts, RunningServer, start_server
from galley.core.answer.answer import SessionSpec
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings, Tuning
from tests.fakes.replicas import MODEL, FakeDraft, FakeTarget
from tests.fakes.truth import SEED, VOCAB, text_of, true_output
from tests.fakes.waiting import PATIENCE_S

PROMPT = "Tell me more."
PROMPT_TOKENS = list(PROMPT.encode())
MAX_TOKENS = 40
ID_SECRET = "the same at all gateways"
SPEC = SessionSpec("s", tuple(PROMPT_TOKENS), SamplingParams(seed=SEED), max_position=200, vocab_size=VOCAB)

any_credit = pytest.mark.parametrize("credit", [0, 32], ids=["round by round", "with credit"])
"""Runs a test twice: without credit (one request a round) and with it."""


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_bytes: list[tuple[bytes, ...]] = field(default_factory=list)
    """Of each entry of `logprobs`: of the chosen token, then of the likeliest ones."""
    changes: list[tuple[int, str]] = field(default_factory=list)
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    first_index: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def end(self) -> pb.Finished:
        assert self.finished is not None
        return self.finished

    def receive(self, event: pb.StreamEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "chunk":
                chunk = event.chunk
                assert chunk.index == self.first_index + len(self.tokens), "an index twice or skipped"
                assert len(chunk.from_draft) == len(chunk.token_ids)
                self.tokens += chunk.token_ids
                self.texts.append(chunk.text)
                self.from_draft += chunk.from_draft
                self.logprobs += [
                    PositionLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
                    for entry in chunk.logprobs
                ]
                self.token_bytes += [
                    (entry.token_bytes, *(top.token_bytes for top in entry.top)) for entry in chunk.logprobs
                ]
            case "numerics_changed":
                self.changes.append((event.numerics_changed.index, event.numerics_changed.fingerprint))
            case "finished":
                self.finished = event.finished

    async def listen(self, stream: AsyncStream, until: int | None = None) -> Received:
        async with asyncio.timeout(PATIENCE_S):
            while until is None or len(self.tokens) < until:
                try:
                    self.receive(await anext(stream))
                except StopAsyncIteration:
                    break
        return self


async def receive(stream: AsyncStream, until: int | None = None, first_index: int = 0) -> Received:
    return await Received(first_index=first_index).listen(stream, until)


async def refused(answer: Awaitable[object]) -> GalleyRpcError:
    with pytest.raises(GalleyRpcError) as caught:
        await answer
    return caught.value


def must_be_true(received: Received, max_tokens: int = MAX_TOKENS, seed: int = SEED) -> None:
    truth = true_output(PROMPT_TOKENS, max_tokens, seed)
    assert received.tokens == truth
    assert received.text == text_of(truth)
    assert received.finished is not None


@dataclass(frozen=True)
class Gateway:
    """A running gateway; `http` is the address of its HTTP port, empty without one."""

    running: RunningServer
    client: AsyncClient
    http: str = ""

    @property
    def address(self) -> str:
        return self.running.address

    def generate(self, prompt: Prompt = PROMPT, **options: Any) -> AsyncStream:
        fields = {"max_tokens": MAX_TOKENS, "seed": SEED, "ignore_eos": True, **options}
        return self.client.stream(prompt, **fields)

    async def has_places(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await cast("Any", self.running.service)._streams.wait_idle()

    async def idle(self) -> None:
        """Wait until no stream is open and no task is left; fail if some stay."""
        streams = cast("Any", self.running.service)._streams
        async with asyncio.timeout(PATIENCE_S):
            await streams.wait_idle()
            ours = [task for task in asyncio.all_tasks() if _is_gateways(task)]
            if ours:
                await asyncio.wait(ours)
        assert not streams._running
        gc.collect()


def _is_gateways(task: asyncio.Task[Any]) -> bool:
    name = getattr(task.get_coro(), "__qualname__", "")
    return name.startswith(("AnswerStream.", "SessionRunner."))


NO_CALLER = "grpc._cython.cygrpc: ExecuteBatchError raised in core"
"""What gRPC logs where a call is cancelled just as it ends: its status reaches nobody."""


class _Errors(logging.Handler):
    """Collect logged errors, except statuses without a caller."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {record.getMessage()}"
        if not line.startswith(NO_CALLER):
            self.lines.append(line)


class World:
    def __init__(self, directory: Path, tokenizer: Path, redis_url: str, credit: int = 0) -> None:
        """`credit` is the gateways'; with 0 a test can step through the rounds."""
        self.id = uuid4().hex
        """No other world has it. Worlds share a Redis, where a key that was used names its old session."""
        self.directory = directory
        self._credit = credit
        self.tokenizer = tokenizer
        self.tokenizer_hash = tokenizer_hash(tokenizer)
        self.redis_url = redis_url
        self.target = FakeTarget(directory, self.tokenizer_hash)
        self.draft = FakeDraft(directory, self.tokenizer_hash)
        self._gateways: list[Gateway] = []
        self._unhandled: list[dict[str, Any]] = []
        self._errors = _Errors(logging.ERROR)

    def settings(self, **given: object) -> GatewaySettings:
        return GatewaySettings.model_validate(
            {
                "target": self.target.address,
                "draft": self.draft.address,
                "redis_url": self.redis_url,
                "model": str(self.tokenizer),
                "target_models": MODEL,
                "max_message_bytes": 1 << 16,
                "draft_timeout_s": 10,
                "drain_timeout_s": 5,
                "buffer": 1000,
                "credit": self._credit,
                "id_secret": ID_SECRET,
                "audit_ratio": 0,
                **given,
            }
        )

    async def gateway(self, **given: object) -> Gateway:
        return await self.gateway_of(Parts(), **given)

    async def gateway_of(self, parts: Parts, /, **given: object) -> Gateway:
        tuning = tuning_of(given)
        settings = self.settings(**given)
        prepared = prepare(settings, tuning=tuning)
        running = await start_server(settings, prepared.build, parts, prepared.interceptors)
        client = await AsyncClient(running.address, retries=NO_RETRIES).__aenter__()
        self._gateways.append(Gateway(running, client, parts.addresses.get("http", "")))
        return self._gateways[-1]

    async def held(
        self,
        gateway: Gateway,
        passes: int,
        prompt: Prompt = PROMPT,
        *,
        until: int | None = None,
        **options: Any,
    ) -> tuple[AsyncStream, Received]:
        self.target.gate.close_after(passes)
        stream = gateway.generate(prompt, **options)
        return stream, await receive(stream, until=passes if until is None else until)

    def expect_error(self, event: str) -> None:
        """Accept the errors of `event` in the log; any others fail the test at its end."""
        self._errors.lines = [line for line in self._errors.lines if event not in line]

    async def __aenter__(self) -> World:
        asyncio.get_running_loop().set_exception_handler(self._note)
        logging.getLogger().addHandler(self._errors)
        await self.target.start()
        await self.draft.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.target.gate.open()
        self.draft.gate.open()
        for gateway in self._gateways:
            await gateway.client.__aexit__(None, None, None)
            await gateway.running.stop()
        await self.draft.stop()
        await self.target.stop()
        logging.getLogger().removeHandler(self._errors)
        assert not self._unhandled, f"exceptions that nobody handled: {self._unhandled}"
        assert not self._errors.lines, "errors in the log"

    def _note(self, _: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        """Collect exceptions that nobody handled, except those of an earlier test's event loop.

        gRPC has one poller a process: it gives the late events of a closed loop to the loop that runs now.
        """
        is_poller = "PollerCompletionQueue" in what["message"]
        if not (is_poller and str(what.get("exception")) == "Event loop is closed"):
            self._unhandled.append(what)


def tuning_of(given: dict[str, Any]) -> Tuning:
    """Remove the fields of `Tuning` from `given` and return them as one."""
    values = {name: given.pop(name) for name in Tuning._fields if name in given}
    return Tuning(**{"window": 1000, "lookup_fallback": False, **values})


def field_of(error: GalleyRpcError) -> str:
    [(name, _)] = error.violations
    return name
