"""Identify callers as the settings say: by API key, by signed token, by either, or all alike.

An interceptor hands the principal to the servicer. The principals file holds the SHA-256 of API keys, never
the keys themselves. Credentials are never logged, traced or repeated in a status.
"""

from __future__ import annotations

import hmac
import secrets
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Annotated, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from structlog.contextvars import bind_contextvars

from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile, WatchedFiles
from galley.common.wire.handlers import Context, Handler, WrappingInterceptor, run_within, text_metadata
from galley.core.admission.principal import (
    ANONYMOUS,
    ANONYMOUS_NAME,
    TOKEN_PREFIX,
    Principal,
    PrincipalLimits,
)
from galley.core.errors import Unauthenticated
from services.gateway.settings import TUNING, GatewaySettings, Tuning
from services.gateway.telemetry.call import logging_rejection

_T = TypeVar("_T")
_Log: TypeAlias = Callable[[], AbstractContextManager[None]]
KEY_NEEDED = "an API key is needed: `authorization: Bearer KEY` or `x-api-key: KEY`"
KEY_UNKNOWN = "this API key is not known"
EITHER_NEEDED = "an API key or a token is needed: `authorization: Bearer KEY OR TOKEN`, or `x-api-key: KEY`"
_BEARER = "bearer "
_MAX_KEY_BYTES = 1024
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:/%|-]{1,256}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class _Limits(_Strict):
    max_sessions: int | None = Field(default=None, ge=1)
    tokens_per_s: float | None = Field(default=None, gt=0)
    burst_tokens: int | None = Field(default=None, ge=1)
    max_priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    def or_defaults(self, defaults: Self) -> PrincipalLimits:
        values = defaults.model_dump(exclude_none=True) | self.model_dump(exclude_none=True)
        return PrincipalLimits(**{"max_priority": 0, **values})


class _Key(_Strict):
    principal: _Name
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    expires: datetime | None = None


class _File(_Strict):
    """The principals file: API keys, as hashes, and the limits of principals.

    [[keys]]                          # one entry a key; several keys may name one principal
    principal = "team-a"
    sha256 = "9f86d0…"                # SHA-256 of the key, in hex
    expires = 2027-01-31T00:00:00Z    # optional

    [principals.team-a]               # limits of one principal; [defaults] holds those of all others
    max_sessions = 8
    tokens_per_s = 500
    burst_tokens = 20000
    max_priority = 10                 # default: 0

    [principals."jwt:alice@example.com"]    # a principal with a token
    max_sessions = 2
    """

    keys: list[_Key]
    defaults: _Limits = _Limits()
    principals: dict[_Name, _Limits] = {}


