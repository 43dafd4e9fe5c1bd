"""The link of `make bench-slow-links` and `make chaos`: slow, lossy or cut, else as if it were not there."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.link import RESEND_S, Link
from tests.fakes.relay import Relay

DELAY_S = 0.05
PIECES = [bytes([at]) * (at + 1) for at in range(200)]

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]


class Server:
    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.address = ""

    def accept(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.ensure_future(self._run(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, reader: Reader, writer: Writer) -> None:
        error = None
        try:
            await self._serve(reader, writer)
        except ConnectionError as lost:
            error = lost
        await closed(writer)
        self.ended.put_nowait(error)


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Server]:
    server = Server(serve)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()
    await listening.wait_closed()


async def echo(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def connect(address: str) -> tuple[Reader, Writer]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def closed(writer: Writer) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def reset(writer: Writer) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("delay_s", [0.0, DELAY_S])
async def test_bytes_arrive_delayed_and_in_order(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with serving(echo) as server, Relay(server.address, Link(delay_s)) as relay:
        reader, writer = await connect(relay.address)
        for _ in range(2):
            began = loop.time()
            for piece in PIECES:
                writer.write(piece)
                await writer.drain()
            assert await reader.readexactly(sum(map(len, PIECES))) == b"".join(PIECES)
            assert loop.time() - began >= 2 * delay_s
        await closed(writer)
        assert await server.ended.get() is None


async def test_a_link_takes_so_many_bits_a_second() -> None:
    loop = asyncio.get_running_loop()
    async with serving(echo) as server, Relay(server.address, Link(bits_per_s=8e6)) as relay:
        reader, writer = await connect(relay.address)
        began = loop.time()
        for _ in range(2):
            writer.write(bytes(50_000))
        await reader.readexactly(100_000)
        assert loop.time() - began >= 0.1
        await closed(writer)


async def test_server_reset_arrives_after_earlier_bytes() -> None:
    async def send_and_reset(reader: Reader, writer: Writer) -> None:
        writer.write(b"last words")
        await reader.readexactly(1)
        reset(writer)

    async with serving(send_and_reset) as server, Relay(server.address, Link(DELAY_S)) as relay:
        reader, writer = await connect(relay.address)
        assert await reader.readexactly(10) == b"last words"
        writer.write(b".")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await closed(writer)


async def test_nothing_is_left_of_a_relay() -> None:
    async with serving(echo) as server:
        tasks, files = len(asyncio.all_tasks()), open_files()
        async with Relay(server.address, Link(DELAY_S)) as relay:
            address = relay.address
            ends = [await connect(address) for _ in range(2)]
            for reader, writer in ends:
                writer.write(b"?")
                await reader.readexactly(1)
            ends[0][1].write(b"on its way")
        for reader, writer in ends:
            with pytest.raises(ConnectionResetError):
                await reader.read()
            await closed(writer)
            await server.ended.get()
        with pytest.raises(ConnectionRefusedError):
            await connect(address)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == tasks
        assert open_files() == files


async def test_a_link_is_used_while_a_server_is_at_the_other_end() -> None:
    async def is_used() -> bool:
        waiting = asyncio.ensure_future(link.used())
        await asyncio.sleep(HELD_S)
        return waiting.done() or not waiting.cancel()

    link = Link()
    fields: dict[str, str] = {}
    async with Relay(lambda: fields["address"], link) as relay:
        _, writer = await connect(relay.address)
        assert not await is_used()
        async with serving(echo) as server:
            fields["address"] = server.address
            _, other = await connect(relay.address)
            await link.used()
            other.write_eof()
            await server.ended.get()
            assert not await is_used()
            await closed(other)
        await closed(writer)


HELD_S = 0.15


async def test_a_delay_may_come_and_go() -> None:
    loop = asyncio.get_running_loop()
    link = Link()
    async with serving(echo) as server, Relay(server.address, link) as relay:
        reader, writer = await connect(relay.address)
        took = []
        for delay_s in (0.0, DELAY_S, None):
            if delay_s is None:
                link.mend()
            else:
                link.delay(delay_s)
            began = loop.time()
            writer.write(b"?")
            assert await reader.readexactly(1) == b"?"
            took.append(loop.time() - began)
        assert took[1] >= 2 * DELAY_S
        assert max(took[0], took[2]) < 2 * DELAY_S
        await closed(writer)


async def test_lost_bytes_arrive_later_in_order() -> None:
    loop = asyncio.get_running_loop()
    link = Link(seed=3)
    async with serving(echo) as server, Relay(server.address, link) as relay:
        reader, writer = await connect(relay.address)
        link.lose(0.5)
        began = loop.time()
        for piece in PIECES[:20]:
            writer.write(piece)
            await asyncio.sleep(0)
        sent = b"".join(PIECES[:20])
        assert await reader.readexactly(len(sent)) == sent
        assert loop.time() - began >= RESEND_S
        await closed(writer)


async def test_nothing_passes_a_link_that_is_cut_until_it_is_mended() -> None:
    link = Link()
    async with serving(echo) as server, Relay(server.address, link) as relay:
        reader, writer = await connect(relay.address)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        link.cut()
        writer.write(b"meanwhile")
        fresh_reader, fresh_writer = await connect(relay.address)
        fresh_writer.write(b"new")
        for waits in (reader.read(1), fresh_reader.read(1)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await waits
        link.mend()
        assert await reader.readexactly(9) == b"meanwhile"
        assert await fresh_reader.readexactly(3) == b"new"
        await closed(writer)
        await closed(fresh_writer)


@pytest.mark.parametrize("requests", [True, False])
async def test_a_one_way_cut_holds_back_one_direction(requests: bool) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def greet(reader: Reader, writer: Writer) -> None:
        while data := await reader.read(1 << 16):
            received.put_nowait(data)
            writer.write(b"response")
            await writer.drain()

    link = Link()
    async with serving(greet) as server, Relay(server.address, link) as relay:
        reader, writer = await connect(relay.address)
        writer.write(b"first")
        assert await received.get() == b"first"
        assert await reader.readexactly(8) == b"response"
        link.cut(requests=requests, responses=not requests)
        writer.write(b"second")
        if not requests:
            assert await received.get() == b"second"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HELD_S):
                await (received.get() if requests else reader.read(1))
        link.mend()
        assert await reader.readexactly(8) == b"response"
        await closed(writer)


async def test_a_link_may_reset_its_connections_and_no_other_s() -> None:
    links = {True: Link(), False: Link()}
    made = 0

    def by_turns(port: int) -> Link:
        nonlocal made
        made += 1
        assert port > 0
        return links[made == 1]

    async with serving(echo) as server, Relay(lambda: server.address, by_turns) as relay:
        ends = [await connect(relay.address) for _ in range(2)]
        for reader, writer in ends:
            writer.write(b"?")
            assert await reader.readexactly(1) == b"?"
        links[True].reset()
        assert isinstance(await server.ended.get(), ConnectionResetError)
        with pytest.raises(ConnectionResetError):
            await ends[0][0].readexactly(1)
        ends[1][1].write(b"!")
        assert await ends[1][0].readexactly(1) == b"!"
        for _, writer in ends:
            await closed(writer)
