"""The lease of a token budget, beside the bucket that gateways share, on a controlled clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.admission.budget import IDLE_NS, BudgetLease
from galley.core.store import Exchange, Exchanged
from tests.fakes.store import MemoryStore
from tests.simulation.system.redis import at_once

SECOND = 1_000_000_000


def limited(per_s: float, burst: int | None = None) -> Principal:
    return Principal("me", PrincipalLimits(tokens_per_s=per_s, burst_tokens=burst))


@dataclass
class Bucket:
    """The bucket in a store, and the time that it shares with the leases."""

    principal: Principal
    now: int = 0
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store = MemoryStore(clock=lambda: self.now / SECOND)

    def lease(self) -> BudgetLease:
        return BudgetLease(self.principal, self.now)

    def exchange(self, exchange: Exchange) -> Exchanged:
        self.exchanges.append(exchange)
        return at_once(self._store.exchange(self.lease().bucket, exchange))

    def take(self, lease: BudgetLease, tokens: int) -> float:
        """Do as the gateway does; return the wait in seconds."""
        if lease.try_take(tokens, self.now):
            return 0.0
        wait_ns = lease.known_wait_ns(tokens, self.now)
        if not wait_ns:
            exchange = lease.request(tokens)
            wait_ns = lease.apply(exchange, self.exchange(exchange), self.now)
        return wait_ns / SECOND

    def settle(self, lease: BudgetLease) -> None:
        while exchange := lease.due(self.now):
            lease.apply(exchange, self.exchange(exchange), self.now)


def test_unused_tokens_are_returned_at_the_end() -> None:
    bucket = Bucket(limited(1, 100))
    lease = bucket.lease()
    assert bucket.take(lease, 100) == 0
    assert bucket.take(lease, 50) == pytest.approx(50)
    lease.add(70, 0)
    assert bucket.take(lease, 70) == 0
    assert bucket.take(lease, 1) > 0


def test_charges_may_leave_debt_in_which_nothing_is_admitted() -> None:
    bucket = Bucket(limited(10, 100))
    lease, other = bucket.lease(), bucket.lease()
    assert bucket.take(lease, 10) == 0
    lease.add(-140, 0)
    bucket.settle(lease)
    for of in (lease, other):
        assert bucket.take(of, 0) == pytest.approx(5)
    bucket.now += 5 * SECOND + 1
    assert bucket.take(other, 0) == 0


def test_more_than_the_burst_is_taken_from_a_full_bucket() -> None:
    bucket = Bucket(limited(10, 100))
    lease = bucket.lease()
    assert bucket.take(lease, 1000) == 0
    assert bucket.take(lease, 1) == pytest.approx(90.1)
    assert bucket.take(lease, 1000) > 100


def test_the_default_burst_is_a_minutes_worth() -> None:
    assert PrincipalLimits(tokens_per_s=2).burst == 120
    assert PrincipalLimits(tokens_per_s=0.001).burst == 1


def test_a_tiny_rate_has_a_finite_wait() -> None:
    bucket = Bucket(limited(1e-300, 1))
    lease = bucket.lease()
    assert bucket.take(lease, 5) == 0
    assert bucket.take(lease, 5) == pytest.approx(1e9)


def test_calls_that_the_lease_covers_need_no_exchange() -> None:
    bucket = Bucket(limited(100, 1600))
    lease = bucket.lease()
    bucket.take(lease, 40)
    assert bucket.exchanges == [Exchange(0, 40, 100)]
    assert [bucket.take(lease, 20) for _ in range(2)] == [0, 0]
    assert lease.due(0) is None
    bucket.take(lease, 20)
    assert lease.due(0) == Exchange(0, None, 60), "ahead of need"
    assert len(bucket.exchanges) == 1


def test_a_lease_that_is_not_used_is_returned() -> None:
    bucket = Bucket(limited(1, 160))
    lease = bucket.lease()
    bucket.take(lease, 100)
    lease.add(30, 0)
    assert lease.due(0) == Exchange(30, None, 0)
    assert lease.due(0) is None
    assert not lease.is_over(0)
    assert lease.due(IDLE_NS) == Exchange(10, None, 0)
    assert lease.is_over(IDLE_NS)


def test_a_gateway_keeps_one_block_however_many_calls_wait() -> None:
    bucket = Bucket(limited(1, 160))
    lease = bucket.lease()
    exchanges = [lease.request(20) for _ in range(3)]
    for exchange in exchanges:
        assert not lease.apply(exchange, bucket.exchange(exchange), 0)
    assert lease.due(0) == Exchange(20, None, 0), "two of three blocks"


def test_refusals_are_repeated_without_asking() -> None:
    bucket = Bucket(limited(1, 60))
    lease = bucket.lease()
    bucket.take(lease, 60)
    waits = [bucket.take(lease, 10) for _ in range(3)]
    assert waits == pytest.approx([10, 20, 30]), "callers get successive times"
    assert len(bucket.exchanges) == 2
    lease.add(10, 0)
    assert bucket.take(lease, 10) == 0, "what is returned may be taken at once"


def test_a_lost_exchange_keeps_charges_and_gives_nothing_twice() -> None:
    bucket = Bucket(limited(1, 160))
    lease = bucket.lease()
    bucket.take(lease, 100)
    for tokens in (50, -30):
        lease.add(tokens, 0)
        exchange = lease.due(0)
        assert exchange is not None
        lease.lost(exchange)
    assert lease.due(0) == Exchange(-20, None, 0), "10 of the 30 were paid by the lease"


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3 * SECOND), st.floats(0, 1)), max_size=40),
    st.sampled_from([1.0, 7.0, 300.0]),
    st.sampled_from([1, 50, 1000]),
)
def test_retry_delays_are_exact(calls: list[tuple[int, int, float]], per_s: float, burst: int) -> None:
    bucket = Bucket(limited(per_s, burst))
    lease = bucket.lease()
    for tokens, pause_ns, share in calls:
        bucket.now += pause_ns
        wait_s = bucket.take(lease, tokens)
        if wait_s:
            bucket.now += round(wait_s * SECOND)
            assert bucket.take(lease, tokens) == 0, "retry_after has passed"
        lease.add(tokens - int(tokens * share), bucket.now)


@pytest.mark.parametrize("seed", range(20))
def test_all_gateways_together_keep_the_rate(seed: int) -> None:
    """Also if gateways are killed, and the responses of exchanges are lost."""
    rng = random.Random(seed)
    per_s, burst, longest = rng.choice([1.0, 20.0]), rng.choice([10, 100, 1000]), rng.choice([5, 50, 2000])
    bucket = Bucket(limited(per_s, burst))
    leases = [bucket.lease() for _ in range(4)]
    open_calls: list[tuple[int, int]] = []
    used = 0
    for _ in range(600):
        bucket.now += int(rng.expovariate(4.0) * SECOND)
        at = rng.randrange(len(leases))
        lease = leases[at]
        match rng.choice(["call", "call", "end", "end", "settle", "lose", "kill", "charge"]):
            case "call":
                tokens = rng.randrange(longest)
                if not bucket.take(lease, tokens):
                    open_calls.append((at, tokens))
            case "end" if open_calls:
                at, tokens = open_calls.pop(rng.randrange(len(open_calls)))
                came = rng.choice([0, tokens // 2, tokens])
                used += came
                leases[at].add(tokens - came, bucket.now)
            case "settle":
                bucket.settle(lease)
            case "lose" if exchange := rng.choice([lease.due(bucket.now), lease.request(5)]):
                if rng.random() < 0.5:
                    bucket.exchange(exchange)
                lease.lost(exchange)
            case "kill" if rng.random() < 0.2:
                used += sum(tokens for of, tokens in open_calls if of == at)
                open_calls = [call for call in open_calls if call[0] != at]
                leases[at] = bucket.lease()
            case "charge":
                lease.add(-rng.randrange(3), bucket.now)
        assert used <= per_s * bucket.now / SECOND + max(burst, longest)
    assert used > 0.2 * min(per_s * bucket.now / SECOND, burst)
