"""Build the authenticator that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile, WatchedFiles
from galley.core.admission.principal import Principal, PrincipalLimits
from galley.core.errors import Unauthenticated
from services.gateway.auth.api_keys import KEY_UNKNOWN, ApiKeyAuthenticator
from services.gateway.auth.interceptor import Authenticator, Credentials, NoAuthentication
from services.gateway.auth.jwks import CachedJwks, JwksClient, JwksFile, read_jwks
from services.gateway.auth.jwt import JwtAuthenticator, TokenRules
from services.gateway.auth.principals_file import Principals, read_principals
from services.gateway.auth.settings import comma_separated
from services.gateway.settings import TUNING, GatewaySettings, Tuning

_T = TypeVar("_T")
EITHER_NEEDED = "an API key or a token is needed: `authorization: Bearer KEY OR TOKEN`, or `x-api-key: KEY`"


class KeyOrTokenAuthenticator(Authenticator):
    """Accepts API keys and tokens: a bearer that is no known key is checked as a token."""

    def __init__(self, keys: ApiKeyAuthenticator, tokens: JwtAuthenticator) -> None:
        self._keys = keys
        self._tokens = tokens

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the key or token. Raise Unauthenticated or CallerUnknown."""
        if not credentials.key:
            raise Unauthenticated(EITHER_NEEDED)
        principal = self._keys.find(credentials)
        if principal is not None:
            return principal
        if not credentials.bearer:
            raise Unauthenticated(KEY_UNKNOWN)
        return await self._tokens.authenticate(credentials)


@dataclass(frozen=True, slots=True)
class Authentication:
    """An authenticator; call `start` once in the event loop, before the first call."""

    authenticator: Authenticator
    start: Callable[[], None] = lambda: None


def build_authentication(settings: GatewaySettings, tuning: Tuning = TUNING) -> Authentication:
    """Build it from the settings. Raise BadFile if a file that they name is unusable."""
    principals: WatchedFiles[Principals] | None = None
    if settings.api_keys_file:
        principals = _watched(NamedFile("api_keys_file", settings.api_keys_file), read_principals)
    if not settings.jwt_issuer:
        return Authentication(
            NoAuthentication() if principals is None else ApiKeyAuthenticator(principals.current)
        )
    keys = _key_source(settings)
    tokens = JwtAuthenticator(_rules(settings, tuning.jwt_leeway_s), keys, partial(_principal, principals))
    return Authentication(
        tokens
        if principals is None
        else KeyOrTokenAuthenticator(ApiKeyAuthenticator(principals.current), tokens),
        keys.start if isinstance(keys, CachedJwks) else lambda: None,
    )


def _watched(file: NamedFile, read: Callable[[NamedFile], _T]) -> WatchedFiles[_T]:
    return WatchedFiles([file], lambda: read(file), check_interval_s=CHECK_INTERVAL_S)


def _principal(principals: WatchedFiles[Principals] | None, name: str) -> Principal:
    """Return the principal with its limits; without a file the only limit is priority 0."""
    if principals is None:
        return Principal(name, PrincipalLimits(max_priority=0))
    return principals.current().named(name)


def _rules(settings: GatewaySettings, leeway_s: float) -> TokenRules:
    return TokenRules(
        settings.jwt_issuer,
        comma_separated(settings.jwt_audience),
        comma_separated(settings.jwt_algorithms),
        settings.jwt_principal_claim,
        leeway_s,
    )


def _key_source(settings: GatewaySettings) -> JwksFile | CachedJwks:
    if settings.jwt_jwks_file:
        return JwksFile(_watched(NamedFile("jwt_jwks_file", settings.jwt_jwks_file), read_jwks))
    client = JwksClient(settings.jwt_issuer, settings.jwt_jwks_url, settings.jwt_ca_file)
    client.ssl_context()  # refuses an unusable CA file at once
    return CachedJwks(client.fetch)
