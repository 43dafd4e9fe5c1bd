"""Which calls get one of a gateway's places for streams. Pure; time is an argument, in nanoseconds.

The rules, in this order; a call that is refused has cost nothing, and is told when to come back:

- A principal has at most `max_sessions` streams open, and uses at most `tokens_per_s` tokens over time: a
  call takes from the bucket all the output that it asks for, and at its end gives back what did not come.
  Prompts count when their session is made.
- While there are free places and nobody else waits, a principal may have all of them. One that was refused
  for want of a place *waits* until some time after it was told to come back. While others wait, who has its
  share or more (the places over those who hold or want some, rounded up) gets no more: so places pass on as
  they come free, and no stream that is open is ever ended for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.core.admission.principal import Principal, PrincipalLimits
from galley.core.admission.token_bucket import TokenBucket, Turnover
from galley.core.errors import Overloaded

_SECOND = 1_000_000_000
# After the time that it was told, for how long a principal is still waited for.
_LATENESS_NS = 5 * _SECOND
_MOST_ACCOUNTS = 1024

# Why a call was refused: for want of places, by the caller's own limits, or for it may not begin here.
NO_PLACE = "streams"
NO_SHARE = "share"
OWN_STREAMS = "own_streams"
OWN_TOKENS = "own_tokens"
DRAINING = "draining"


@dataclass(slots=True)
class _Account:
    """What one principal has and has used."""

    limits: PrincipalLimits
    bucket: TokenBucket | None
    turnover: Turnover = field(default_factory=Turnover)
    held: int = 0
    waits_until_ns: int = 0

    def is_waiting(self, now: int) -> bool:
        """It was refused for want of a place, and may still come back for it."""
        return self.waits_until_ns > now

    def await_place(self, wait_ns: int, now: int) -> int:
        """Told to come back after `wait_ns`."""
        self.waits_until_ns = now + wait_ns + _LATENESS_NS
        return wait_ns

    def is_idle(self, now: int) -> bool:
        """Nothing is lost if it is forgotten."""
        return (
            not self.held and not self.is_waiting(now) and (self.bucket is None or self.bucket.is_full(now))
        )


@dataclass(slots=True)
class AdmissionSlot:
    """One call's place. `reserved` output tokens were taken for it; `used` came, None if no session did.

    It is `kept` beyond the call until its session has stopped, or is done where it goes on without a client.
    """

    principal: Principal
    since_ns: int
    reserved: int
    used: int | None = None
    is_kept: bool = False
    is_released: bool = False


class Admission:
    """The places of one gateway, and who holds them."""

    def __init__(self, places: int, what: str = "streams") -> None:
        self._places = places
        self._what = what
        self._turnover = Turnover()
        self._accounts: dict[str, _Account] = {}
        self.held = 0

    def enter(self, principal: Principal, tokens: int, now: int) -> AdmissionSlot:
        """A place for a call that asks for at most so many output tokens. Raises Overloaded."""
        account = self._account(principal, now)
        self._check_own(principal, account, now)
        self._check_places(principal, account, now)
        # Who asks for nothing new, as to go on with a session, does not wait for debt to be paid.
        wait_ns = account.bucket.try_take(tokens, now) if account.bucket and tokens else 0
        if wait_ns:
            rate = principal.limits.tokens_per_s
            what = f"{principal.name} has used its {rate:g} tokens per second"
            raise _overloaded(what, wait_ns, OWN_TOKENS)
        account.waits_until_ns = 0
        account.held += 1
        self.held += 1
        return AdmissionSlot(principal, now, tokens)

    def charge(self, place: AdmissionSlot, prompt_tokens: int, now: int) -> None:
        """A session was made of this prompt."""
        _spend(self._accounts[place.principal.name], prompt_tokens, now)

    def leave(self, place: AdmissionSlot, now: int) -> None:
        """The call is over. Told again, nothing changes: the place is another's by then."""
        if place.is_released:
            return
        place.is_released = True
        account = self._accounts[place.principal.name]
        _spend(account, (place.used or 0) - place.reserved, now)
        account.held -= 1
        self.held -= 1
        if place.used is not None:  # what failed before tells nothing of how long streams are
            for turnover in (account.turnover, self._turnover):
                turnover.record_end(now - place.since_ns)

    def _check_own(self, principal: Principal, account: _Account, now: int) -> None:
        most = principal.limits.max_sessions
        if most is not None and account.held >= most:
            wait_ns = account.turnover.next_wait_ns(most, now)
            what = f"all {most} streams of {principal.name} are in use"
            raise _overloaded(what, wait_ns, OWN_STREAMS)

    def _check_places(self, principal: Principal, account: _Account, now: int) -> None:
        if self.held >= self._places:
            wait_ns = account.await_place(self._turnover.next_wait_ns(self._places, now), now)
            what = f"all {self._places} {self._what} of this gateway are in use"
            raise _overloaded(what, wait_ns, NO_PLACE)
        share = self._share(account, now)
        if account.held >= share:
            wait_ns = account.await_place(account.turnover.next_wait_ns(share, now), now)
            what = f"{principal.name} has its share of {share} {self._what}, and others wait"
            raise _overloaded(what, wait_ns, NO_SHARE)

    def _share(self, account: _Account, now: int) -> int:
        """The places that are its own while others wait; more than all where nobody does."""
        others = [other for other in self._accounts.values() if other is not account]
        if not any(other.is_waiting(now) for other in others):
            return self._places + 1
        sharing = 1 + sum(other.held > 0 or other.is_waiting(now) for other in others)
        return -(-self._places // sharing)

    def _account(self, principal: Principal, now: int) -> _Account:
        """Begun anew where its limits have changed; the streams that it has still count."""
        account = self._accounts.get(principal.name)
        limits = principal.limits
        if account is None:
            self._forget_idle(now)
            account = self._accounts[principal.name] = _Account(limits, _bucket(limits, now))
        elif account.limits != limits:
            account.limits, account.bucket = limits, _bucket(limits, now)
        return account

    def _forget_idle(self, now: int) -> None:
        """Where there are very many, those of whom nothing matters any more."""
        if len(self._accounts) >= _MOST_ACCOUNTS:
            self._accounts = {name: kept for name, kept in self._accounts.items() if not kept.is_idle(now)}


def _spend(account: _Account, tokens: int, now: int) -> None:
    if account.bucket is not None:
        account.bucket.spend(tokens, now)


def _bucket(limits: PrincipalLimits, now: int) -> TokenBucket | None:
    return None if limits.tokens_per_s is None else TokenBucket(limits.tokens_per_s, limits.burst, now)


def _overloaded(what: str, wait_ns: int, reason: str) -> Overloaded:
    return Overloaded(what, wait_ns / _SECOND, reason)
