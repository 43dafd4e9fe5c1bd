"""Servers of valid and invalid metrics at free ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler

from tests.fakes.http_server import serving_http

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.contextmanager
def serve_texts(*texts: str, status: int = 200) -> Iterator[str]:
    """Serve the texts in turn, then the last one; yield host:port."""
    left = list(texts)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (left.pop(0) if len(left) > 1 else left[0]).encode() if self.path == "/metrics" else b""
            self.send_response(status if body else 404)
            self.send_header("Content-Type", PROMETHEUS)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as address:
        yield address


@contextlib.asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[str]:
    writers = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        answer(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        for writer in writers:
            writer.transport.abort()


def unused_address() -> str:
    return "127.0.0.1:1"
