"""How it is seen that a part of the stack is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def lines(pipe: IO[bytes]) -> Any:
    """The lines of a pipe, as they come; within, it is open."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def listening(ports: Sequence[int]) -> bool:
    """Does somebody take connections on all of these?"""
    for port in ports:
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return True


async def pong(socket: Path) -> bool:
    """Does a server on this unix socket answer a PING?"""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
