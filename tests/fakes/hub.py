"""A stub of the Hugging Face hub: the paths that a download of one model takes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

COMMIT = "c" * 40
MODEL = "owner/model"


class Hub:
    """Serves the files of `directory` as the model owner/model.

    Like the hub, it lists a gated model to everybody and gives its files only to callers with the token.
    """

    def __init__(self, directory: Path, token: str = "") -> None:
        self.directory = directory
        self.token = token
        self.url = ""
        self.commit = COMMIT
        self.reads: list[tuple[str, int]] = []
        """Name and size of each content that was sent."""
        self.spoiled: list[str] = []
        """Names of files whose next content has a wrong first byte."""
        self.sizes: dict[str, int] = {}
        """Sizes that are listed in place of the true ones."""
        self.held: dict[str, tuple[Event, Event]] = {}
        """Of a file: half of it is sent, the first event is set, and the rest waits for the second."""

    def environment(self, home: Path, **others: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub and the cache in `home`."""
        return {**os.environ, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **others}

    @property
    def bytes_of_weights(self) -> int:
        return sum(size for name, size in self.reads if name.endswith(".safetensors"))

    def tree(self) -> list[dict[str, Any]]:
        files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        entries = [_entry(path) | {"path": str(path.relative_to(self.directory))} for path in files]
        return [entry | {"size": self.sizes.get(entry["path"], entry["size"])} for entry in entries]


def _is_large(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _entry(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "size": len(content), "oid": git_name(content)}
    if _is_large(path):
        pointer = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entry["lfs"] = pointer
    return entry


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{MODEL}/tree/"):
            self._send(json.dumps(self.hub.tree()).encode())
        elif self.path.startswith(f"/api/models/{MODEL}"):
            names = [{"rfilename": entry["path"]} for entry in self.hub.tree()]
            self._send(json.dumps({"id": MODEL, "sha": self.hub.commit, "siblings": names}).encode())
        else:
            self._file(body=True)

    def _file(self, *, body: bool) -> None:
        _, _, rest = unquote(self.path.partition("?")[0]).partition(f"/{MODEL}/resolve/")
        path = self.hub.directory / rest.partition("/")[2]
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401, "GatedRepo")
        else:
            self._content(path, body=body)

    def _content(self, path: Path, *, body: bool) -> None:
        content, status = path.read_bytes(), 200
        entry = _entry(path)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        if body and path.name in self.hub.spoiled:
            self.hub.spoiled.remove(path.name)
            content = bytes([content[0] ^ 1]) + content[1:]
        if ranges := self.headers.get("Range"):
            first, _, last = ranges.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        if body:
            self.hub.reads.append((path.name, len(content)))
        self._send(content, status, body=body, etag=etag, held=self.hub.held.get(path.name))

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(
        self,
        content: bytes,
        status: int = 200,
        *,
        body: bool = True,
        etag: str = "",
        held: tuple[Event, Event] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.end_headers()
        if not body:
            return
        half = len(content) // 2 if held else 0
        self.wfile.write(content[:half])
        if held:
            self.wfile.flush()
            sent, rest = held
            sent.set()
            rest.wait(60)
        self.wfile.write(content[half:])

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def serving(directory: Path, token: str = "") -> Iterator[Hub]:
    """Serve a hub on loopback; `token` gates the model."""
    hub = Hub(directory, token)
    with _server(hub, "127.0.0.1", 0) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _server(hub: Hub, host: str, port: int) -> ThreadingHTTPServer:
    return ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {"hub": hub}))


def main() -> None:
    """Serve the model in a directory at a port of all addresses, to callers with a token."""
    directory, port, token = sys.argv[1:]
    with _server(Hub(Path(directory), token), "", int(port)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
