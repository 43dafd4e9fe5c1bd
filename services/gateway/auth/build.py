"""From a gateway's settings to who decides who calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from galley.common.tls.files import LOOK_EVERY_S, NamedFile, WatchedFiles
from galley.core.admission.principal import Principal, PrincipalLimits
from galley.core.errors import Unauthenticated
from services.gateway.auth import api_keys
from services.gateway.auth import jwt as tokens
from services.gateway.auth.interceptor import Authenticator, Everyone, Presented
from services.gateway.auth.issuer import Issuer
from services.gateway.auth.issuer_keys import FetchedKeys, KeyFile
from services.gateway.auth.jwks import read_jwks
from services.gateway.auth.principals_file import Principals, read_principals
from services.gateway.auth.settings import listed
from services.gateway.settings import TUNING, GatewaySettings, Tuning

_T = TypeVar("_T")
EITHER_NEEDED = "an API key or a token is needed: `authorization: Bearer KEY OR TOKEN`, or `x-api-key: KEY`"


class KeysOrTokens(Authenticator):
    """What is no key that is known may be a token."""

    def __init__(self, keys: api_keys.ApiKeys, signed: tokens.Tokens) -> None:
        self._keys = keys
        self._signed = signed

    async def authenticate(self, presented: Presented) -> Principal:
        """See `Authenticator`."""
        if not presented.key:
            raise Unauthenticated(EITHER_NEEDED)
        found = self._keys.find(presented)
        if found is not None:
            return found
        if not presented.bearer:
            raise Unauthenticated(api_keys.UNKNOWN)
        return await self._signed.authenticate(presented)


@dataclass(frozen=True, slots=True)
class Callers:
    """`begin` is called once, in the event loop, before the first call is authenticated."""

    authenticator: Authenticator
    begin: Callable[[], None] = lambda: None


def callers_of(settings: GatewaySettings, tuning: Tuning = TUNING) -> Callers:
    """Raises BadFile if a file that the settings name is of no use."""
    file: WatchedFiles[Principals] | None = None
    if settings.api_keys_file:
        file = _watched(NamedFile("api_keys_file", settings.api_keys_file), read_principals)
    if not settings.jwt_issuer:
        return Callers(Everyone() if file is None else api_keys.ApiKeys(file.current))
    keys = _key_source(settings)
    signed = tokens.Tokens(_expected(settings, tuning.jwt_leeway_s), keys, partial(_named, file))
    return Callers(
        signed if file is None else KeysOrTokens(api_keys.ApiKeys(file.current), signed),
        keys.begin if isinstance(keys, FetchedKeys) else lambda: None,
    )


def _watched(file: NamedFile, read: Callable[[NamedFile], _T]) -> WatchedFiles[_T]:
    return WatchedFiles([file], lambda: read(file), look_every_s=LOOK_EVERY_S)


def _named(file: WatchedFiles[Principals] | None, name: str) -> Principal:
    """With its limits; without a file there are none, but that nobody comes before others."""
    return Principal(name, PrincipalLimits(max_priority=0)) if file is None else file.current().named(name)


def _expected(settings: GatewaySettings, leeway_s: float) -> tokens.Expected:
    return tokens.Expected(
        settings.jwt_issuer,
        listed(settings.jwt_audience),
        listed(settings.jwt_algorithms),
        settings.jwt_principal_claim,
        leeway_s,
    )


def _key_source(settings: GatewaySettings) -> KeyFile | FetchedKeys:
    if settings.jwt_jwks_file:
        return KeyFile(_watched(NamedFile("jwt_jwks_file", settings.jwt_jwks_file), read_jwks))
    issuer = Issuer(settings.jwt_issuer, settings.jwt_jwks_url, settings.jwt_ca_file)
    issuer.trust()
    return FetchedKeys(issuer.keys)
