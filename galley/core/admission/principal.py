"""Principals: who calls, and how much of a gateway each may use."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

ANONYMOUS_NAME = "anonymous"
TOKEN_PREFIX = "jwt:"  # noqa: S105  # of names, no secret
"""Prefix of the names of principals that are known by a signed token, and of no others."""
TENANT_SALT_BYTES = 16
_TENANT_PERSON = b"galley.tenant.v1"
_BURST_S = 60


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """The limits of one principal at one gateway; None means no limit of its own.

    `tokens_per_s` holds over time; `burst_tokens` may be used at once (default: a minute's worth).
    """

    max_sessions: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int | None = None
    max_priority: int | None = None

    @property
    def burst(self) -> float:
        return float(self.burst_tokens or max(1.0, _BURST_S * (self.tokens_per_s or 0.0)))


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller as the gateway knows it. No other principal reaches its sessions and caches."""

    name: str
    limits: PrincipalLimits = PrincipalLimits()

    @property
    def kind(self) -> str:
        if self.name == ANONYMOUS_NAME:
            return "anonymous"
        return "token" if self.name.startswith(TOKEN_PREFIX) else "key"

    @property
    def tenant_salt(self) -> bytes:
        """The salt that separates its caches, the same at all gateways; empty for ANONYMOUS. Not a secret."""
        if self.name == ANONYMOUS_NAME:
            return b""
        named = self.name.encode()
        return blake2b(named, digest_size=TENANT_SALT_BYTES, person=_TENANT_PERSON).digest()


ANONYMOUS = Principal(ANONYMOUS_NAME)
"""The principal of every call where authentication is off."""
