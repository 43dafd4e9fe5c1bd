"""Identify callers as the settings say: by API key, by signed token, by either, or all alike.

An interceptor hands the principal to the servicer. The principals file holds the SHA-256 of API keys, never
the keys themselves. Credentials are never logged, traced or repeated in a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from structlog.contextvars import bind_contextvars

from galley.common.tls.files import CALL_PATIENCE_S, CHECK_INTERVAL_S, NamedFile, WatchedFiles
from galley.common.wire.handlers import (
    Context,
    Handler,
    HasMetadata,
    WrappingInterceptor,
    repeated_names,
    run_within,
    text_metadata,
)
from galley.core.admission.admission import ANONYMOUS, Principal, PrincipalLimits
from galley.core.errors import AuthenticationUnavailable, Unauthenticated
from services.gateway.auth.principals_file import Principals, read_principals
from services.gateway.settings import TUNING, GatewaySettings, Tuning
from services.gateway.telemetry.call import logging_call

if TYPE_CHECKING:  # PyJWT and httpx2 are slow to load
    from services.gateway.auth.jwt import JwtAuthenticator

_T = TypeVar("_T")
KEY_NEEDED = "an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`"
KEY_UNKNOWN = "this API key is not known"
EITHER_NEEDED = "an API key or a token is needed: `authorization: Bearer KEY OR TOKEN`, or `x-api-key: KEY`"
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """The text metadata of a call, by lower-case name, and the names that it has more than once.

    Reading a repeated credential raises Unauthenticated: a proxy may have checked the other one.
    """

    metadata: Mapping[str, str]
    repeated: frozenset[str] = frozenset()

    @property
    def bearer(self) -> str:
        authorization = self._only("authorization")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            return authorization[len(_BEARER) :].strip()
        return ""

    @property
    def key(self) -> str:
        bearer, key = self.bearer, self._only("x-api-key")
        return bearer or key

    def _only(self, name: str) -> str:
        if name in self.repeated:
            raise Unauthenticated(f"{name}: must be sent once, got it several times")
        return self.metadata.get(name, "")


class Authentication:
    """Accept the keys of a principals file, tokens, or both; without either, all callers are ANONYMOUS."""

    def __init__(
        self,
        principals: WatchedFiles[Principals] | None = None,
        tokens: JwtAuthenticator | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._principals = principals
        self._tokens = tokens
        self._now = now
        self.on_stream_unidentified: Callable[[AuthenticationUnavailable], None] = lambda _: None
        """Called for each call that would stream an answer, and whose caller cannot be identified now."""

    def start(self) -> None:
        """Start to fetch keys, if they come from an issuer. Call it in the event loop."""
        if self._tokens is not None:
            self._tokens.keys.start()

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Return the key's or the token's principal. Raise Unauthenticated or AuthenticationUnavailable."""
        tokens = self._tokens
        if self._principals is not None:
            if not credentials.key:
                raise Unauthenticated(KEY_NEEDED if tokens is None else EITHER_NEEDED)
            principals = await self._principals.checked(CALL_PATIENCE_S)
            principal = principals.by_key(credentials.key, self._now())
            if principal is not None:
                return principal
            if tokens is None or not credentials.bearer:
                raise Unauthenticated(KEY_UNKNOWN)
        return ANONYMOUS if tokens is None else await tokens.authenticate(credentials.bearer)

    async def current_principal(self, principal: Principal) -> Principal:
        """Return a principal as the file has it now; without a file, as it is given."""
        if self._principals is None:
            return principal
        return (await self._principals.checked()).named(principal.name)


def build_authentication(settings: GatewaySettings, tuning: Tuning = TUNING) -> Authentication:
    """Return the authentication that the settings describe. Raise BadFile if a file of theirs is unusable."""
    principals: WatchedFiles[Principals] | None = None
    if settings.api_keys_file:
        principals = _watched(NamedFile("api_keys_file", settings.api_keys_file), read_principals)
    return Authentication(principals, _tokens(settings, tuning, principals) if settings.jwt_issuer else None)


def _tokens(
    settings: GatewaySettings, tuning: Tuning, principals: WatchedFiles[Principals] | None
) -> JwtAuthenticator:
    from services.gateway.auth import jwks, jwt  # noqa: PLC0415  # slow, and needed with an issuer only

    def principal(name: str) -> Principal:
        """Return the principal with its limits; without a file the only limit is priority 0."""
        if principals is None:
            return Principal(name, PrincipalLimits(max_priority=0))
        return principals.latest().named(name)

    if settings.jwt_jwks_file:
        file = NamedFile("jwt_jwks_file", settings.jwt_jwks_file)
        keys: jwks.JwksFile | jwks.CachedJwks = jwks.JwksFile(_watched(file, jwks.read_jwks))
    else:
        client = jwks.JwksClient(settings.jwt_issuer, settings.jwt_jwks_url, settings.jwt_ca_file)
        keys = jwks.CachedJwks(client.fetch)
    return jwt.JwtAuthenticator(settings, keys, principal, tuning.jwt_leeway_s)


def _watched(file: NamedFile, read: Callable[[NamedFile], _T]) -> WatchedFiles[_T]:
    return WatchedFiles([file], lambda: read(file), check_interval_s=CHECK_INTERVAL_S)


class PrincipalInterceptor(WrappingInterceptor):
    """Set the principal of each call, or reject the call, and log the call. Runs inside StatusInterceptor."""

    def __init__(self, authentication: Authentication) -> None:
        self._authentication = authentication

    def wrap(self, handler: Handler, method: str) -> Handler:
        return run_within(
            handler, partial(self._identify, method.strip("/"), is_stream=handler.response_streaming)
        )

    @asynccontextmanager
    async def _identify(self, method: str, context: Context, *, is_stream: bool) -> AsyncIterator[None]:
        with logging_call(method):
            await identify(self._authentication, context, is_stream=is_stream)
            yield


async def identify(authentication: Authentication, call: HasMetadata, *, is_stream: bool) -> None:
    """Set the principal of a call. Raise Unauthenticated or AuthenticationUnavailable.

    `is_stream`: the call would stream an answer.
    """
    bind_contextvars(principal="unknown")
    try:
        principal = await authentication.authenticate(Credentials(text_metadata(call), repeated_names(call)))
    except AuthenticationUnavailable as error:
        if is_stream:
            authentication.on_stream_unidentified(error)
        raise
    _PRINCIPAL.set(principal)
    bind_contextvars(principal=principal.kind)


_PRINCIPAL: ContextVar[Principal] = ContextVar("principal")


def caller() -> Principal:
    return _PRINCIPAL.get()
