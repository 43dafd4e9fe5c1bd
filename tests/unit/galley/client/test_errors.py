"""What a server writes into its errors, and what the client makes of it."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types

from galley.client.errors import rpc_error


def error_with(details: bytes) -> grpc.aio.AioRpcError:
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailer, "busy")


def status_with(kind: str, value: bytes) -> bytes:
    status = status_pb2.Status()
    status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=value)
    return bytes(status.SerializeToString())


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff\xff",
        status_with("BadRequest", b"\x0a\xff"),
        status_with("RetryInfo", b"\x0a\xff"),
        status_with("BadRequest", b"\x0a\x03\x0a\x01\xff"),
    ],
    ids=["no status", "no violations", "no delay", "a field that is not UTF-8"],
)
def test_unreadable_details_leave_the_plain_error(details: bytes) -> None:
    error = rpc_error(error_with(details))
    assert str(error) == "RESOURCE_EXHAUSTED: busy"
    assert (error.violations, error.retry_after_s) == ((), None)


def test_a_negative_delay_means_at_once() -> None:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds = -5
    assert rpc_error(error_with(status_with("RetryInfo", info.SerializeToString()))).retry_after_s == 0.0
