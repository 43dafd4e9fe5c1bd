"""Who makes a call: an interceptor asks an `Authenticator` and hands its answer on to the servicer.

Health and reflection stay open. What was presented is never logged, traced or repeated in a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from galley.common.server.interceptors import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.core.admission.principal import ANONYMOUS, Principal
from galley.core.errors import Broken

_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Presented:
    """What a call says of its caller. Metadata by lower-case name; of a repeated one, the last."""

    metadata: Mapping[str, str]

    @property
    def bearer(self) -> str:
        """Of `authorization: Bearer …`; empty if there is none."""
        authorization = self.metadata.get("authorization", "")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            return authorization[len(_BEARER) :].strip()
        return ""

    @property
    def key(self) -> str:
        """The same, or else of `x-api-key: KEY`."""
        return self.bearer or self.metadata.get("x-api-key", "")


class Authenticator(Protocol):
    """Decides who asks. Another way to say who one is, such as a certificate, is another of these."""

    async def authenticate(self, presented: Presented) -> Principal:
        """Raises Unauthenticated, without repeating anything of what was presented; or CallerUnknown."""
        ...


class Everyone(Authenticator):
    """Tells nobody apart."""

    async def authenticate(self, presented: Presented) -> Principal:  # noqa: ARG002  # whatever it is
        """ANONYMOUS."""
        return ANONYMOUS


class PrincipalInterceptor(WrappingInterceptor):
    """Gives each call its principal, or refuses it before anything else is done; inside StatusInterceptor."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        """Authenticate, then go on."""
        return wrap_handler(handler, unary=self._unary, stream=self._stream)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def authenticated(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._identify(context)
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
        """Each call runs in a task, and so a context, of its own: what is set there ends with it."""
        metadata = {
            name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        _PRINCIPAL.set(await self._authenticator.authenticate(Presented(metadata)))


_PRINCIPAL: ContextVar[Principal] = ContextVar("principal")


def caller() -> Principal:
    """The principal of the call that is being served. Raises Broken where no interceptor has set one."""
    try:
        return _PRINCIPAL.get()
    except LookupError as error:
        raise Broken("a call came by without a principal") from error
