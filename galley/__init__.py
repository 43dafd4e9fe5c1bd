"""Galley: speculative decoding served as microservices.

from galley import Client

with Client("127.0.0.1:50051") as client:
    for event in client.stream("The capital of France is", max_tokens=16):
        print(event.chunk.text, end="")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from galley.version import __version__

if TYPE_CHECKING:  # loaded on first use: grpc takes a while, and the services never need the client
    from galley.client.client import AsyncClient
    from galley.client.errors import BadKey, BadTlsFile, GalleyRpcError
    from galley.client.options import GenerateOptions, Message, Retries, Speculation, Tls
    from galley.client.streams import AsyncStream, ResumePoint
    from galley.client.sync import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadKey",
    "BadTlsFile",
    "Client",
    "GalleyRpcError",
    "GenerateOptions",
    "Message",
    "ResumePoint",
    "Retries",
    "Speculation",
    "Stream",
    "Tls",
    "__version__",
]

_MODULES = {
    "AsyncClient": "client",
    "BadKey": "errors",
    "BadTlsFile": "errors",
    "Client": "sync",
    "GalleyRpcError": "errors",
    "GenerateOptions": "options",
    "Message": "options",
    "ResumePoint": "streams",
    "Retries": "options",
    "Speculation": "options",
    "Stream": "sync",
    "Tls": "options",
    "AsyncStream": "streams",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'galley' has no attribute {name!r}")
    return getattr(importlib.import_module(f"galley.client.{_MODULES[name]}"), name)
