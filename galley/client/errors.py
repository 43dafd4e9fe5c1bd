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
    """A call ended with a status other than OK.

    `violations` are the (field, problem) pairs of a BadRequest; `retry_after_s` that of a RetryInfo or None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[tuple[str, str]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

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


def rpc_error(error: grpc.RpcError) -> GalleyRpcError:
    """Return `error` with the details of its status decoded; without them if they are unreadable."""
    try:
        violations, retry_after_s = _decoded(_details(error))
    except DecodeError:
        violations, retry_after_s = [], None
    return GalleyRpcError(error.code(), error.details() or "", violations, retry_after_s)


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
