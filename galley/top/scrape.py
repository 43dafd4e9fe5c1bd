"""Fetch and read a service's metrics within strict limits of size and time.

The server is not trusted: a response has at most MAX_BYTES and takes at most TIMEOUT_S; only our own metrics
are read, at most MAX_ROWS lines of at most MAX_LINE characters. Numbers that are not finite are left out, and
control characters are replaced.
"""

from __future__ import annotations

import asyncio
import http
import math
import re
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families

from galley.common.metrics.catalogue import PROCESS_START
from galley.common.printable import one_line
from galley.common.sockets import host_and_port
from galley.top.series import Labels, Samples

TIMEOUT_S = 2.0
MAX_BYTES = 2 * 2**20
MAX_LINE = 4096
MAX_ROWS = 10_000
MAX_TEXT = 200
_PIECE = 64 * 1024
# HTTP/1.0: no chunks, and the response ends with the connection.
_REQUEST = (
    "GET /metrics HTTP/1.0\r\nHost: {host}\r\nAccept: text/plain; version=0.0.4\r\n"
    "User-Agent: galley-top\r\nConnection: close\r\n\r\n"
)
_UNREADABLE = "unreadable response"
# Series with other prefixes are skipped unread.
_OURS = ("galley_", "gen_ai_server_", PROCESS_START.prometheus)


class Away(Exception):
    """The metrics of a service cannot be read; the message gives the reason in a few words."""


async def scrape(address: str, timeout_s: float = TIMEOUT_S) -> Samples:
    """Return the metrics exported at `address` (host:port). Raises Away."""
    raw = await fetch(address, timeout_s)
    # In a thread, so that keys are read meanwhile.
    return await asyncio.to_thread(read_samples, body_of(raw))


async def fetch(address: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the whole response with its headers, as it was sent. Raises Away."""
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
        raise Away(f"no response in {timeout_s:g} s") from None
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
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(str(reason), MAX_TEXT)


def body_of(raw: bytes) -> str:
    """Return the body of a response. Raises Away unless it is whole, plain text with status 200."""
    head, separator, body = raw.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    length = re.search(rb"\r\ncontent-length: *(\d{1,9})\b", head, re.IGNORECASE)
    if not separator or status is None or (length is not None and int(length[1]) > len(body)):
        raise Away("not a whole HTTP response")
    if int(status[1]) != http.HTTPStatus.OK:
        raise Away(f"HTTP {int(status[1])}")
    with suppress(UnicodeDecodeError):
        return body.decode()
    raise Away(_UNREADABLE)


def read_samples(text: str) -> Samples:
    """Return our metrics of an exposition. Raises Away if they are malformed or exceed a limit."""
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(_ours(text))):
            for sample in family.samples:
                value = float(sample.value)
                labels = sorted(
                    (one_line(name, MAX_TEXT), one_line(label, MAX_TEXT))
                    for name, label in sample.labels.items()
                )
                if math.isfinite(value):
                    samples.setdefault(sample.name, {})[tuple(labels)] = value
    except (ValueError, IndexError, KeyError, OverflowError):
        raise Away(_UNREADABLE) from None
    return samples


def _ours(text: str) -> Iterator[str]:
    """Yield the lines of our metrics; the parser does not need the others, and long lines are slow."""
    rows = 0
    for line in text.split("\n"):
        if not line.startswith(_OURS):
            continue
        rows += 1
        if rows > MAX_ROWS or len(line) > MAX_LINE:
            raise Away(f"over {MAX_ROWS} lines" if rows > MAX_ROWS else f"a line over {MAX_LINE} characters")
        yield line
