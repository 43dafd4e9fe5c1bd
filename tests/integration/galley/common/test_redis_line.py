"""The line: one connection for the commands of all callers, written once for each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import hiredis
import pytest
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import Connection

from galley.common.redis.line import Line
from tests.fakes.redis_clusters import until

pytestmark = pytest.mark.timeout(30)

CALLS = 50
Answer = Callable[[bytes], bytes | None]


@dataclass
class Served:
    """A server that echoes the second word of each command, or writes what `answer` returns for it."""

    answer: Answer | None = None
    reads: list[int] = field(default_factory=list)
    """The number of commands in each read, of all connections."""
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        parser = hiredis.Reader()
        with suppress(ConnectionError):
            while data := await reader.read(2**20):
                parser.feed(data)
                commands = []
                while (command := parser.gets()) is not False:
                    commands.append(command[1])
                self.reads.append(len(commands))
                for word in commands:
                    reply = b"+" + word + b"\r\n" if self.answer is None else self.answer(word)
                    if reply is None:
                        writer.transport.abort()
                        return
                    writer.write(reply)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def line_to(
    served: Served, timeout_s: float = 5.0, kind: type[Connection] = Connection
) -> AsyncIterator[Line]:
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    of: dict[str, Any] = {"host": "127.0.0.1", "port": port, "protocol": 2, "driver_info": None}
    times: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": 5.0}
    pool = BlockingConnectionPool(connection_class=kind, **of, **times)
    async with server:
        line = Line(pool)
        yield line
        await line.close()
        server.close()


async def echoes(line: Line, *words: str) -> list[object]:
    return await asyncio.gather(*(line.reply(("ECHO", word)) for word in words), return_exceptions=True)


async def test_commands_of_one_turn_are_written_at_once() -> None:
    served = Served()
    async with line_to(served) as line:
        words = [str(number) for number in range(CALLS)]
        for _ in range(3):
            assert await echoes(line, *words) == [word.encode() for word in words]
    assert served.reads == [CALLS] * 3
    assert served.connections == 1


async def test_a_command_does_not_wait_for_replies_to_others() -> None:
    held = asyncio.Event()

    class Late(Served):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                await reader.readuntil(b"ECHO\r\n$1\r\nx\r\n")
            held.set()
            writer.write(b"+a\r\n+b\r\n")
            await reader.read()
            writer.close()

    async with line_to(Late()) as line:
        first = line.reply(("ECHO", "x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = line.reply(("ECHO", "x"))
        assert [await first, await second] == [b"a", b"b"]
        assert held.is_set()


async def test_an_error_reply_is_the_commands_own() -> None:
    served = Served(lambda word: b"-NOSCRIPT no\r\n" if word == b"bad" else b"+" + word + b"\r\n")
    async with line_to(served) as line:
        before, refused, after = await echoes(line, "a", "bad", "b")
    assert (before, after) == (b"a", b"b")
    assert isinstance(refused, redis_errors.NoScriptError)
    assert served.connections == 1


@pytest.mark.parametrize("answer", [lambda _: None, lambda _: b"no reply\r\n", lambda _: b"+a\r\n+b\r\n"])
async def test_a_lost_connection_fails_what_was_sent_and_opens_again(answer: Answer) -> None:
    """It was closed, or what came over it are not replies, or more of them than commands."""
    served = Served()
    async with line_to(served) as line:
        assert await echoes(line, "a") == [b"a"]
        served.answer = answer
        lost = (await echoes(line, "b"))[0]
        await asyncio.sleep(0)
        served.answer = None
        assert lost == b"a" or isinstance(lost, redis_errors.ConnectionError)
        assert await echoes(line, "c") == [b"c"]
    assert served.connections == 2


async def test_a_silent_server_is_given_up() -> None:
    served = Served(lambda _: b"")
    async with line_to(served, timeout_s=0.1) as line:
        gone = await asyncio.wait_for(echoes(line, "a", "b"), 5)
        assert [type(error) for error in gone] == [redis_errors.TimeoutError] * 2
        served.answer = None

        async def responds() -> bool:
            return await echoes(line, "c") == [b"c"]

        await until(responds)  # a busy machine may be silent for so long, too
    assert served.connections >= 2


async def test_a_server_that_cannot_be_reached_fails_each_command() -> None:
    async with line_to(Served()) as line:
        pass
    refused = await echoes(line, "a", "b")
    assert [type(error) for error in refused] == [redis_errors.ConnectionError] * 2
    assert line.is_idle


async def test_a_cancelled_caller_does_not_shift_the_replies_of_others() -> None:
    async with line_to(Served()) as line:
        replies = [line.reply(("ECHO", str(number))) for number in range(CALLS)]
        for reply in replies[::3]:
            reply.cancel()
        await asyncio.wait(replies)
        kept = {number: reply.result() for number, reply in enumerate(replies) if not reply.cancelled()}
    assert kept == {number: str(number).encode() for number in range(CALLS) if number % 3}


async def test_closing_waits_for_replies() -> None:
    async with line_to(Served()) as line:
        replies = [line.reply(("ECHO", str(number))) for number in range(CALLS)]
        await line.close()
        assert all(reply.done() for reply in replies)
        assert line.is_idle


class Reset(Connection):
    """A connection that ends once, between its greeting and its first command."""

    ends = 1

    async def connect(self) -> None:
        await super().connect()  # type: ignore[no-untyped-call]  # is untyped
        if self.ends:
            self.ends -= 1
            await self.end()

    async def end(self) -> None:
        assert self._writer is not None
        self._writer.transport.abort()
        await self._writer.wait_closed()


class Closed(Reset):
    """One whose server closes it: redis-py's stream has read the end, and the transport stays open."""

    async def end(self) -> None:
        assert self._reader is not None
        self._reader.feed_eof()


@pytest.mark.parametrize("kind", [Reset, Closed])
async def test_a_connection_that_ends_before_its_first_command_fails_it(kind: type[Connection]) -> None:
    served = Served()
    async with line_to(served, kind=kind) as line:
        [lost] = await asyncio.wait_for(echoes(line, "a"), 5)
        assert isinstance(lost, redis_errors.ConnectionError)
        assert await echoes(line, "b") == [b"b"]
    assert served.connections == 2
