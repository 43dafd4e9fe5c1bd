"""Signed tokens (JWT, RFC 7519) of one issuer: a claim names the principal.

A refused caller learns no reason, except that a token with a valid signature has expired or is not valid yet.
The log counts the reasons and contains nothing of the tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import jwt

from galley.common.logs import get_logger
from galley.core.admission.admission import TOKEN_PREFIX, Principal
from galley.core.errors import Unauthenticated
from services.gateway.auth.jwks import CachedJwks, JwksFile
from services.gateway.settings import JWT_LEEWAY_S, TokenSettings, comma_separated

JWT_NEEDED = "a token is needed: `authorization: Bearer TOKEN`"
JWT_REFUSED = "this token is not accepted"
JWT_EXPIRED = "this token has expired"
JWT_EARLY = "this token is not valid yet"
MAX_CHARS = 8192
MAX_NAME_CHARS = 256
_SAFE_IN_NAMES = "@:/|"
_LOG_INTERVAL_S = 10.0

_log = get_logger(__name__)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.ImmatureSignatureError, "not valid yet"),
    (jwt.InvalidSignatureError, "signature"),
    (jwt.InvalidIssuerError, "issuer"),
    (jwt.InvalidAudienceError, "audience"),
    (jwt.MissingRequiredClaimError, "a claim is missing"),
)
_MESSAGES = {"expired": JWT_EXPIRED, "not valid yet": JWT_EARLY}


class _Refused(Exception):
    """The reason for which a token is refused, as the log shows it."""


class JwtAuthenticator:
    """Accept tokens that match the settings and are signed by one of `keys`."""

    def __init__(
        self,
        settings: TokenSettings,
        keys: JwksFile | CachedJwks,
        principal: Callable[[str], Principal],
        leeway_s: float = JWT_LEEWAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = keys
        self._issuer = settings.jwt_issuer
        self._audiences = comma_separated(settings.jwt_audience)
        self._algorithms = comma_separated(settings.jwt_algorithms)
        self._claim = settings.jwt_principal_claim
        self._principal = principal
        self._leeway_s = leeway_s
        self._clock = clock
        self._refusals: Counter[str] = Counter()
        self._logged_at_s: dict[str, float] = {}

    async def authenticate(self, token: str) -> Principal:
        """Return the principal that the token names. Raise Unauthenticated or AuthenticationUnavailable."""
        if not token:
            raise Unauthenticated(JWT_NEEDED)
        try:
            return self._principal(self._name(await self._claims(token)))
        except _Refused as refused:
            reason = str(refused)
        self._log_refusal(reason)
        raise Unauthenticated(_MESSAGES.get(reason, JWT_REFUSED))

    async def _claims(self, token: str) -> dict[str, Any]:
        key_id, algorithm = self._header(token)
        key = (await self.keys.current()).find(key_id, algorithm)
        if key is None:
            key = (await self.keys.refreshed()).find(key_id, algorithm)
        if key is None:
            raise _Refused("unknown key")
        try:
            return jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                issuer=self._issuer,
                audience=self._audiences,
                leeway=self._leeway_s,
                options={"require": ["exp", "iss", "aud", self._claim]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError) as error:
            known = (reason for kind, reason in _REASONS if isinstance(error, kind))
            raise _Refused(next(known, "malformed")) from None

    def _header(self, token: str) -> tuple[str | None, str]:
        if len(token) > MAX_CHARS:
            raise _Refused("too long")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _Refused("malformed") from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._algorithms:
            raise _Refused("algorithm")
        if "crit" in header:  # an extension that must be understood, and is not
            raise _Refused("critical header")
        return key_id, algorithm

    def _name(self, claims: dict[str, Any]) -> str:
        """Return the claim as a name, with characters that names may not have percent-encoded."""
        value = claims[self._claim]
        if not isinstance(value, str) or not value:
            raise _Refused("claim")
        try:
            name = TOKEN_PREFIX + quote(value, safe=_SAFE_IN_NAMES)
        except UnicodeError:
            raise _Refused("claim") from None
        if len(name) > MAX_NAME_CHARS:
            raise _Refused("claim")
        return name

    def _log_refusal(self, reason: str) -> None:
        """Log each reason at most every _LOG_INTERVAL_S: unauthenticated callers could flood the log."""
        self._refusals[reason] += 1
        now_s = self._clock()
        if now_s - self._logged_at_s.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at_s[reason] = now_s
            _log.info("tokens refused", reason=reason, total=self._refusals[reason])
