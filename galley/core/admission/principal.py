"""Who asks, and how much of a gateway may be theirs."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

ANONYMOUS_NAME = "anonymous"
TOKEN_PREFIX = "jwt:"  # noqa: S105  # of names, no secret
"""Begins the name of whoever is known by a signed token, and no other's."""
TENANT_SALT_BYTES = 16
_TENANT_PERSON = b"galley.tenant.v1"
_BURST_S = 60


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """Of one principal at one gateway; None is no bound of its own.

    `tokens_per_s` is kept over time; `burst_tokens` may come at once, a minute's worth where it is not said.
    `max_priority` bounds the priority that its requests may have.
    """

    max_sessions: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int | None = None
    max_priority: int | None = None

    @property
    def burst(self) -> float:
        """Tokens that may come at once; of use only where `tokens_per_s` is set."""
        return float(self.burst_tokens or max(1.0, _BURST_S * (self.tokens_per_s or 0.0)))


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller as its gateway knows it: its sessions and caches are nobody else's."""

    name: str
    limits: PrincipalLimits = PrincipalLimits()

    @property
    def kind(self) -> str:
        """Return how the caller is known: "anonymous", "token" or "key"."""
        if self.name == ANONYMOUS_NAME:
            return "anonymous"
        return "token" if self.name.startswith(TOKEN_PREFIX) else "key"

    @property
    def tenant_salt(self) -> bytes:
        """What its caches are told apart by, the same at all gateways; empty for ANONYMOUS.

        It separates, and is no secret: who can reach a target or draft can name any salt.
        """
        if self.name == ANONYMOUS_NAME:
            return b""
        named = self.name.encode()
        return blake2b(named, digest_size=TENANT_SALT_BYTES, person=_TENANT_PERSON).digest()


ANONYMOUS = Principal(ANONYMOUS_NAME)
"""Everyone, where callers are not told apart."""
