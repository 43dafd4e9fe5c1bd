"""Whole answers, by the synchronous and the asynchronous client; the life of a client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

from galley import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    InternalError,
    Message,
    ResourceExhaustedError,
    Result,
    Retries,
    SpeculationUsage,
    TokenLogprobs,
    UnavailableError,
    Usage,
)
from galley.core.errors import Overloaded, Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SESSION, FakeChunk, FakeGateway, serving
from tests.fakes.waiting import PATIENCE_S

Call: TypeAlias = Callable[..., Result]


def by_client(address: str, method: str, *given: Any, **options: Any) -> Result:
    with Client(address) as client:
        result = getattr(client, method)(*given, **options)
        return result if isinstance(result, Result) else result.result()


def by_async_client(address: str, method: str, *given: Any, **options: Any) -> Result:
    async def call() -> Result:
        async with AsyncClient(address) as client:
            result = getattr(client, method)(*given, **options)
            answer: Result = await (result if isinstance(result, Coroutine) else result.result())
            return answer

    return asyncio.run(call())


both = pytest.mark.parametrize("call", [by_client, by_async_client], ids=["sync", "async"])
ANSWER = Result(
    text="Hello, world!\n",
    tokens=[11, 12, 13, 14],
    finish_reason="stop",
    stop="!",
    usage=Usage(prompt_tokens=5, output_tokens=4),
    speculation=SpeculationUsage(
        rounds=2,
        drafted=4,
        verified=4,
        accepted=2,
        accepted_by_rank=(1, 1),
        verified_by_rank=(3, 1),
        proposals=2,
        proposals_with_features=1,
    ),
    session_id=SESSION,
    model="tiny",
    seed=2**63,
    fingerprint="build-1",
    from_draft=[False, True, True, False],
    logprobs=[],
    numerics_changed=[],
)


@both
@pytest.mark.parametrize(
    ("method", "given"),
    [("generate", "x"), ("generate", [1, 2]), ("chat", "x"), ("stream", "x"), ("resume", SESSION)],
)
def test_a_result_holds_the_whole_answer(call: Call, method: str, given: Any) -> None:
    with serving(FakeGateway()) as address:
        assert call(address, method, given) == ANSWER
    assert ANSWER.message == Message("assistant", "Hello, world!\n")
    assert ANSWER.usage.total_tokens == 9
    assert ANSWER.speculation.acceptance_rate == 0.5
    assert ANSWER.speculation.mean_accepted_length == 2.0


@both
def test_a_result_has_logprobs_if_the_request_asks_for_them(call: Call) -> None:
    chunk = FakeChunk((7, 8), "aé", logprobs=(-0.5, -1.0), token_bytes=(b"a", b"\xc3"))
    with serving(FakeGateway(script=(chunk,))) as address:
        result = call(address, "generate", "x", logprobs=1)
    assert result.logprobs == [
        TokenLogprobs(-0.5, {7: -0.5}, b"a", {7: b"a"}),
        TokenLogprobs(-1.0, {8: -1.0}, b"\xc3", {8: b"\xc3"}),
    ]


@both
def test_logprobs_of_a_gateway_that_sends_no_texts_have_empty_ones(call: Call) -> None:
    with serving(FakeGateway(script=(FakeChunk((7,), "a", logprobs=(-0.5,)),))) as address:
        result = call(address, "generate", "x", logprobs=1)
    assert result.logprobs == [TokenLogprobs(-0.5, {7: -0.5}, b"", {7: b""})]


@both
def test_a_break_is_a_pause(call: Call) -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=2, failures=1)
    with serving(gateway) as address:
        assert call(address, "generate", "x") == ANSWER
    assert [type(request) for request in gateway.requests] == [pb.GenerateRequest, pb.ResumeRequest]


@both
def test_a_result_of_a_resumed_session_begins_at_its_index(call: Call) -> None:
    with serving(FakeGateway()) as address:
        result = call(address, "resume", SESSION, 1)
    assert (result.first_index, result.tokens, result.text) == (1, [12, 13, 14], ", world!\n")


async def test_a_resumed_stream_has_the_whole_answer() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=2)
    with serving(gateway) as address:
        async with AsyncClient(address, retries=Retries(0)) as client:
            stream = client.stream("x")
            with pytest.raises(UnavailableError) as broken:
                await stream.result()
            assert broken.value.session_id == SESSION
            gateway.error = None
            assert await client.resume_stream(stream).result() == ANSWER
            assert stream.tokens == [11, 12, 13]


@both
def test_chat_takes_dicts_and_messages(call: Call) -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        call(address, "chat", [{"role": "user", "content": "Hi"}, ANSWER.message, Message("user", "Again")])
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    assert [(turn.role, turn.content) for turn in request.messages.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello, world!\n"),
        ("user", "Again"),
    ]


@both
@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_a_misspelt_option_is_refused_before_any_call(call: Call, method: str) -> None:
    gateway = FakeGateway()
    problem = (
        rf"^{method}\(\) got an unexpected keyword argument 'temprature'\. Did you mean 'temperature'\?$"
    )
    with serving(gateway) as address, pytest.raises(TypeError, match=problem):
        call(address, method, "x", temprature=0.5)
    assert gateway.requests == []


@both
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((5,), "session_id: must be text, got int"),
        ((SESSION, -1), r"next_index: must be in \[0, 4294967295\], got -1"),
        ((SESSION, 1, "00"), "seen_hash: must be bytes, got str"),
    ],
)
def test_resume_refuses_what_is_no_point(call: Call, given: tuple[Any, ...], problem: str) -> None:
    gateway = FakeGateway()
    with serving(gateway) as address, pytest.raises((TypeError, ValueError), match=problem):
        call(address, "resume", *given)
    assert gateway.requests == []


@both
def test_errors_have_classes_and_name_the_session(call: Call) -> None:
    gateway = FakeGateway(error=Overloaded("too many open sessions", 1.5), silent=True)
    with serving(gateway) as address, pytest.raises(ResourceExhaustedError) as refused:
        call(address, "generate", "x")
    assert (refused.value.retry_after_s, refused.value.session_id) == (1.5, "")
    with serving(FakeGateway(hang=True, fail_at=1)) as address, pytest.raises(DeadlineExceededError) as late:
        call(address, "generate", "x", timeout_s=1.0)
    assert late.value.session_id == SESSION
    hostile = FakeGateway(script=(FakeChunk((1, 2), "ab"),))
    with serving(hostile) as address, pytest.raises(InternalError) as broken:
        call(address, "resume", SESSION, 1)
    assert broken.value.session_id == SESSION


def test_the_synchronous_client_needs_no_block() -> None:
    with serving(FakeGateway()) as address:
        client = Client(address)
        assert client.generate("x") == ANSWER
        client.close()
        for call in (client.generate, client.stream, client.chat, client.resume):
            with pytest.raises(RuntimeError, match="the client is closed"):
                call("x")
        client.close()


async def test_the_asynchronous_client_needs_no_block() -> None:
    with serving(FakeGateway()) as address:
        client = AsyncClient(address)
        assert await client.generate("x") == ANSWER
        await client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            await client.generate("x")
        with pytest.raises(RuntimeError, match="the client is closed"):
            await client.model_info()


def test_an_asynchronous_client_is_for_one_event_loop() -> None:
    with serving(FakeGateway()) as address:
        client = AsyncClient(address)
        with pytest.raises(RuntimeError, match=r"galley\.Client"):
            client.stream("x")

        async def use(*, close: bool) -> Result:
            try:
                return await client.generate("x")
            finally:
                if close:
                    await client.close()

        with asyncio.Runner() as first:
            assert first.run(use(close=False)) == ANSWER
            with asyncio.Runner() as second, pytest.raises(RuntimeError, match="one event loop"):
                second.run(use(close=False))
            assert first.run(use(close=True)) == ANSWER


async def test_the_synchronous_client_works_while_an_event_loop_runs() -> None:
    """A notebook's cells run in an event loop."""
    with serving(FakeGateway()) as address, Client(address) as client:
        assert client.generate("x") == ANSWER
        assert "".join(event.chunk.text for event in client.stream("x")) == ANSWER.text


