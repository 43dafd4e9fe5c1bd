"""Grammars at a target that are still compiled: what comes meanwhile is not lost, and a deadline holds."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.models.grammars import ReplicaGrammars
from galley.common.server.server import Parts, start_server
from galley.common.wire.codec import grammar_message
from galley.core.cost.model import StepTimes
from galley.core.grammar.spec import GrammarSpec
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService, add_target
from services.target.settings import TargetSettings
from tests.fakes.tiny_model import STOP, load_tiny_model, save_tiny_model
from tests.fakes.verify_items import extension, slice_of, stream_of, tokens_of, verify
from tests.fakes.vocabularies import ascii_vocabulary, save_ascii_tokenizer
from tests.fakes.waiting import PATIENCE_S
from tests.integration.services.target.conftest import FLAT, Recording, Served

PROMPT = [5, 9, 2, 33]
TEXT = b"abcdefgh"
SPEC = GrammarSpec("choice", '["abcdefgh"]')


def part(session_id: str = "s", **given: Any) -> pb.SessionSlice:
    return slice_of(
        PROMPT,
        session_id=session_id,
        stop_token_ids=[STOP],
        grammar_hash=SPEC.content_hash,
        structured_output=grammar_message(SPEC),
        **given,
    )


@pytest.fixture
def compiler() -> Iterator[threading.Event]:
    """Let grammars be compiled once it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def target(
    engine: Recording, limits: Limits, compiler: threading.Event
) -> AsyncIterator[rpc.TargetAsyncStub]:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compiler.wait, PATIENCE_S)
        served = Served(engine, limits, None, grammars=lambda: ReplicaGrammars(ascii_vocabulary(), thread))
        await served.start()
        async with grpc.aio.insecure_channel(served.running.address) as channel:
            yield rpc.TargetStub(channel)
        compiler.set()
        await served.stop()


async def test_hints_and_credit_that_come_meanwhile_are_kept(
    target: rpc.TargetAsyncStub, compiler: threading.Event
) -> None:
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=part(), credit=1))
        await stream.send(extensions=[extension(PROMPT, TEXT[:4])])
        await stream.send(extensions=[extension(PROMPT, limit=len(PROMPT) + 7)])
        await stream.received()
        compiler.set()
        answers = await stream.until_last()
    # An engine may verify no draft token beside a prompt.
    assert sum(answer.result.accepted for answer in answers) >= 3
    assert tokens_of(answers) == list(TEXT[:7])


async def test_an_invalid_extension_ends_its_request(
    target: rpc.TargetAsyncStub, compiler: threading.Event
) -> None:
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=part(), credit=3))
        await stream.send(extensions=[extension(PROMPT, [1] * 2000)])
        await stream.send(extensions=[extension(PROMPT, limit=len(PROMPT) + 7)])
        await stream.received()
        compiler.set()
        (refused,) = await stream.until_last()
    assert "hint.draft_tokens" in refused.status.message


async def test_a_cancelled_request_gets_nothing(
    target: rpc.TargetAsyncStub, compiler: threading.Event
) -> None:
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=part(), credit=9))
        await stream.send(cancelled=[pb.ItemRef(session_id="s", request_id=7)])
        await stream.received()
        compiler.set()
        await stream.send(pb.VerifyItem(slice=part("other", request_id=8)))
        assert (await stream.next()).session_id == "other"


async def test_a_request_does_not_wait_beyond_its_deadline(target: rpc.TargetAsyncStub) -> None:
    (late,) = await verify(target, pb.VerifyItem(slice=part(remaining_ns=1_000_000)))
    assert late.status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert "before the grammar was compiled" in late.status.message


class Loaded(PagedEngine):
    def measure(self) -> StepTimes:
        return FLAT


async def test_the_vocabulary_is_read_before_a_target_serves(tmp_path: Path) -> None:
    """It takes all threads some tenths of a second, which no session is to wait for."""
    directory = save_tiny_model(tmp_path)
    save_ascii_tokenizer(directory)
    settings = TargetSettings(model=str(directory))

    async def build(server: grpc.aio.Server, parts: Parts) -> TargetService:
        model = load_tiny_model(directory, kv_blocks=8)
        service = await add_target(server, parts, Loaded(model, "f00d"), settings)
        (directory / "tokenizer.json").unlink()
        return service

    running = await start_server(settings, build)
    async with grpc.aio.insecure_channel(running.address) as channel:
        (answer,) = await verify(rpc.TargetStub(channel), pb.VerifyItem(slice=part()))
    await running.stop()
    assert list(answer.result.tokens) == [TEXT[0]]
