"""Admission: which calls get one of a gateway's slots for streams. Time is an argument, in nanoseconds.

Rules; a refused call costs nothing, and the error says when to retry:

1. A principal has at most `max_sessions` streams open. (`budget` limits its tokens.)
2. While slots are free and nobody else waits, a principal may have all of them. A principal that was refused
   a slot *waits* until some time after its retry is due. While others wait, a principal gets no slot beyond
   its share: the slots divided by the principals that hold or wait for one, rounded up. So slots pass on as
   they come free, and no open stream is ever ended for another.
3. While the gateway is saturated, nobody gets a slot: open streams get slower no further.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.core.admission.attempts import Attempt
from galley.core.errors import Overloaded

ANONYMOUS_NAME = "anonymous"
TOKEN_PREFIX = "jwt:"  # noqa: S105  # a prefix of names, no secret
"""Prefix of the names of principals that are known by a signed token, and of no others."""
_BURST_S = 60


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """The limits of one principal; None means no limit of its own.

    `max_sessions` holds for each gateway, `tokens_per_s` over time for all together. `burst_tokens` may be
    used at once (default: a minute's worth).
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
    """A caller as the gateway knows it. No other principal reaches its sessions and caches.

    With `learns`, drafts may be trained on its sessions, if the deployment does that at all.
    """

    name: str
    limits: PrincipalLimits = PrincipalLimits()
    learns: bool = False

    @property
    def kind(self) -> str:
        if self.name == ANONYMOUS_NAME:
            return "anonymous"
        return "token" if self.name.startswith(TOKEN_PREFIX) else "key"


ANONYMOUS = Principal(ANONYMOUS_NAME, learns=True)
"""The principal of every call where authentication is off."""


_SECOND = 1_000_000_000
# Bounds of the retry time of a refusal.
LEAST_WAIT_NS = 50_000_000
MOST_WAIT_NS = 60 * _SECOND
_FIRST_LENGTH_NS = 1 * _SECOND
# Weight of the latest stream in the mean length.
_NEWEST = 0.2
# How long after its retry is due a principal still counts as waiting.
_LATENESS_NS = 5 * _SECOND
_MOST_ACCOUNTS = 1024

# Reasons of a refusal: no slot, the caller's own limits, or a gateway that is saturated or draining.
NO_SLOT = "streams"
SATURATED = "saturated"
NO_SHARE = "share"
OWN_STREAMS = "own_streams"
OWN_TOKENS = "own_tokens"
DRAINING = "draining"


class Turnover:
    """Estimates of when a slot comes free (Little's law): later for each refusal, so that retries spread."""

    def __init__(self) -> None:
        self._length_ns = 0.0
        self._assigned_ns = 0

    def record_end(self, length_ns: int) -> None:
        known = self._length_ns or float(length_ns)
        self._length_ns = known + _NEWEST * (length_ns - known)

    def next_wait_ns(self, slots: int, now: int) -> int:
        gap = (self._length_ns or _FIRST_LENGTH_NS) / slots
        self._assigned_ns = min(max(self._assigned_ns, now) + int(gap), now + MOST_WAIT_NS)
        return max(self._assigned_ns - now, LEAST_WAIT_NS)


@dataclass(slots=True)
class _Account:
    limits: PrincipalLimits
    turnover: Turnover = field(default_factory=Turnover)
    held: int = 0
    waits_until_ns: int = 0

    def is_waiting(self, now: int) -> bool:
        return self.waits_until_ns > now

    def await_slot(self, wait_ns: int, now: int) -> int:
        self.waits_until_ns = now + wait_ns + _LATENESS_NS
        return wait_ns

    def is_idle(self, now: int) -> bool:
        return not self.held and not self.is_waiting(now)


@dataclass(slots=True)
class AdmissionSlot:
    """One call's slot. Its call has reserved `reserved` output tokens; `used` is None if no session began.

    `attempt` is the call's place in its stream, if its client told it.

    If `is_kept`, it is held beyond the call, until its session has stopped or finished without a client.
    """

    principal: Principal
    since_ns: int
    reserved: int = 0
    used: int | None = None
    is_kept: bool = False
    is_released: bool = False
    attempt: Attempt | None = None


class Admission:
    def __init__(self, slots: int, what: str = "streams") -> None:
        self._slots = slots
        self._what = what
        self._turnover = Turnover()
        self._accounts: dict[str, _Account] = {}
        self.held = 0

    def enter(self, principal: Principal, now: int, *, is_saturated: bool = False) -> AdmissionSlot:
        """Return a slot for a call. Raise Overloaded."""
        account = self._account(principal, now)
        self._check_own(principal, account, now)
        if is_saturated:
            wait_ns = account.await_slot(self._turnover.next_wait_ns(max(1, self.held), now), now)
            what = f"this gateway is saturated by {self.held} {self._what}"
            raise Overloaded(what, wait_ns / _SECOND, SATURATED)
        self._check_slots(principal, account, now)
        account.waits_until_ns = 0
        account.held += 1
        self.held += 1
        return AdmissionSlot(principal, now)

    def most(self, principal: Principal) -> int:
        """Return how many slots the principal can hold at once, if nobody else holds or waits for any."""
        own = principal.limits.max_sessions
        return self._slots if own is None else min(own, self._slots)

    def leave(self, slot: AdmissionSlot, now: int) -> None:
        """Release the slot; repeating it changes nothing."""
        if slot.is_released:
            return
        slot.is_released = True
        account = self._accounts[slot.principal.name]
        account.held -= 1
        self.held -= 1
        if slot.used is not None:  # a call that failed before its session says nothing of stream lengths
            for turnover in (account.turnover, self._turnover):
                turnover.record_end(now - slot.since_ns)

    def _check_own(self, principal: Principal, account: _Account, now: int) -> None:
        most = principal.limits.max_sessions
        if most is not None and account.held >= most:
            wait_ns = account.turnover.next_wait_ns(most, now)
            what = f"all {most} {self._what} of {principal.name} are in use"
            raise Overloaded(what, wait_ns / _SECOND, OWN_STREAMS)

    def _check_slots(self, principal: Principal, account: _Account, now: int) -> None:
        if self.held >= self._slots:
            wait_ns = account.await_slot(self._turnover.next_wait_ns(self._slots, now), now)
            what = f"all {self._slots} {self._what} of this gateway are in use"
            raise Overloaded(what, wait_ns / _SECOND, NO_SLOT)
        share = self._share(account, now)
        if account.held >= share:
            wait_ns = account.await_slot(account.turnover.next_wait_ns(share, now), now)
            held = f"{principal.name} holds {account.held} {self._what}"
            what = f"{held}; its share is {share} while other callers wait"
            raise Overloaded(what, wait_ns / _SECOND, NO_SHARE)

    def _share(self, account: _Account, now: int) -> int:
        """Return the principal's share of the slots while others wait; more than all while nobody does."""
        others = [other for other in self._accounts.values() if other is not account]
        if not any(other.is_waiting(now) for other in others):
            return self._slots + 1
        sharing = 1 + sum(other.held > 0 or other.is_waiting(now) for other in others)
        return -(-self._slots // sharing)

    def _account(self, principal: Principal, now: int) -> _Account:
        """Return the account, with new limits if these have changed; its open streams still count."""
        account = self._accounts.get(principal.name)
        limits = principal.limits
        if account is None:
            self._forget_idle(now)
            account = self._accounts[principal.name] = _Account(limits)
        account.limits = limits
        return account

    def _forget_idle(self, now: int) -> None:
        if len(self._accounts) >= _MOST_ACCOUNTS:
            self._accounts = {name: kept for name, kept in self._accounts.items() if not kept.is_idle(now)}
