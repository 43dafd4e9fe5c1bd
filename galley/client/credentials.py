"""How a client says who it is: an API key or a token in the metadata of every call.

A token lasts for minutes, so that it is asked for anew with each call, where it is not told once and for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from galley.client.errors import BadKey
from galley.common.secret_file import read_secret

API_KEY_VARIABLE = "GALLEY_API_KEY"
API_KEY_FILE_VARIABLE = "GALLEY_API_KEY_FILE"

Key: TypeAlias = str | Callable[[], str]
"""A key, or what gives the one, or the token, that is good now."""


def key_interceptors(api_key: Key | None) -> Sequence[grpc.aio.ClientInterceptor]:
    """For a channel whose calls bring `api_key`; None is the environment's, and empty is none."""
    key = _of_environment() if api_key is None else api_key
    if not key:
        return ()
    current = key if callable(key) else lambda: key
    return (_UnaryKey(current), _StreamKey(current))


def _of_environment() -> Key:
    """A file is read with each call: whoever writes it has tokens that last for minutes."""
    if file := os.environ.get(API_KEY_FILE_VARIABLE):
        return lambda: _in_file(Path(file))
    return os.environ.get(API_KEY_VARIABLE, "")


def _in_file(path: Path) -> str:
    try:
        return read_secret(path)
    except ValueError as error:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {error}") from None


def _that_can_be_sent(key: str) -> str:
    """What gRPC would refuse as metadata, in words that tell nobody what is wrong."""
    if not (key.isascii() and key.isprintable()):
        raise BadKey(
            "the API key must be one line of printable ASCII characters "
            f"({API_KEY_VARIABLE}, {API_KEY_FILE_VARIABLE} or `api_key`)"
        )
    return key


class _Key:
    def __init__(self, current: Callable[[], str]) -> None:
        self._current = current

    def _with_key(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        authorization = ("authorization", f"Bearer {_that_can_be_sent(self._current())}")
        metadata = grpc.aio.Metadata(*(details.metadata or ()), authorization)
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class _UnaryKey(_Key, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_key(client_call_details), request)


class _StreamKey(_Key, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_key(client_call_details), request)
