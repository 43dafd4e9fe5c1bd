"""Serve the page: static files of this folder, which need no key and load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",  # ask each time, so that the page fits the gateway's version
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
}


def page_routes() -> Iterator[Route]:
    """Yield the route of each file: `/` is index.html."""
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            headers = {**_HEADERS, "content-type": _TYPES[path.suffix]}
            place = "/" if path.name == "index.html" else f"/page/{path.name}"
            yield page_route(place, path.read_bytes(), headers)


def page_route(path: str, body: bytes, headers: Mapping[str, str]) -> Route:
    """Return the route of a file; a browser that has it gets 304."""
    etag = f'"{blake2b(body, digest_size=16).hexdigest()}"'
    tagged = {**headers, "etag": etag}

    async def respond(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=tagged)
        return Response(body, headers=tagged)

    return Route(path, respond)
