"""Galley: speculative decoding served as microservices.

from galley import Client

with Client("127.0.0.1:50051") as client:
    print(client.generate("The capital of France is", max_tokens=16).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from galley.version import __version__

if TYPE_CHECKING:  # loaded on first use: grpc takes a while, and the services never need the client
    from galley.client.audit import AuditCounts, AuditReport, Difference, Verdict
    from galley.client.client import AsyncClient
    from galley.client.errors import (
        AlreadyExistsError,
        BadKey,
        BadTlsFile,
        DataLossError,
        DeadlineExceededError,
        FailedPreconditionError,
        GalleyRpcError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
        UnimplementedError,
    )
    from galley.client.options import GenerateOptions, Message, Retries, Speculation, Tls
    from galley.client.result import Result, SourceUsage, SpeculationUsage, TokenLogprobs, Usage
    from galley.client.streams import AsyncStream, ResumePoint
    from galley.client.sync import Client, Stream

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "AuditCounts",
    "AuditReport",
    "BadKey",
    "BadTlsFile",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "Difference",
    "FailedPreconditionError",
    "GalleyRpcError",
    "GenerateOptions",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "NotFoundError",
    "ResourceExhaustedError",
    "Result",
    "ResumePoint",
    "Retries",
    "SourceUsage",
    "Speculation",
    "SpeculationUsage",
    "Stream",
    "Tls",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "Verdict",
    "__version__",
]

_MODULES = {
    "audit": ("AuditCounts", "AuditReport", "Difference", "Verdict"),
    "client": ("AsyncClient",),
    "options": ("GenerateOptions", "Message", "Retries", "Speculation", "Tls"),
    "result": ("Result", "SourceUsage", "SpeculationUsage", "TokenLogprobs", "Usage"),
    "streams": ("AsyncStream", "ResumePoint"),
    "sync": ("Client", "Stream"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'galley' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    return getattr(importlib.import_module(f"galley.client.{module}"), name)


def __dir__() -> list[str]:
    return __all__
