"""Errors as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import grpc
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from galley.common.wire.status import code_of, error_type, http_status, message_of
from galley.core.errors import (
    CallerFault,
    InvalidField,
    KeyReused,
    Overloaded,
    Unimplemented,
    UnknownSession,
)
from services.gateway.http.transport.encoding import to_json
from services.gateway.http.transport.mismatch import first_mismatch
from services.gateway.telemetry.call import VALUE, Failure, failure_of

_INVALID = "invalid_request_error"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_FINAL = frozenset({HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT})
"""Statuses that OpenAI's clients would repeat at once, where a conflict stays and the time is used up."""
_NOT_PRINTABLE = re.compile(r"[^!-~ ]")
_MOST_SHOWN = 128
_UNAVAILABLE_RETRY_S = 1.0
_NAMED: dict[type[BaseException], str] = {KeyReused: "idempotency_key", UnknownSession: "session_id"}
# Fields of the wire, and the parameters of the HTTP API that set them.
_PARAMETERS = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^messages\.messages"), "messages"),
    (re.compile(r"^messages\.tools"), "tools"),
    (re.compile(r"^(text|token_ids(\.ids)?)(?=\[|$)"), "prompt"),
    (re.compile(r"^next_index$"), "last-event-id"),
    (re.compile(r"^prediction\.text$"), "prediction.content"),
    (re.compile(r"^priority$"), "service_tier"),
)


_CLOSEST: dict[int, grpc.StatusCode] = {
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Refused(CallerFault):
    """A request that HTTP itself refuses, with a status of its own."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    message: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def object(self) -> dict[str, Any]:
        return {"message": self.message, "type": self._type, "param": self.param, "code": self.code}

    @property
    def body(self) -> bytes:
        return to_json({"error": self.object})

    @property
    def _type(self) -> str:
        fallback = _INVALID if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return _TYPES.get(self.status, fallback)


def error_reply(error: BaseException, method: str = "", path: str = "") -> ErrorReply:
    """Return what the caller is told about an error of a request of `method` to `path`."""
    if isinstance(error, Refused):
        return ErrorReply(error.status, str(error), error.code, error.param)
    if isinstance(error, HTTPException):  # an unknown path or method
        is_unknown = error.status_code == HTTPStatus.NOT_FOUND
        must = "path: must be one of the API" if is_unknown else "method: must be one of the path"
        code = "not_found" if is_unknown else "invalid_argument"
        given = _NOT_PRINTABLE.sub("?", f"{method} {path}"[:_MOST_SHOWN])
        return ErrorReply(error.status_code, f"{must}, got {given}", code, headers=dict(error.headers or {}))
    if isinstance(error, RequestValidationError):
        return _not_as_described(error)
    status = http_status(code_of(error))
    if isinstance(error, InvalidField):
        return _invalid(error, status)
    if isinstance(error, Unimplemented):
        name = error.field  # named by this API: nothing that it takes is unimplemented on the wire
        return ErrorReply(status, f"{name}: is not supported", "unsupported_parameter", name)
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers = _retry_after(error.retry_after_s)
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = _retry_after(_UNAVAILABLE_RETRY_S)
    elif status in _FINAL:
        headers = {"x-should-retry": "false"}
    elif status == HTTPStatus.UNAUTHORIZED:
        headers = {"www-authenticate": "Bearer"}
    return ErrorReply(status, message_of(error), error_type(error), _NAMED.get(type(error)), headers)


def http_failure(error: BaseException) -> Failure:
    """Describe an error as `failure_of` does; what HTTP itself refuses has the status that comes closest."""
    failure, reply = failure_of(error), error_reply(error)
    status = failure.status
    if status is grpc.StatusCode.INTERNAL and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        status = _CLOSEST.get(reply.status, grpc.StatusCode.INVALID_ARGUMENT)
    return Failure(status, reply.param or "", reply.message.partition(VALUE)[0], failure.reason)


def parameter_of(wire_field: str) -> str:
    """Return the parameter that sets a field of the wire."""
    for pattern, name in _PARAMETERS:
        if pattern.search(wire_field):
            return pattern.sub(name, wire_field)
    return wire_field


def _not_as_described(error: RequestValidationError) -> ErrorReply:
    """Name the first parameter that is not as the API describes it, without its value."""
    problem = error.errors()[0]
    if problem["loc"] == ("body",) and isinstance(problem.get("input"), bytes):
        return ErrorReply(400, "content-type: must be application/json", "invalid_argument", "content-type")
    if problem["type"] == "json_invalid":
        return ErrorReply(400, f"body: must be JSON: {problem['ctx']['error']}", "invalid_argument")
    name, must = first_mismatch(error.errors())
    return ErrorReply(400, f"{name or 'body'}: {must}", "invalid_argument", name or None)


def _invalid(error: InvalidField, status: int) -> ErrorReply:
    name, code = parameter_of(error.field), error_type(error)
    if error.field == "model":
        status, code = HTTPStatus.NOT_FOUND, "model_not_found"
    elif error.field == "priority":
        status, code = HTTPStatus.FORBIDDEN, "permission_denied"
    return ErrorReply(int(status), f"{name}: {error.problem}", code, name)


def _retry_after(seconds: float) -> dict[str, str]:
    """Return when to retry: in seconds by the standard, in milliseconds for OpenAI's clients."""
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }
