"""The exceptions of the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types

from galley.common.printable import one_line
from galley.common.tls.files import BadFile


class BadKey(ValueError):
    """The API key is missing or cannot be sent. The message never contains the key."""


BadTlsFile = BadFile
"""A ValueError: a TLS file cannot be used. `setting` is its name in `Tls`, `problem` says why."""


class GalleyRpcError(Exception):
    """A call ended with a status other than OK; each status of docs/errors.md has a class of its own.

    `violations` are the (field, problem) pairs of a BadRequest; `retry_after_s` that of a RetryInfo or None.
    `session_id` is that of the answer, if the gateway has sent it, else empty.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[tuple[str, str]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        # All arguments, because pickle calls the class with them.
        super().__init__(code, message, violations, retry_after_s)
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.session_id = ""

    def __str__(self) -> str:
        """Return one line: status, message, the fields that the message does not name, when to retry.

        A server wrote most of it: characters that break or reorder the line, or that a terminal would
        interpret, are replaced. The attributes hold what was sent.
        """
        parts = [f"{self.code.name}: {self.message}"]
        parts += [f"{field}: {problem}" for field, problem in self.violations if field not in self.message]
        if self.retry_after_s is not None:
            parts.append(f"retry after {self.retry_after_s:g} s")
        line = "; ".join(parts)
        return one_line(line, len(line))


class InvalidArgumentError(GalleyRpcError):
    """A field of the request is out of its bounds; `violations` names it."""


class UnimplementedError(GalleyRpcError):
    """The request has a field, or names a method, that the gateway does not serve."""


class UnauthenticatedError(GalleyRpcError):
    """The API key or token is missing or not accepted."""


class NotFoundError(GalleyRpcError):
    """The session is unknown, expired or another principal's."""


class AlreadyExistsError(GalleyRpcError):
    """The idempotency key was used with another request."""


class FailedPreconditionError(GalleyRpcError):
    """A newer call has claimed the session."""


class ResourceExhaustedError(GalleyRpcError):
    """The gateway, or the principal's share of it, is full; try again after `retry_after_s`."""


class DeadlineExceededError(GalleyRpcError):
    """`timeout_s` passed; `resume` with `session_id` returns the rest."""


class UnavailableError(GalleyRpcError):
    """No gateway could be reached, or none could go on with the session, for the time of `Retries`."""


class DataLossError(GalleyRpcError):
    """The token log contradicts what was received, or cannot be read."""


class InternalError(GalleyRpcError):
    """A fault of Galley, or a stream that breaks the protocol."""


_CLASSES: dict[grpc.StatusCode, type[GalleyRpcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    # A stopping gateway cancels its streams.
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def status_error(
    code: grpc.StatusCode,
    message: str,
    violations: Sequence[tuple[str, str]] = (),
    retry_after_s: float | None = None,
) -> GalleyRpcError:
    """Return an error of the class of `code`."""
    return _CLASSES.get(code, GalleyRpcError)(code, message, violations, retry_after_s)


def rpc_error(error: grpc.RpcError) -> GalleyRpcError:
    """Return `error` with the details of its status decoded; without them if they are unreadable."""
    try:
        violations, retry_after_s = _decoded(_details(error))
    except DecodeError:
        violations, retry_after_s = [], None
    return status_error(error.code(), error.details() or "", violations, retry_after_s)


def _decoded(details: Sequence[Any]) -> tuple[list[tuple[str, str]], float | None]:
    violations: list[tuple[str, str]] = []
    retry_after_s = None
    for detail in details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [(one.field, one.description) for one in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_after_s = max(0.0, retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9)
    return violations, retry_after_s


def _details(error: grpc.RpcError) -> list[Any]:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            return list(status_pb2.Status.FromString(value).details)
    return []
