"""How a client says who it is: an API key in the metadata of every call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import grpc.aio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

API_KEY_VARIABLE = "GALLEY_API_KEY"


def key_interceptors(api_key: str | None) -> Sequence[grpc.aio.ClientInterceptor]:
    """For a channel whose calls bring `api_key`; None is the environment's, and empty is none."""
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    return (_UnaryKey(key), _StreamKey(key)) if key else ()


class _Key:
    def __init__(self, key: str) -> None:
        self._authorization = ("authorization", f"Bearer {key}")

    def _with_key(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._authorization)
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
