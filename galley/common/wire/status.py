"""Map errors to gRPC and HTTP statuses, for whole calls and for the items of a request.

This is the only place that knows the mapping (the client reads statuses back in `galley.client.errors`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types

from galley.core import errors
from galley.pb.galley.v1 import galley_pb2 as pb

_CODES: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnknownSession: grpc.StatusCode.NOT_FOUND,
    errors.KeyReused: grpc.StatusCode.ALREADY_EXISTS,
    errors.Fenced: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFinished: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OtherVersion: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TokenizerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.ClientStalled: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.LogLost: grpc.StatusCode.DATA_LOSS,
}

_HTTP: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_NAMES = {int(code.value[0]): code.name.lower() for code in grpc.StatusCode}
# The metadata key under which gRPC carries a google.rpc.Status.
DETAILS_KEY = "grpc-status-details-bin"


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of `error`; INTERNAL if the table does not list it."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def http_status(code: grpc.StatusCode) -> int:
    """Return the HTTP status for a code; 500 if the table does not list it."""
    return _HTTP.get(code, 500)


def error_type(error: BaseException) -> str:
    """Return the lower-case name of the status code, as spans and metrics use it."""
    return code_of(error).name.lower()


def message_of(error: BaseException) -> str:
    """Return the message that the caller may read; internal errors say nothing else about themselves."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        return "internal error"
    message = error.public_message if isinstance(error, errors.GalleyError) else str(error)
    return message or code.value[1]


def rich_status(error: BaseException) -> status_pb2.Status:
    """Return a google.rpc.Status, with BadRequest or RetryInfo where the error has them."""
    status = status_pb2.Status(code=_number(code_of(error)), message=message_of(error))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def item_error_type(status: pb.ItemStatus) -> str:
    return _NAMES.get(status.code, "unknown")


def item_status(error: BaseException) -> pb.ItemStatus:
    return pb.ItemStatus(code=_number(code_of(error)), message=message_of(error))


async def abort(context: _Abortable, error: BaseException) -> NoReturn:
    """End the call with the status of `error`: raise gRPC's AbortError."""
    metadata = ((DETAILS_KEY, rich_status(error).SerializeToString()),)
    try:
        await context.abort(code_of(error), message_of(error), metadata)
    except grpc.aio.AbortError as aborted:
        # The call keeps it, and its traceback leads to the call: a cycle, which only a full collection frees.
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(partial(_forget_origin, aborted))
        raise


def _forget_origin(error: BaseException, _: object) -> None:
    error.__traceback__ = error.__context__ = None


class _Abortable(Protocol):
    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn: ...


def _number(code: grpc.StatusCode) -> int:
    return int(code.value[0])


def _details(error: BaseException) -> list[Message]:
    if isinstance(error, errors.InvalidField):
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=error.problem)
        return [bad]
    if isinstance(error, errors.Overloaded):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []
