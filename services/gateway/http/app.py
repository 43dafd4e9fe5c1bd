"""The routes of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.types import ASGIApp

from galley.version import __version__
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.operations import Operations
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.api.tokens import Tokens
from services.gateway.http.responses.handlers import ROUTE, Responses

STREAMS = {
    ("POST", "/v1/chat/completions"): re.compile("/v1/chat/completions"),
    ("POST", "/v1/completions"): re.compile("/v1/completions"),
    ("POST", "/v1/responses"): re.compile("/v1/responses"),
    ("GET", "/v1/sessions/{session_id}/events"): re.compile("/v1/sessions/[^/]+/events"),
}
"""The routes that stream answers, with the pattern of their paths."""
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Paths that need no key."""


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorObject


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "A parameter is wrong or not supported.",
        401: "The API key or token is missing or wrong.",
        403: "The principal or the page's origin may not do this.",
        404: "No such session, model or path.",
        405: "The path has no such method.",
        408: "The request did not arrive in time.",
        409: "The idempotency key was used for another request, or another call has the session.",
        413: "The request is too large.",
        431: "The headers are too large.",
        429: "No slot or no tokens are left; Retry-After says when to try again.",
        500: "A fault of Galley.",
        503: "A component is away, or the gateway shuts down; the session can be resumed.",
        504: "The deadline of the request has passed.",
    }.items()
}


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the body. Refuse lone surrogates, NaN, UTF-16 and deep nesting, which Python reads."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise JSONDecodeError(str(error), "", 0) from None


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

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
        return described


def build_app(
    answers: Answers,
    responses: Responses,
    sessions: Sessions,
    tokens: Tokens,
    operations: Operations,
    *,
    described: bool,
) -> FastAPI:
    """Return the API; `described` serves its description, too."""
    app = _App(
        title="Galley",
        version=__version__,
        openapi_url="/openapi.json" if described else None,
        docs_url=None,
        redoc_url=None,
        telemetry=None,
    )
    app.router.route_class = _Route
    streaming = _ERRORS | {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
    add = app.add_api_route
    add(
        "/v1/chat/completions",
        answers.chat,
        methods=["POST"],
        responses=streaming,
        tags=["answers"],
    )
    add(
        "/v1/completions",
        answers.complete,
        methods=["POST"],
        responses=streaming,
        tags=["answers"],
    )
    add(
        "/v1/responses",
        responses.create,
        methods=["POST"],
        responses=streaming,
        tags=["responses"],
    )
    add(ROUTE, responses.retrieve, methods=["GET"], responses=streaming, tags=["responses"])
    add(f"{ROUTE}/cancel", responses.cancel, methods=["POST"], responses=_ERRORS, tags=["responses"])
    add(
        "/v1/sessions/{session_id}/events",
        sessions.events,
        methods=["GET"],
        responses={
            **_ERRORS,
            200: {"content": {"text/event-stream": {}}},
            204: {"description": "All was sent."},
        },
        tags=["sessions"],
    )
    add("/v1/sessions/{session_id}", sessions.state, methods=["GET"], responses=_ERRORS, tags=["sessions"])
    add("/v1/sessions/{session_id}", sessions.abort, methods=["DELETE"], responses=_ERRORS, tags=["sessions"])
    add("/v1/models", operations.models, methods=["GET"], responses=_ERRORS, tags=["models"])
    add("/v1/models/{model:path}", operations.model, methods=["GET"], responses=_ERRORS, tags=["models"])
    add("/tokenize", tokens.tokenize, methods=["POST"], responses=_ERRORS, tags=["tokens"])
    add("/detokenize", tokens.detokenize, methods=["POST"], responses=_ERRORS, tags=["tokens"])
    for path in ("health", "ready", "version", "metrics"):
        add(f"/{path}", getattr(operations, path), methods=["GET"], responses=_ERRORS, tags=["operation"])
    return app
