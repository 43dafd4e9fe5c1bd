"""Check each HTTP request before it is routed, and end it.

In this order: its id, its origin, its principal, its body within bounds. A client that goes away cancels the
handler. An error becomes a response, or ends a response that has begun.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from galley.common.config.settings import ServerLimits
from galley.common.logs import get_logger, log_internal
from galley.core import names
from galley.core.errors import DeadlinePassed, GalleyError
from services.gateway.auth.authentication import Authentication, identify
from services.gateway.http.transport.connection import DRAIN, TRANSPORT
from services.gateway.http.transport.errors import ErrorReply, Refused, error_reply, http_failure
from services.gateway.http.transport.http_call import Headers, HttpCall, deadline_of, header
from services.gateway.http.transport.turns import Turns
from services.gateway.telemetry.call import logging_call
from services.gateway.telemetry.interceptor import RequestTracer

_log = get_logger(__name__)

CALL = "galley.call"
"""The key of a request's scope under which its `HttpCall` is."""
SESSION_ID = "galley.session_id"
"""The key under which a handler leaves the id of the session that it began."""
_OPEN_BODY_BYTES = 1024
"""Most bytes of a body where no key is needed: these calls have none."""
_REPORT_S = 0.5
"""Time that a handler has after the deadline to report it: a session then has ended as one that was late."""
_EXPOSED = "x-galley-session-id, x-request-id, x-should-retry, retry-after, warning"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """Paths that need no key, and origins of pages that may call besides our own."""

    open_paths: Collection[str] = ()
    origins: Collection[str] = ()

    def allows_origin(self, origin: str, scheme: str, host: str) -> bool:
        return origin == f"{scheme}://{host}" or self.is_listed(origin)

    def is_listed(self, origin: str) -> bool:
        return origin in self.origins or "*" in self.origins


