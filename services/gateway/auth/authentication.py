"""Identify callers as the settings say: by API key, by signed token, by either, or all alike.

The principals file holds the SHA-256 of API keys, never the keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile, WatchedFiles
from galley.core.admission.principal import ANONYMOUS, Principal, PrincipalLimits
from galley.core.errors import Unauthenticated
from services.gateway.auth.interceptor import Authenticator, Credentials
from services.gateway.auth.jwks import CachedJwks, JwksClient, JwksFile, read_jwks
from services.gateway.auth.jwt import JwtAuthenticator
from services.gateway.auth.principals_file import Principals, read_principals
from services.gateway.settings import TUNING, GatewaySettings, Tuning

_T = TypeVar("_T")
KEY_NEEDED = "an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`"
KEY_UNKNOWN = "this API key is not known"
EITHER_NEEDED = "an API key or a token is needed: `authorization: Bearer KEY OR TOKEN`, or `x-api-key: KEY`"


class Authentication(Authenticator):
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

    def start(self) -> None:
        """Start to fetch keys, if they come from an issuer. Call it in the event loop."""
        if self._tokens is not None and isinstance(self._tokens.keys, CachedJwks):
            self._tokens.keys.start()

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Check the key, or else the token. Raise Unauthenticated or AuthenticationUnavailable."""
        tokens = self._tokens
        if self._principals is not None:
            if not credentials.key:
                raise Unauthenticated(KEY_NEEDED if tokens is None else EITHER_NEEDED)
            principal = self._principals.current().by_key(credentials.key, self._now())
            if principal is not None:
                return principal
            if tokens is None or not credentials.bearer:
                raise Unauthenticated(KEY_UNKNOWN)
        return ANONYMOUS if tokens is None else await tokens.authenticate(credentials.bearer)


def build_authentication(settings: GatewaySettings, tuning: Tuning = TUNING) -> Authentication:
    """Raise BadFile if a file that the settings name is unusable."""
    principals: WatchedFiles[Principals] | None = None
    if settings.api_keys_file:
        principals = _watched(NamedFile("api_keys_file", settings.api_keys_file), read_principals)
    if not settings.jwt_issuer:
        return Authentication(principals)

    def principal(name: str) -> Principal:
        """Return the principal with its limits; without a file the only limit is priority 0."""
        if principals is None:
            return Principal(name, PrincipalLimits(max_priority=0))
        return principals.current().named(name)

    tokens = JwtAuthenticator(settings, _key_source(settings), principal, tuning.jwt_leeway_s)
    return Authentication(principals, tokens)


def _watched(file: NamedFile, read: Callable[[NamedFile], _T]) -> WatchedFiles[_T]:
    return WatchedFiles([file], lambda: read(file), check_interval_s=CHECK_INTERVAL_S)


def _key_source(settings: GatewaySettings) -> JwksFile | CachedJwks:
    if settings.jwt_jwks_file:
        return JwksFile(_watched(NamedFile("jwt_jwks_file", settings.jwt_jwks_file), read_jwks))
    client = JwksClient(settings.jwt_issuer, settings.jwt_jwks_url, settings.jwt_ca_file)
    client.ssl_context()  # refuses an unusable CA file at once
    return CachedJwks(client.fetch)
