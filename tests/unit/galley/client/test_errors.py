"""What a server writes into its errors, and what the client makes of it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types

import galley
from galley.client.errors import GalleyRpcError, rpc_error, status_error


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


PAGE = Path(__file__).resolve().parents[4] / "docs" / "errors.md"


def documented_classes() -> dict[str, str]:
    return dict(re.findall(r"^\| `([A-Z_]+)` \| `(\w+Error)` \|", PAGE.read_text(), re.MULTILINE))


def test_each_documented_status_has_its_class() -> None:
    documented = documented_classes()
    assert len(documented) == 12
    for name, kind in documented.items():
        error = status_error(grpc.StatusCode[name], "why")
        assert type(error) is getattr(galley, kind)
        assert isinstance(error, GalleyRpcError)
        assert error.code.name == name


def test_a_status_of_others_is_the_base_class() -> None:
    assert type(status_error(grpc.StatusCode.PERMISSION_DENIED, "a proxy's")) is GalleyRpcError


def test_an_error_goes_to_another_process() -> None:
    error = status_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", [("field", "bad")], 1.5)
    error.session_id = "session-1"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is galley.ResourceExhaustedError
    assert vars(again) == vars(error)
    assert str(again) == str(error)
