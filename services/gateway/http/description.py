"""Serve the API's description, and a page that shows it: Swagger UI, whose files fastapi-offline brings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from starlette.routing import Route

from services.gateway.http.page.files import page_route
from services.gateway.http.transport.encoding import to_json

_HTML = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Galley API</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="page"></div><script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script></body>
</html>
"""
# Without a validator: that would send the description to another host.
_SCRIPT = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null});\n'
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


def description_routes(app: FastAPI) -> Iterator[Route]:
    """Yield the route of the page, and of each file that it loads.

    The description of `app` is made here, at the start, because it takes a quarter of a second.
    """
    found = find_spec("fastapi_offline")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("fastapi_offline: must be installed for the page at /docs")
    folder = Path(found.origin).parent / "static"
    for path, body, kind in (
        ("/openapi.json", to_json(app.openapi()), "application/json"),
        ("/docs", _HTML.encode(), "text/html"),
        ("/docs/start.js", _SCRIPT.encode(), "text/javascript"),
        ("/docs/swagger-ui.css", (folder / "swagger-ui.css").read_bytes(), "text/css"),
        ("/docs/swagger-ui-bundle.js", (folder / "swagger-ui-bundle.js").read_bytes(), "text/javascript"),
    ):
        yield page_route(path, body, {**_HEADERS, "content-type": f"{kind}; charset=utf-8"})
