"""Run an HTTP server in a thread, at loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext


@contextmanager
def serving_http(
    handler: type[BaseHTTPRequestHandler], port: int = 0, tls: SSLContext | None = None
) -> Iterator[str]:
    """Serve until the end of the block; yield host:port. Port 0 lets the system choose."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