class Front:
    """The outermost ASGI application; `traced` says which routes stream answers, by method and path."""

    def __init__(
        self,
        app: ASGIApp,
        authentication: Authentication,
        limits: ServerLimits,
        access: Access,
        tracing: Tracing,
    ) -> None:
        self._app = app
        self._authentication = authentication
        self._limits = limits
        self._access = access
        self._tracing = tracing
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        reply = _Reply(scope, send, self._extra_headers(headers))
        call: HttpCall | None = None
        try:
            with self._logging(scope):
                call = scope[CALL] = HttpCall(headers, scope[TRANSPORT].abort, deadline_of(headers))
                if scope["path"] not in self._access.open_paths:
                    await self._turns.turn()
                self._check_origin(scope, headers)
                async with self._tracing.of(scope, call):
                    await self._serve(scope, receive, reply, call)
                await scope[DRAIN]()  # what the call holds is held until its client has the response
        except asyncio.CancelledError:
            scope[TRANSPORT].abort()  # the client has gone, or reads nothing, or the server stops
        except Exception as error:  # noqa: BLE001  # the outermost guard of a request
            await self._fail(error, reply, scope)
        finally:
            if call is not None:
                call.ended()

    def _logging(self, scope: Scope) -> AbstractContextManager[None]:
        """Write a line for a call; probes and pages are none."""
        if scope["path"] in self._access.open_paths:
            return nullcontext()
        return logging_call(f"{scope['method']} {scope['path']}", http_failure)

    async def _serve(self, scope: Scope, receive: Receive, reply: _Reply, call: HttpCall) -> None:
        if scope["method"] == "OPTIONS" and header(
            call.invocation_metadata(), "access-control-request-method"
        ):
            await _answer_preflight(call.invocation_metadata(), reply)
            return
        async with _ended_at_deadline(call, reply):
            most = _OPEN_BODY_BYTES
            if scope["path"] not in self._access.open_paths:
                is_stream = self._tracing.is_stream(scope)
                await identify(self._authentication, call, is_stream=is_stream)
                most = self._limits.max_message_bytes
            body = await self._body(receive, call.invocation_metadata(), most)
            async with _cancelled_by_disconnect(receive, reply):
                await self._app(scope, _receive_once(body), reply)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origin = header(headers, "origin")
        if origin and not self._access.allows_origin(origin, scope["scheme"], header(headers, "host")):
            raise Refused(
                403,
                "permission_denied",
                "origin: pages of other origins must be named by --http-cors-origins",
            )

    async def _body(self, receive: Receive, headers: Headers, most: int) -> bytes:
        """Return the body. Raise Refused if it has more than `most` bytes, or is late."""
        late = Refused(
            408, "timeout", f"the request did not arrive within {self._limits.request_timeout_s:g} s"
        )
        large = Refused(413, "too_large", f"body: must be at most {most} bytes")
        declared = header(headers, "content-length")
        if declared.isdigit() and int(declared) > most:
            raise large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise late from None

    async def _fail(self, error: Exception, reply: _Reply, scope: Scope) -> None:
        answer = error_reply(error, scope["method"], scope["path"])
        if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log_internal(error)
        if isinstance(error, GalleyError) and error.public_message != str(error):
            _log.warning("call failed", error=str(error))
        if reply.has_begun:
            scope[TRANSPORT].abort()
            return
        session_id = scope.get(SESSION_ID)
        await send_error(answer, reply, {"x-galley-session-id": session_id} if session_id else {})

    def _extra_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        given = header(headers, "x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        bind_contextvars(request_id=request_id)
        extra = [("x-request-id", request_id), ("x-content-type-options", "nosniff")]
        origin = header(headers, "origin")
        if origin and self._access.is_listed(origin):
            extra += [
                ("access-control-allow-origin", origin),
                ("vary", "origin"),
                ("access-control-expose-headers", _EXPOSED),
            ]
        return [(name.encode(), value.encode("latin-1")) for name, value in extra]


class Tracing:
    """Spans of the requests that stream answers; `tracer` is None where traces are off."""

    def __init__(
        self, tracer: RequestTracer | None, routes: Mapping[tuple[str, str], re.Pattern[str]]
    ) -> None:
        """`routes` are patterns of paths by method and route."""
        self.tracer = tracer
        self._routes = routes

    def is_stream(self, scope: Scope) -> bool:
        """Return True for a request that streams an answer."""
        return bool(self._route(scope["method"], scope["path"]))

    def of(self, scope: Scope, call: HttpCall) -> AbstractAsyncContextManager[None]:
        route = self._route(scope["method"], scope["path"])
        if self.tracer is None or not route:
            return nullcontext()
        call.span_attributes = {names.HTTP_METHOD: scope["method"], names.HTTP_ROUTE: route}
        return self.tracer.stream(call, call.span_attributes, http_failure)

    def _route(self, method: str, path: str) -> str:
        for (of_method, route), pattern in self._routes.items():
            if of_method == method and pattern.fullmatch(path):
                return route
        return ""


class _Reply:
    """Send a response with the headers that all responses have, and note its status for the span."""

    def __init__(self, scope: Scope, send: Send, extra: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = False
        self.is_complete = False
        self._scope = scope
        self._send = send
        self._extra = extra

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            if CALL in self._scope:
                self._scope[CALL].span_attributes[names.HTTP_STATUS] = message["status"]
            date = (b"date", formatdate(usegmt=True).encode())
            message["headers"] = [*message.get("headers", ()), *self._extra, date]
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)


async def send_error(reply: ErrorReply, send: Send, more: Mapping[str, str] | None = None) -> None:
    fields = {
        "content-type": "application/json",
        "content-length": str(len(reply.body)),
        **reply.headers,
        **(more or {}),
    }
    headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def _answer_preflight(given: Headers, send: Send) -> None:
    """Allow what the page of a listed origin asks to send; the origin was checked.

    Clients in pages send headers of their own, as OpenAI's does with `x-stainless-lang` and others.
    """
    fields = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": header(given, "access-control-request-headers"),
        "access-control-max-age": "600",
        "content-length": "0",
    }
    headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _receive_once(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # the front watches for a client that leaves
        return messages.pop()

    return receive


@asynccontextmanager
async def _cancelled_by_disconnect(receive: Receive, reply: _Reply) -> AsyncIterator[None]:
    """Cancel the current task when the client goes away before it has its response."""
    task: Any = asyncio.current_task()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.is_complete:
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@asynccontextmanager
async def _ended_at_deadline(call: HttpCall, reply: _Reply) -> AsyncIterator[None]:
    """Cancel the current task soon after the deadline of its call, and raise DeadlinePassed.

    A response that has begun is left to its handler.
    """
    remaining_s = call.time_remaining()
    if remaining_s is None:
        yield
        return
    limit = asyncio.timeout(None)

    def end() -> None:
        if not reply.has_begun:
            limit.reschedule(0)

    timer = asyncio.get_running_loop().call_later(remaining_s + _REPORT_S, end)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed("the deadline of the call has passed") from None
    finally:
        timer.cancel()
