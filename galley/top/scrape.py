"""Asking a service for its metrics, and reading what it says, within strict limits of size and time.

Whoever answers at the address is not trusted: an answer may be of MAX_BYTES and take TIMEOUT_S; of it, only
metrics of ours are read, MAX_ROWS of them, of lines no longer than MAX_LINE. Numbers that are not finite are
left out, and what cannot be shown in a terminal is replaced.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import math
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from galley.top import names
from galley.top.series import Labels, Samples
from galley.top.service import host_and_port

TIMEOUT_S = 2.0
MAX_BYTES = 2 * 2**20
MAX_LINE = 4096
MAX_ROWS = 10_000
MAX_TEXT = 200
_PIECE = 64 * 1024
# HTTP/1.0: no chunks, and the connection's end is the answer's.
_REQUEST = (
    "GET /metrics HTTP/1.0\r\nHost: {host}\r\nAccept: text/plain; version=0.0.4\r\n"
    "User-Agent: galley-top\r\nConnection: close\r\n\r\n"
)
_UNREADABLE = "sent what cannot be read"


class Away(Exception):
    """A service that does not tell its metrics; the message says why in a few words."""


async def scrape(address: str, timeout_s: float = TIMEOUT_S) -> Samples:
    """The metrics that are told at `address` (host:port). Raises Away."""
    raw = await fetch(address, timeout_s)
    # In a thread, so that a key is heard meanwhile.
    return await asyncio.to_thread(read_samples, body_of(raw))


async def fetch(address: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The whole response, headers too, as it was sent. Raises Away."""
    try:
        host, port = host_and_port(address)
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_REQUEST.format(host=address).encode())
                return await _until_end(reader)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise Away(f"no answer in {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise Away(_why(error)) from None


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await reader.read(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise Away(f"more than {MAX_BYTES // 2**20} MiB")
    return b"".join(pieces)


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown(str(said))


class _Received:
    """Stands in for the socket that http.client reads a response from."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def body_of(raw: bytes) -> str:
    """Raises Away unless it is a good response in plain text."""
    response = http.client.HTTPResponse(cast("socket.socket", _Received(raw)))
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, OSError, ValueError):
        raise Away("no HTTP") from None
    if response.status != http.client.OK:
        raise Away(f"HTTP {response.status}")
    with suppress(UnicodeDecodeError):
        return body.decode()
    raise Away(_UNREADABLE)


def read_samples(text: str) -> Samples:
    """Our own metrics of an exposition, Prometheus's or OpenMetrics'. Raises Away if it is neither."""
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(_ours(text))):
            for sample in family.samples:
                value = float(sample.value)
                labels = sorted((shown(name), shown(of)) for name, of in sample.labels.items())
                if math.isfinite(value):
                    samples.setdefault(sample.name, {})[tuple(labels)] = value
    except (ValueError, IndexError, KeyError, OverflowError):
        raise Away(_UNREADABLE) from None
    return samples


def _ours(text: str) -> Iterator[str]:
    """The lines that hold values of ours; the parser does without the others, and long ones are slow."""
    rows = 0
    for line in text.split("\n"):
        if not line.startswith(names.READ):
            continue
        rows += 1
        if rows > MAX_ROWS or len(line) > MAX_LINE:
            raise Away(f"more than {MAX_ROWS} rows" if rows > MAX_ROWS else f"a line of {len(line)}")
        yield line


def shown(text: str) -> str:
    """Without what a terminal would obey, and not too long."""
    cut = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return cut if cut.isprintable() else "".join(char if char.isprintable() else "?" for char in cut)
