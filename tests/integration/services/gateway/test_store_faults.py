"""A store that is full, or whose data change under a stream: a pause or an error, never a wrong token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from galley.client.client import GalleyRpcError, TokenStream
from tests.fakes.redis_servers import VALKEY, Server
from tests.fakes.truth import true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, Received, World, must_be_true, receive, refused

RECEIVED = 8
FAULTS = {
    "a prompt token is flipped": ("SETRANGE", "log", 0, b"\x01"),
    "an output token is flipped": ("SETRANGE", "log", 4 * len(PROMPT_TOKENS) + 8, b"\x01"),
    "the log is torn": ("SETRANGE", "log", 4 * (len(PROMPT_TOKENS) + RECEIVED), b"\x00"),
    "the log grows": ("APPEND", "log", b"\x01\x00\x00\x00"),
    "the log is cut": ("SET", "log", b"\x01\x00\x00\x00"),
    "the log is gone": ("DEL", "log"),
    "a record is flipped": ("SETRANGE", "meta", 0, b"\xff"),
    "the records are gone": ("DEL", "meta"),
    "the session is gone": ("DEL", ""),
}
REPAIRED = {"the session is gone"}
"""Faults that the owner repairs; a changed log could be anybody's work."""


@pytest.fixture
async def world(frail_world: World) -> World:
    return frail_world


@pytest.fixture
def own_store() -> Iterator[Server]:
    """A store as `galley up --data-dir` starts it, on a disk of 1 MiB where this user may mount one."""
    with small_disk() as directory:
        server = Server(VALKEY, directory, "--appendfsync", "everysec")
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="galley-") as directory:
        mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory)
        is_mounted = not os.geteuid() and subprocess.run(mount, check=False).returncode == 0
        try:
            yield Path(directory)
        finally:
            if is_mounted:
                subprocess.run(("umount", "--lazy", directory), check=True)


@asynccontextmanager
async def out_of_memory(store: Server) -> AsyncIterator[None]:
    await store.command("CONFIG", "SET", "maxmemory", "1")
    yield
    await store.command("CONFIG", "SET", "maxmemory", "0")


@asynccontextmanager
async def out_of_disk(store: Server) -> AsyncIterator[None]:
    """Fill the disk, and write until the store has noticed and refuses to write."""
    directory = Path(store.url.removeprefix("unix://")).parent
    if not directory.is_mount():
        pytest.skip("a disk of 1 MiB cannot be mounted")
    filler = directory / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    async with store.raw() as raw, asyncio.timeout(PATIENCE_S):
        while await is_writable(raw):
            pass
    yield
    filler.unlink()


async def is_writable(raw: Redis) -> bool:
    try:
        return bool(await raw.set("noise", bytes(65536)))
    except ResponseError:  # MISCONF
        return False


FULL = pytest.mark.parametrize("full", [out_of_memory, out_of_disk])


@FULL
async def test_a_full_store_is_a_pause(world: World, own_store: Server, full: Any) -> None:
    gateway = await world.gateway(draft="none", window=6)
    stream, received = await world.held(gateway, 2)
    await world.target.waits_after(2)
    async with full(own_store):
        world.target.gate.open()
        await world.target.has_answered(2 + 6)
        assert len(received.tokens) == 2
    must_be_true(await received.listen(stream))


@FULL
async def test_a_store_that_stays_full_is_unavailable(world: World, own_store: Server, full: Any) -> None:
    gateway = await world.gateway(draft="none", store_timeout_s=0.2)
    stream, received = await world.held(gateway, 2)
    await world.target.waits_after(2)
    async with full(own_store):
        world.target.gate.open()
        assert await end_of(received, stream) is grpc.StatusCode.UNAVAILABLE
        assert (await refused(receive(gateway.generate()))).code is grpc.StatusCode.UNAVAILABLE
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


async def change(store: Server, name: str) -> None:
    command, part, *values = FAULTS[name]
    async with store.raw() as raw:
        [key] = [key async for key in raw.scan_iter("galley:sessions:*}" + (part and f":{part}"))]
        await raw.execute_command(command, key, *values)  # type: ignore[no-untyped-call]  # is untyped


async def end_of(received: Received, stream: TokenStream) -> grpc.StatusCode:
    """Read to the end, or to the error."""
    try:
        await received.listen(stream)
    except GalleyRpcError as error:
        return error.code
    must_be_true(received)
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", FAULTS)
async def test_changed_data_end_a_stream_or_are_repaired(world: World, own_store: Server, name: str) -> None:
    gateway, other = [await world.gateway(draft="none", store_timeout_s=0.5) for _ in range(2)]
    stream, received = await world.held(gateway, RECEIVED)
    await world.target.waits_after(RECEIVED)
    await change(own_store, name)
    world.target.gate.open()
    truth = true_output(PROMPT_TOKENS, MAX_TOKENS)
    assert await end_of(received, stream) in {grpc.StatusCode.OK, grpc.StatusCode.DATA_LOSS}
    assert received.tokens == truth[: len(received.tokens)]
    again = Received()
    code = await end_of(again, other.client.resume(stream.session_id))
    if name in REPAIRED:
        assert code is grpc.StatusCode.OK
    else:
        assert code is grpc.StatusCode.DATA_LOSS
        assert not again.tokens
