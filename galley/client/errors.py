"""What a client sees when the gateway refuses or fails."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from galley.common.wire.status import describe


class BadKey(ValueError):
    """There is no key, or none that can be shown; says why, and nothing of it."""


class GalleyRpcError(Exception):
    """An RPC ended with another status than OK.

    `violations` are (field, problem) pairs of a BadRequest; `retry_after_s` is a RetryInfo's, in seconds.
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
        """One line: the status, the message, the fields that it does not name yet, when to come back."""
        told = [f"{self.code.name}: {self.message}"]
        told += [f"{field}: {problem}" for field, problem in self.violations if field not in self.message]
        if self.retry_after_s is not None:
            told.append(f"retry after {self.retry_after_s:g} s")
        return "; ".join(told)


def rpc_error(error: grpc.RpcError) -> GalleyRpcError:
    """`error` with its details decoded."""
    return GalleyRpcError(*describe(error))
