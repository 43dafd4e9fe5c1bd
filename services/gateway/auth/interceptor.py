"""Authentication: an interceptor asks an `Authenticator` for the principal and hands it to the servicer.

Health and reflection stay open. Credentials are never logged, traced or repeated in a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from structlog.contextvars import bind_contextvars

from galley.common.wire.handlers import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.core.admission.principal import Principal
from services.gateway.telemetry.call import logging_rejection

_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """The metadata of a call, by lower-case name; of a repeated name, the last value."""

    metadata: Mapping[str, str]

    @property
    def bearer(self) -> str:
        authorization = self.metadata.get("authorization", "")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            return authorization[len(_BEARER) :].strip()
        return ""

    @property
    def key(self) -> str:
        return self.bearer or self.metadata.get("x-api-key", "")


class Authenticator(Protocol):
    async def authenticate(self, credentials: Credentials) -> Principal:
        """Raise Unauthenticated, which repeats no credential, or AuthenticationUnavailable."""
        ...


class PrincipalInterceptor(WrappingInterceptor):
    """Sets the principal of each call, or refuses the call. Runs inside StatusInterceptor."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        return wrap_handler(handler, unary=self._unary, stream=self._stream)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def authenticated(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._identify(context)
            with logging_rejection():
                return await behavior(request, context)

        return authenticated

    def _stream(self, behavior: Behavior) -> Behavior:
        async def authenticated(
            request: object, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            await self._identify(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return authenticated

    async def _identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metadata = {
            name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        with logging_rejection(principal="unknown"):
            principal = await self._authenticator.authenticate(Credentials(metadata))
        _PRINCIPAL.set(principal)
        bind_contextvars(principal=principal.kind)


_PRINCIPAL: ContextVar[Principal] = ContextVar("principal")


def caller() -> Principal:
    return _PRINCIPAL.get()