def test_threads_share_a_client() -> None:
    with serving(FakeGateway()) as address, Client(address) as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(client.generate, ["x"] * 24)) == [ANSWER] * 24


@pytest.mark.parametrize("leave", ["block", "garbage", "cancel"])
def test_a_stream_that_is_left_ends_its_call(leave: str) -> None:
    gateway = FakeGateway(hang=True, fail_at=1)
    with serving(gateway) as address, Client(address) as client:
        stream = client.stream("x")
        assert [next(stream).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
        match leave:
            case "block":
                with stream:
                    pass
            case "garbage":
                del stream
            case _:
                stream.cancel()
                assert list(stream) == []
                with pytest.raises(RuntimeError, match="cancelled"):
                    stream.result()
        assert gateway.cancelled.wait(PATIENCE_S)


async def test_a_block_ends_the_call_of_its_stream() -> None:
    gateway = FakeGateway(hang=True, fail_at=1)
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            async with client.stream("x") as stream:
                await anext(stream)
            assert await asyncio.to_thread(gateway.cancelled.wait, PATIENCE_S)
            assert stream.finished is None


SCRIPT = """
import sys
from galley import Client
client = Client(sys.argv[1])
print(client.generate("x").text, end="")
stream = client.stream("x")
next(stream)
"""


def test_a_program_that_closes_nothing_ends_quietly() -> None:
    with serving(FakeGateway()) as address:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, address]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Hello, world!\n", "")


FORKING = f"""
import os, signal, sys
from galley import Client
client = Client(sys.argv[1])
if sys.argv[2] == "used":
    client.generate("x")
if os.fork() == 0:
    signal.alarm({PATIENCE_S / 2:.0f})  # ends it if the call hangs
    try:
        print(client.generate("x").text, end="", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os._exit(int(os.wait()[1] != 0))
"""


@pytest.mark.parametrize(
    ("use", "printed"), [("used", "Client: was used before this process was forked"), ("unused", ANSWER.text)]
)
def test_a_client_in_a_forked_process_never_hangs(use: str, printed: str) -> None:
    with serving(FakeGateway()) as address:
        command = [sys.executable, "-W", "error", "-c", FORKING, address, use]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
    assert ended.stdout.startswith(printed)
    assert "never awaited" not in ended.stderr
