"""The one place that says which gRPC status an error becomes, for whole calls and for items of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types
from grpc_status import rpc_status

from galley.common.server.interceptors import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.common.server.logs import get_logger
from galley.core import errors
from galley.pb.galley.v1 import galley_pb2 as pb

_LOG = get_logger(__name__)

_CODES: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnknownSession: grpc.StatusCode.NOT_FOUND,
    errors.KeyReused: grpc.StatusCode.ALREADY_EXISTS,
    errors.Fenced: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TokenizerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.ClientStalled: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.LogLost: grpc.StatusCode.DATA_LOSS,
}

# The servicer's own abort; and what could not be sent, for the caller has gone.
_GRPCS_OWN = (grpc.aio.AbortError, grpc.aio.InternalError)

_NAMES = {int(code.value[0]): code.name.lower() for code in grpc.StatusCode}


def code_of(error: BaseException) -> grpc.StatusCode:
    """INTERNAL for whatever the table does not know."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def error_type(error: BaseException) -> str:
    """The same as telemetry names it: in lower case."""
    return code_of(error).name.lower()


def message_of(error: BaseException) -> str:
    """What a caller may read: nothing of an internal error but that it happened."""
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        return "internal error"
    told = error.told if isinstance(error, errors.GalleyError) else str(error)
    return told or code.value[1]


def rich_status(error: BaseException) -> status_pb2.Status:
    """A google.rpc.Status with BadRequest or RetryInfo where the error has them."""
    status = status_pb2.Status(code=_number(code_of(error)), message=message_of(error))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def item_error_type(status: pb.ItemStatus) -> str:
    """What `error_type` says of the error that became this status."""
    return _NAMES.get(status.code, "unknown")


def item_status(error: BaseException) -> pb.ItemStatus:
    """The same for one item of a batch."""
    return pb.ItemStatus(code=_number(code_of(error)), message=message_of(error))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End a call with the status of `error`."""
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise error  # abort has raised; this line is for the type checker


class Description(NamedTuple):
    """What a client can tell its user about a failed call; `violations` are (field, problem) pairs."""

    code: grpc.StatusCode
    message: str
    violations: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


def describe(error: grpc.RpcError) -> Description:
    """Read the status that `abort` or a foreign server sent."""
    code, message = error.code(), error.details() or ""
    violations: list[tuple[str, str]] = []
    retry_after_s = None
    for detail in _sent_details(error):
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            violations += [(one.field, one.description) for one in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return Description(code, message, tuple(violations), retry_after_s)


class StatusInterceptor(WrappingInterceptor):
    """Turns what a servicer raises into its status; cancellation and what gRPC raises itself pass."""

    for_all = True

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        """Guard the method, whatever its kind."""
        return wrap_handler(handler, unary=_guard_unary, stream=_guard_stream)


def _guard_unary(behavior: Behavior) -> Behavior:
    async def guarded(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except _GRPCS_OWN:
            raise
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            return await _fail(context, error)

    return guarded


def _guard_stream(behavior: Behavior) -> Behavior:
    async def guarded(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except _GRPCS_OWN:
            raise
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            await _fail(context, error)

    return guarded


async def _fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    log_internal(error)
    if isinstance(error, errors.GalleyError) and error.told != str(error):
        _LOG.warning("a call failed", problem=str(error))
    await abort(context, error)


def log_internal(error: BaseException, **facts: object) -> None:
    """Log `error` with its traceback if a caller will only read "internal error"."""
    if code_of(error) is grpc.StatusCode.INTERNAL:
        _LOG.error("internal error", exc_info=error, **facts)


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


def _sent_details(error: grpc.RpcError) -> list[Any]:
    sent: Any = error.trailing_metadata()
    for key, value in sent or ():
        if key == "grpc-status-details-bin":
            return list(status_pb2.Status.FromString(value).details)
    return []
