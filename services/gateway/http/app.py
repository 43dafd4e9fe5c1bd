"""The routes of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from json import JSONDecodeError
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from galley.core.errors import InvalidField
from galley.version import __version__
from services.gateway.http import outputs
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.operations import Operations
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.api.tokens import Tokens
from services.gateway.http.responses.handlers import ROUTE, Responses
from services.gateway.http.transport.body import read_json

STREAMS = {
    ("POST", "/v1/chat/completions"): re.compile("/v1/chat/completions"),
    ("POST", "/v1/completions"): re.compile("/v1/completions"),
    ("POST", "/v1/responses"): re.compile("/v1/responses"),
    ("GET", "/v1/sessions/{session_id}/events"): re.compile("/v1/sessions/[^/]+/events"),
}
"""The routes that stream answers, with the pattern of their paths."""
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Paths that need no key."""


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": outputs.ErrorBody, "description": text}
    for status, text in {
        400: "A parameter is wrong or not supported.",
        401: "The API key or token is missing or wrong.",
        403: "The principal or the page's origin may not do this.",
        404: "No such session, model or path.",
        405: "The path has no such method.",
        408: "The request did not arrive in time.",
        409: "The idempotency key was used for another request, another call has the session, or it is live.",
        413: "The request is too large.",
        431: "The headers are too large.",
        429: "No slot or no tokens are left; Retry-After says when to try again.",
        500: "A fault of Galley.",
        503: "A component is away, or the gateway shuts down; the session can be resumed.",
        504: "The deadline of the request has passed.",
    }.items()
}
_ALL_SENT: dict[int, dict[str, Any]] = {204: {"description": "All was sent."}}
_METRICS: dict[str, Any] = {"text/plain": {}, "application/openmetrics-text": {}}


class _JsonRequest(Request):
    """A request whose body was read. Lone surrogates, NaN, UTF-16 and deep nesting are no JSON here."""

    value: Any = None
    problem = ""

    async def read(self) -> None:
        """Read the body. Raise Refused if it holds too much: FastAPI would not pass that on.

        Raise InvalidField if it is compressed.
        """
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise InvalidField("content-encoding", f"must be absent or identity, got {encoding[:32]!r}")
        try:
            self.value = await read_json(await self.body())
        except ValueError as error:
            self.problem = str(error)

    async def json(self) -> Any:
        if self.problem:
            raise JSONDecodeError(self.problem, "", 0)
        return self.value


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            if request.method == "POST":
                await read.read()
            return await handle(read)

        return handle_json


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """Return the router alone: the front maps all errors, by one table."""
        return AsyncExitStackMiddleware(self.router)

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        schemes = {"key": {"type": "http", "scheme": "bearer", "description": "An API key or a token (JWT)."}}
        described["components"]["securitySchemes"] = schemes
        described["security"] = [{"key": []}, {}]
        for operation in (one for path in described["paths"].values() for one in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's own; ours is 400, with our error object
        for unused in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(unused, None)
        return described


def build_app(
    answers: Answers,
    responses: Responses,
    sessions: Sessions,
    tokens: Tokens,
    operations: Operations,
) -> FastAPI:
    """Return the API; `description_routes` serves its description."""
    app = _App(
        title="Galley",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=None,
    )
    app.router.route_class = _Route
    add = partial(_add, app)
    add("POST", "/v1/chat/completions", answers.chat, outputs.ChatAnswers, streams=True)
    add("POST", "/v1/completions", answers.complete, outputs.TextAnswers, streams=True)
    add("POST", "/v1/responses", responses.create, outputs.ResponseBody, streams=True)
    add("GET", ROUTE, responses.retrieve, outputs.ResponseBody, streams=True, more=_ALL_SENT)
    add("GET", f"{ROUTE}/input_items", responses.input_items, outputs.InputItems)
    add("DELETE", ROUTE, responses.delete, outputs.ResponseDeleted)
    add("POST", f"{ROUTE}/cancel", responses.cancel, outputs.ResponseBody)
    add("GET", "/v1/sessions/{session_id}/events", sessions.events, streams=True, more=_ALL_SENT)
    add("GET", "/v1/sessions/{session_id}", sessions.state, outputs.SessionState)
    add("POST", "/v1/sessions/{session_id}/audit", sessions.audit, outputs.Audit)
    add("GET", "/v1/audit", operations.audits, outputs.Audits)
    add("DELETE", "/v1/sessions/{session_id}", sessions.abort, outputs.SessionAborted)
    add("GET", "/v1/models", operations.models, outputs.ServedModels)
    add("GET", "/v1/models/{model:path}", operations.model, outputs.ServedModel)
    add("POST", "/tokenize", tokens.tokenize, outputs.TokenIds)
    add("POST", "/detokenize", tokens.detokenize, outputs.Text)
    add("GET", "/health", operations.health, outputs.Status)
    add("GET", "/ready", operations.ready, outputs.Status, more={503: {"model": outputs.Status}})
    add("GET", "/version", operations.version, outputs.Version)
    add("GET", "/metrics", operations.metrics, more={200: {"content": _METRICS}})
    return app


def _add(
    app: FastAPI,
    method: str,
    path: str,
    handler: Callable[..., Any],
    body: type[BaseModel] | None = None,
    *,
    streams: bool = False,
    more: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Add a route with all that it may respond: a `body`, if it `streams` events, errors, and `more`."""
    good: dict[str, Any] = {"description": "The request was served."}
    if body is not None:
        good["model"] = body
    if streams:
        good["content"] = {"text/event-stream": {}}
    responses: dict[int | str, dict[str, Any]] = {**_ERRORS, 200: good}
    responses |= {status: {**responses.get(status, {}), **extra} for status, extra in more.items()}
    app.add_api_route(
        path,
        handler,
        methods=[method],
        responses=responses,
        response_model=None,
        response_class=Response if body is None else JSONResponse,
        tags=[path.removeprefix("/v1").split("/")[1]],
    )
    if path in OPEN_PATHS:  # probes also send HEAD
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
