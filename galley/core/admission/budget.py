"""Token budgets: what a principal uses over all gateways. Time is an argument, in nanoseconds.

The store holds one bucket for each principal. It fills with `tokens_per_s` up to `burst`, on the store's
clock. A gateway leases tokens from it ahead of need, and takes what calls reserve from its lease.

1. A token is used only after it was taken from the bucket. So all gateways together use at most
   `tokens_per_s` times the time, and `burst`. What is used beyond a reservation (prompts, replayed tokens)
   is charged afterwards and may overdraw the bucket.
2. A bucket that holds `burst` admits a reservation of any size, which may overdraw it.
3. An overdrawn bucket (debt) admits nothing, not even a reservation of 0 tokens.
4. If the response to an exchange is lost, what it returned counts as returned and is not sent again, and what
   it took counts as used. Both come back at the rate. What it charged is charged again.
"""

from __future__ import annotations

from galley.core.admission.admission import LEAST_WAIT_NS, MOST_WAIT_NS, Principal, PrincipalLimits
from galley.core.store import Exchange, Exchanged, TokenBucket

IDLE_NS = 1_000_000_000
"""A lease that no call has used for this long is returned."""
_LEASED_SHARE = 16
"""A gateway leases at most the burst divided by this."""
_SECOND = 1_000_000_000
_LONGEST_NS = 10**9 * _SECOND
_KNOWN_NS = 1 * _SECOND
"""Longest time for which a gateway refuses by what the bucket last held."""


class BudgetLease:
    """One gateway's part of one principal's budget: tokens leased, and tokens to return or to charge."""

    def __init__(self, principal: Principal, now: int) -> None:
        self.principal = principal
        self._leased = 0
        self._owed = 0
        self._wants_more = False
        self._used_ns = now
        # What the bucket held when it refused a call or was in debt, and until when that decides.
        self._level = 0.0
        self._level_ns = now
        self._known_until_ns = now
        self._assigned_ns = now

    @property
    def bucket(self) -> TokenBucket:
        return TokenBucket(self.principal.name, self._limits.tokens_per_s or 0.0, self._limits.burst)

    def try_take(self, tokens: int, now: int) -> bool:
        """Take the tokens from the lease; return False if that does not hold them."""
        self._used_ns = now
        if self._leased < max(tokens, 1):
            return False
        self._leased -= tokens
        self._wants_more = self._leased < self._block // 2
        return True

    def known_wait_ns(self, tokens: int, now: int) -> int:
        """Return how long a call must wait by what the bucket held just now; 0 if the store must be asked."""
        if now >= self._known_until_ns or self._ready_ns(tokens) <= now:
            return 0
        return self._assign(tokens, now)

    def request(self, tokens: int) -> Exchange:
        """Return the exchange for a call of `tokens`; it returns all that is held."""
        return self._send(self._leased, tokens, self._block)

    def add(self, tokens: int, now: int) -> None:
        """Return unused tokens of a reservation; a negative number is a charge. The lease pays it first."""
        if tokens > 0:
            self._known_until_ns = now
        paid = min(self._leased, max(0, -tokens))
        self._leased -= paid
        self._owed += tokens + paid

    def due(self, now: int) -> Exchange | None:
        """Return the exchange that is to be made while no call waits, if any."""
        if self._is_idle(now):
            return self._send(self._leased, None, 0) if self._leased or self._owed else None
        if self._owed or self._wants_more:
            return self._send(0, None, max(0, self._block - self._leased) if self._wants_more else 0)
        return None

    def apply(self, exchange: Exchange, reply: Exchanged, now: int) -> int:
        """Apply the store's reply. Return 0, or how many nanoseconds a refused call must wait."""
        self._leased += reply.leased
        surplus = max(0, self._leased - self._block)  # several calls may have leased at once
        self._leased -= surplus
        self._owed += surplus
        is_refused = exchange.needed is not None and not reply.granted
        if is_refused or reply.level < 0:
            self._level, self._level_ns, self._known_until_ns = reply.level, now, now + _KNOWN_NS
        return self._assign(exchange.needed or 0, now) if is_refused else 0

    def lost(self, exchange: Exchange) -> None:
        """Note that the store may or may not have made the exchange."""
        self._owed += min(0, exchange.returned)

    def retire(self) -> None:
        """Return all that is held by the next exchange."""
        self._used_ns -= IDLE_NS

    def is_over(self, now: int) -> bool:
        """Return True if the lease is empty, and no call has used it recently."""
        return self._is_idle(now) and not self._leased and not self._owed

    def _send(self, leased: int, needed: int | None, ahead: int) -> Exchange:
        exchange = Exchange(leased + self._owed, needed, ahead)
        self._leased -= leased
        self._owed = 0
        self._wants_more = False
        return exchange

    def _assign(self, tokens: int, now: int) -> int:
        """Return the wait of a refused call; calls that must wait get successive times."""
        after_others_ns = now
        if self._assigned_ns > now:
            after_others_ns = self._assigned_ns + self._fill_ns(min(tokens, self._limits.burst))
        self._assigned_ns = max(self._ready_ns(tokens), min(after_others_ns, now + MOST_WAIT_NS))
        return max(self._assigned_ns - now, LEAST_WAIT_NS)

    def _ready_ns(self, tokens: int) -> int:
        """Return when the bucket admits a call of `tokens`, by what it held last."""
        return self._level_ns + self._fill_ns(min(tokens, self._limits.burst) - self._level) + 1

    def _fill_ns(self, tokens: float) -> int:
        return int(min(tokens / (self._limits.tokens_per_s or 1.0) * _SECOND, _LONGEST_NS))

    @property
    def _limits(self) -> PrincipalLimits:
        return self.principal.limits

    @property
    def _block(self) -> int:
        return int(self._limits.burst) // _LEASED_SHARE

    def _is_idle(self, now: int) -> bool:
        return now - self._used_ns >= IDLE_NS
