"""The API key or token that a client sends in the metadata of every call.

A token may be valid for minutes only, so a file or a callable is read again for each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from galley.client.errors import BadKey

API_KEY_VARIABLE = "GALLEY_API_KEY"
API_KEY_FILE_VARIABLE = "GALLEY_API_KEY_FILE"

Key: TypeAlias = str | Callable[[], str]
"""An API key or token, or a callable that returns the current one."""


def key_interceptors(api_key: Key | None) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return interceptors that send `api_key`. None: the key of the environment. Empty: no key."""
    key = _environment_key() if api_key is None else api_key
    if not key:
        return ()
    current = key if callable(key) else lambda: key
    return (_UnaryKey(current), _StreamKey(current))


def _environment_key() -> Key:
    if file := os.environ.get(API_KEY_FILE_VARIABLE):
        return lambda: _read_key(Path(file))
    return os.environ.get(API_KEY_VARIABLE, "")


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: holds no line of text")
    return key


def _checked(key: str) -> str:
    # gRPC refuses such metadata with a message that does not name the cause.
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
        authorization = ("authorization", f"Bearer {_checked(self._current())}")
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
