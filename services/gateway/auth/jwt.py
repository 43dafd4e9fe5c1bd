"""Signed tokens (JWT, RFC 7519) of one issuer, as callers show them: who calls is what its claim says.

A caller whose token is not taken is told no more than that, whatever was wrong with it; but that it has
expired, or is not valid yet, where the issuer's signature is on it. The log counts the reasons, and holds
nothing of the tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jwt

from galley.common.server.logs import get_logger
from galley.core.admission.principal import TOKEN_PREFIX, Principal
from galley.core.errors import Unauthenticated
from services.gateway.auth.interceptor import Authenticator, Presented
from services.gateway.auth.issuer_keys import KeySource

NEEDED = "a token is needed: `authorization: Bearer TOKEN`"
NOT_TAKEN = "this token is not taken"
EXPIRED = "this token has expired"
EARLY = "this token is not valid yet"
MAX_CHARS = 8192
MAX_NAME_CHARS = 256
_SAFE_IN_NAMES = "@:/|"
_PAUSE_S = 10.0

_log = get_logger(__name__)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.ImmatureSignatureError, "not valid yet"),
    (jwt.InvalidSignatureError, "signature"),
    (jwt.InvalidIssuerError, "issuer"),
    (jwt.InvalidAudienceError, "audience"),
    (jwt.MissingRequiredClaimError, "a claim is missing"),
)
_TOLD = {"expired": EXPIRED, "not valid yet": EARLY}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a token must say: by whom, for whom (one of them), with which signatures; who is in `claim`."""

    issuer: str
    audiences: tuple[str, ...]
    algorithms: tuple[str, ...]
    claim: str = "sub"
    leeway_s: float = 30.0


class _Refused(Exception):
    """A token is not taken, for a reason in a word or two."""


class Tokens(Authenticator):
    """Tokens as `expected`, signed by one of `keys`; `named` gives a principal of this name its limits."""

    def __init__(
        self,
        expected: Expected,
        keys: KeySource,
        named: Callable[[str], Principal],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected = expected
        self._keys = keys
        self._named = named
        self._clock = clock
        self._refusals: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}

    async def authenticate(self, presented: Presented) -> Principal:
        """See `Authenticator`."""
        if not presented.bearer:
            raise Unauthenticated(NEEDED)
        try:
            return self._named(self._name(await self._claims(presented.bearer)))
        except _Refused as refused:
            reason = str(refused)
        self._count(reason)
        raise Unauthenticated(_TOLD.get(reason, NOT_TAKEN))

    async def _claims(self, token: str) -> dict[str, Any]:
        key_id, algorithm = self._header(token)
        key = (await self._keys.current()).find(key_id, algorithm)
        if key is None:
            key = (await self._keys.newer()).find(key_id, algorithm)
        if key is None:
            raise _Refused("no such key")
        try:
            return jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                issuer=self._expected.issuer,
                audience=self._expected.audiences,
                leeway=self._expected.leeway_s,
                options={"require": ["exp", "iss", "aud", self._expected.claim]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError) as error:
            raise _Refused(_reason(error)) from None

    def _header(self, token: str) -> tuple[str | None, str]:
        """The id of its key and how it is signed, as far as that may be."""
        if len(token) > MAX_CHARS:
            raise _Refused("too long")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _Refused("malformed") from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._expected.algorithms:
            raise _Refused("algorithm")
        if "crit" in header:  # what we must understand, and do not
            raise _Refused("critical header")
        return key_id, algorithm

    def _name(self, claims: dict[str, Any]) -> str:
        """As the claim says, made of characters that names of principals have."""
        said = claims[self._expected.claim]
        if not isinstance(said, str) or not said:
            raise _Refused("claim")
        try:
            name = TOKEN_PREFIX + quote(said, safe=_SAFE_IN_NAMES)
        except UnicodeError:
            raise _Refused("claim") from None
        if len(name) > MAX_NAME_CHARS:
            raise _Refused("claim")
        return name

    def _count(self, reason: str) -> None:
        """In the log now and then: strangers decide how often."""
        self._refusals[reason] += 1
        now_s = self._clock()
        if now_s - self._logged_s.get(reason, -_PAUSE_S) >= _PAUSE_S:
            self._logged_s[reason] = now_s
            _log.info("tokens were not taken", reason=reason, so_far=self._refusals[reason])


def _reason(error: Exception) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "malformed")
