"""Check that a process of the stack, or its store, can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import IO, Any

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 1.5


@contextlib.asynccontextmanager
async def lines(pipe: IO[bytes]) -> Any:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that are free at this moment."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


async def is_listening(ports: Sequence[int]) -> bool:
    return not any([await _problem("", asyncio.open_connection(LOOPBACK, port)) for port in ports])


async def is_answering(path: Path) -> bool:
    """Return True if a Redis server on this unix socket answers a PING."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
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


async def unreachable(redis_url: str) -> str:
    """Return why no server of a Redis URL accepts connections; empty if one does. Raises ValueError."""
    from galley.common.redis.url import parse_redis_url  # noqa: PLC0415  # an extra

    url = parse_redis_url(redis_url)
    attempts = [_problem(f"{host}:{port}", asyncio.open_connection(host, port)) for host, port in url.hosts]
    if url.path:
        attempts.append(_problem(url.path, asyncio.open_unix_connection(url.path)))
    problems = await asyncio.gather(*attempts)
    return "; ".join(problems) if all(problems) else ""


async def _problem(place: str, connect: Coroutine[Any, Any, tuple[object, asyncio.StreamWriter]]) -> str:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await connect
    except OSError as error:  # TimeoutError among them
        return f"cannot reach {place}: {_reason(error)}"
    writer.close()
    return ""


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
    # asyncio joins the errors of several addresses of one name into a text without an errno.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
