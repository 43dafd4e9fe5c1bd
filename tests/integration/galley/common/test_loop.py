"""The loop of a service takes the completions of gRPC that come together in one turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from galley.common.server import loop as loop_module
from galley.common.server.loop import ServiceLoop

CALLS, MESSAGES = 100, 10


async def answer(request: bytes, _: Any) -> AsyncIterator[bytes]:
    for _ in range(MESSAGES):
        yield request


async def call_all() -> None:
    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("galley.Test", {"Call": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_stream("/galley.Test/Call")

        async def read() -> list[bytes]:
            return [message async for message in call(b"request")]

        assert await asyncio.gather(*(read() for _ in range(CALLS))) == [[b"request"] * MESSAGES] * CALLS
    await server.stop(None)


def test_a_turn_takes_all_operations_of_grpc_that_have_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = 0, loop_module.take_completions

    def counted(woken: socket.socket, handle: Callable[[], Any]) -> None:
        nonlocal taken
        taken += 1
        take(woken, handle)

    monkeypatch.setattr(loop_module, "take_completions", counted)
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(call_all())
    assert 0 < taken < CALLS * MESSAGES, "each message is sent and received: two operations"


def test_other_readers_get_what_was_sent() -> None:
    async def read() -> list[bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            got: list[bytes] = []
            over = asyncio.Event()

            def take() -> None:
                got.append(ours.recv(1))
                if len(got) == 3:
                    over.set()

            loop = asyncio.get_running_loop()
            loop.add_reader(ours, take)
            theirs.sendall(b"abc")
            await over.wait()
            loop.remove_reader(ours)
            return got

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        assert runner.run(read()) == [b"a", b"b", b"c"]