class Principals:
    """Index keys by a keyed hash, so that lookup time reveals nothing about them."""

    def __init__(self, file: _File) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys = {self._tag(bytes.fromhex(key.sha256)): key for key in file.keys}
        self._defaults = file.defaults
        self._limits: Mapping[str, _Limits] = file.principals

    def by_key(self, key: str, now: datetime) -> Principal | None:
        """Return the principal of `key`, None if it is unknown. Raise Unauthenticated if it has expired."""
        presented = key.encode()
        if len(presented) > _MAX_KEY_BYTES:
            return None
        digest = sha256(presented).digest()
        entry = self._keys.get(self._tag(digest))
        if entry is None or not hmac.compare_digest(digest, bytes.fromhex(entry.sha256)):
            return None
        if entry.expires is not None and now >= entry.expires:
            raise Unauthenticated("this API key has expired")
        return self.named(entry.principal)

    def named(self, name: str) -> Principal:
        return Principal(name, self._limits.get(name, _Limits()).or_defaults(self._defaults))

    def _tag(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def read_principals(file: NamedFile) -> Principals:
    """Raise BadFile, which names the problem."""
    content = file.read()
    try:
        parsed = _File.model_validate(tomllib.loads(content.decode()))
        _check(parsed)
    except ValidationError as error:
        problems = "; ".join(f"{_place(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        raise file.bad(problems) from None
    except ValueError as error:
        raise file.bad(str(error)) from None
    return Principals(parsed)


def _check(file: _File) -> None:
    """Raise ValueError for problems between entries, which the model does not show."""
    hashes = [key.sha256.lower() for key in file.keys]
    first = {digest: index for index, digest in reversed(list(enumerate(hashes)))}
    for index, key in enumerate(file.keys):
        if key.principal == ANONYMOUS_NAME:
            raise ValueError(f"keys[{index}].principal: must not be {ANONYMOUS_NAME!r}, which means no key")
        if key.principal.startswith(TOKEN_PREFIX):
            raise ValueError(
                f"keys[{index}].principal: must not begin with {TOKEN_PREFIX!r}, which means a token"
            )
        if key.expires is not None and key.expires.tzinfo is None:
            raise ValueError(f"keys[{index}].expires: must have a time zone, such as Z")
        if first[hashes[index]] != index:
            raise ValueError(
                f"keys[{index}].sha256: must be unique, is also that of keys[{first[hashes[index]]}]"
            )
    known = {key.principal for key in file.keys}
    if unused := {name for name in file.principals if not name.startswith(TOKEN_PREFIX)} - known:
        raise ValueError(f"principals.{min(unused)}: must have a key")


def _place(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


if TYPE_CHECKING:  # PyJWT and httpx2 are slow to load
    from services.gateway.auth.jwt import JwtAuthenticator


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

    def start(self) -> None:
        """Start to fetch keys, if they come from an issuer. Call it in the event loop."""
        if self._tokens is not None:
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
    return Authentication(principals, _tokens(settings, tuning, principals) if settings.jwt_issuer else None)


def _tokens(
    settings: GatewaySettings, tuning: Tuning, principals: WatchedFiles[Principals] | None
) -> JwtAuthenticator:
    from services.gateway.auth import jwks, jwt  # noqa: PLC0415  # slow, and needed with an issuer only

    def principal(name: str) -> Principal:
        """Return the principal with its limits; without a file the only limit is priority 0."""
        if principals is None:
            return Principal(name, PrincipalLimits(max_priority=0))
        return principals.current().named(name)

    if settings.jwt_jwks_file:
        file = NamedFile("jwt_jwks_file", settings.jwt_jwks_file)
        keys: jwks.JwksFile | jwks.CachedJwks = jwks.JwksFile(_watched(file, jwks.read_jwks))
    else:
        client = jwks.JwksClient(settings.jwt_issuer, settings.jwt_jwks_url, settings.jwt_ca_file)
        client.ssl_context()  # refuses an unusable CA file at once
        keys = jwks.CachedJwks(client.fetch)
    return jwt.JwtAuthenticator(settings, keys, principal, tuning.jwt_leeway_s)


def _watched(file: NamedFile, read: Callable[[NamedFile], _T]) -> WatchedFiles[_T]:
    return WatchedFiles([file], lambda: read(file), check_interval_s=CHECK_INTERVAL_S)


class PrincipalInterceptor(WrappingInterceptor):
    """Sets the principal of each call, or refuses the call. Runs inside StatusInterceptor."""

    def __init__(self, authentication: Authentication) -> None:
        self._authentication = authentication

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        # Streams log their rejections themselves.
        log: _Log = nullcontext if handler.response_streaming else logging_rejection
        return run_within(handler, partial(self._identify, log))

    @asynccontextmanager
    async def _identify(self, log: _Log, context: Context) -> AsyncIterator[None]:
        with logging_rejection(principal="unknown"):
            principal = await self._authentication.authenticate(Credentials(text_metadata(context)))
        _PRINCIPAL.set(principal)
        bind_contextvars(principal=principal.kind)
        with log():
            yield


_PRINCIPAL: ContextVar[Principal] = ContextVar("principal")


def caller() -> Principal:
    return _PRINCIPAL.get()
