"""Two gateways that lease one principal's token budget from one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from galley.core.admission.admission import ANONYMOUS, Principal, PrincipalLimits
from galley.core.errors import Overloaded, StoreUnavailable
from galley.core.store import Exchange, Exchanged, TokenBucket
from services.gateway.clock import SECOND
from services.gateway.session import budgets as budgets_module
from services.gateway.session.budgets import Budgets
from tests.fakes.session_ports import ManualClock
from tests.fakes.store import MemoryStore
from tests.fakes.waiting import PATIENCE_S, Watch

ALICE = Principal("alice", PrincipalLimits(tokens_per_s=1.0, burst_tokens=160))
IN_TIME = 10**18


class Shared(MemoryStore):
    """The store of both gateways; `may_reply` holds replies back, `may_settle` what no call waits for.

    The exchange of a call waits for `arrival`, if that is set, and fails as it does.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=lambda: clock.now / SECOND)
        self.exchanges: list[Exchange] = []
        self.is_away = False
        self.failures = 0
        self.watch = Watch()
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        self.arrival: asyncio.Future[None] | None = None

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        self.failures += self.is_away
        self.exchanges += [] if self.is_away else [exchange]
        self.watch.changed()
        if self.is_away:
            raise StoreUnavailable("the session store is unavailable")
        if exchange.needed is None:
            await self.may_settle.wait()
        elif self.arrival is not None:
            await self.arrival
        reply = await super().exchange(bucket, exchange)
        self.watch.changed()
        await self.may_reply.wait()
        return reply

    @property
    def level(self) -> float:
        return self._buckets.get(ALICE.name, (ALICE.limits.burst, 0.0))[0]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Shared:
    return Shared(clock)


@pytest.fixture
async def gateways(store: Shared, clock: ManualClock) -> AsyncIterator[tuple[Budgets, Budgets]]:
    both = Budgets(store, clock), Budgets(store, clock)
    yield both
    for budgets in both:
        await budgets.close()
        assert not budgets._tended


async def take_all(gateways: tuple[Budgets, Budgets], tokens: int) -> int:
    taken = 0
    for budgets in gateways * 200:
        try:
            await budgets.reserve(ALICE, tokens, IN_TIME)
        except Overloaded:
            continue
        taken += tokens
    return taken


async def test_gateways_share_one_budget(
    store: Shared, clock: ManualClock, gateways: tuple[Budgets, Budgets]
) -> None:
    assert 160 - 10 <= await take_all(gateways, 2) <= 160
    for _ in range(20):
        clock.now += 10 * SECOND
        assert await take_all(gateways, 2) <= 10 + 10
    assert len(store.exchanges) < 5 * 20, "refusals are not asked for again"


async def test_what_is_not_used_comes_back_when_a_gateway_closes(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, second = gateways
    await first.reserve(ALICE, 100, IN_TIME)
    first.add(ALICE, 90)
    await first.close()
    assert store.level == 150
    await second.reserve(ALICE, 150, IN_TIME)


async def test_closing_tries_once_if_the_store_is_away(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, second = gateways
    await first.reserve(ALICE, 100, IN_TIME)
    store.is_away = True
    async with asyncio.timeout(PATIENCE_S):
        await first.close()
    assert store.failures == 1
    store.is_away = False
    await second.reserve(ALICE, 50, IN_TIME)
    with pytest.raises(Overloaded):  # the lease of 10 is lost, and fills again at the rate
        await second.reserve(ALICE, 1, IN_TIME)


async def test_closing_gives_up_charges_if_the_store_is_away(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, _ = gateways
    store.is_away = True
    first.add(ALICE, -20)
    async with asyncio.timeout(PATIENCE_S):
        await first.close()
    assert store.failures == 1


async def test_a_principal_without_a_rate_has_no_lease(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    await gateways[0].reserve(ANONYMOUS, 1000, IN_TIME)
    gateways[0].add(ANONYMOUS, -1000)
    gateways[0].check(ANONYMOUS)
    assert not store.exchanges
    assert not gateways[0]._tended


async def test_a_limit_that_is_lifted_is_forgotten(store: Shared, gateways: tuple[Budgets, Budgets]) -> None:
    first, _ = gateways
    first.add(ALICE, -200)
    await store.watch.until(lambda: store.level < 0)
    with pytest.raises(Overloaded):
        first.check(ALICE)
    first.check(Principal(ALICE.name))
    await first.reserve(Principal(ALICE.name), 1000, IN_TIME)


async def test_charges_reach_the_store_without_a_call(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, second = gateways
    await first.reserve(ALICE, 50, IN_TIME)
    first.add(ALICE, -200)
    await store.watch.until(lambda: store.level == 160 - 50 - 200)
    with pytest.raises(Overloaded):
        first.check(ALICE)
    with pytest.raises(Overloaded, match="alice has no token budget left for 0 tokens"):
        await second.reserve(ALICE, 0, IN_TIME)


async def test_a_call_finds_what_was_returned_before_it(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, _ = gateways
    await first.reserve(ALICE, 160, IN_TIME)
    store.may_settle.clear()
    first.add(ALICE, 160)
    await store.watch.until(lambda: len(store.exchanges) == 2)
    call = asyncio.create_task(first.reserve(ALICE, 100, IN_TIME))
    await asyncio.sleep(0)
    store.may_settle.set()
    await call


async def test_a_call_that_ends_while_it_waits_takes_nothing(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    store.may_reply.clear()
    waiting = asyncio.create_task(gateways[0].reserve(ALICE, 160, IN_TIME))
    await store.watch.until(lambda: bool(store.exchanges))
    waiting.cancel()
    await asyncio.wait({waiting})
    store.may_reply.set()
    await store.watch.until(lambda: store.level == 160)


async def asking(store: Shared, clock: ManualClock, budgets: Budgets) -> asyncio.Task[None]:
    """Return a call for 50 tokens, with a charge of 20, whose exchange takes longer than a lease idles."""
    budgets.add(ALICE, -20)
    await store.watch.until(lambda: store.level == 140)
    store.arrival = asyncio.get_running_loop().create_future()
    call = asyncio.create_task(budgets.reserve(ALICE, 50, clock.now + 10 * SECOND))
    budgets.add(ALICE, -20)
    await store.watch.until(lambda: len(store.exchanges) == 2)
    assert store.exchanges[1] == Exchange(-20, 50, 10), "the call sends the charge"
    clock.now += 10 * SECOND
    budgets.add(ALICE, 5)  # the lease is looked at now
    await store.watch.until(lambda: store.level == 155)
    return call


async def test_what_a_call_was_to_charge_is_charged_after_it_gave_up(
    store: Shared, clock: ManualClock, gateways: tuple[Budgets, Budgets]
) -> None:
    call = await asking(store, clock, gateways[0])
    assert store.arrival is not None
    store.arrival.set_exception(StoreUnavailable("the session store is unavailable"))
    with pytest.raises(StoreUnavailable):
        await call
    await store.watch.until(lambda: store.level == 135)


@pytest.mark.parametrize("has_left", [False, True])
async def test_what_a_slow_exchange_leased_is_returned(
    store: Shared, clock: ManualClock, gateways: tuple[Budgets, Budgets], has_left: bool
) -> None:
    first, _ = gateways
    call = await asking(store, clock, first)
    assert store.arrival is not None
    if has_left:
        call.cancel()
        await asyncio.wait({call})
    store.arrival.set_result(None)
    if not has_left:
        await call
        first.add(ALICE, 50)
    await first.close()
    assert store.level == 135


async def test_what_is_leased_after_a_slow_settlement_is_returned(
    store: Shared, clock: ManualClock, gateways: tuple[Budgets, Budgets]
) -> None:
    first, _ = gateways
    store.may_settle.clear()
    first.add(ALICE, -20)
    await store.watch.until(lambda: len(store.exchanges) == 1)
    call = asyncio.create_task(first.reserve(ALICE, 50, IN_TIME))
    await asyncio.sleep(0)  # it waits for the settlement
    clock.now += SECOND
    store.may_settle.set()
    await call
    first.add(ALICE, 50)
    await first.close()
    assert store.level == 140


async def test_a_cancellation_is_not_swallowed_by_a_change(
    store: Shared, gateways: tuple[Budgets, Budgets]
) -> None:
    first, _ = gateways
    await first.reserve(ALICE, 50, IN_TIME)
    task = first._tended[ALICE.name].task
    assert task is not None
    await asyncio.sleep(0)  # it waits for a change
    first.add(ALICE, 10)
    await asyncio.sleep(0)  # it is about to continue
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.cancelled()


async def test_a_store_that_was_never_there_is_logged_once(
    store: Shared, gateways: tuple[Budgets, Budgets], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets_module, "LONGEST_PAUSE_S", 0.001)
    first, _ = gateways
    store.is_away = True
    with capture_logs() as logs:
        first.add(ALICE, -20)
        await store.watch.until(lambda: store.failures > 2)
        assert [line["event"] for line in logs] == ["token budget not settled"]
        store.is_away = False
        await store.watch.until(lambda: store.level == 140)


async def test_without_the_store_only_the_lease_is_used(
    store: Shared, clock: ManualClock, gateways: tuple[Budgets, Budgets]
) -> None:
    first, _ = gateways
    await first.reserve(ALICE, 40, IN_TIME)
    store.is_away = True
    with capture_logs() as logs:
        await first.reserve(ALICE, 10, IN_TIME)
        with pytest.raises(StoreUnavailable):
            await first.reserve(ALICE, 10, clock.now)
        first.add(ALICE, -20)
        await store.watch.until(lambda: store.failures > 2)
        assert [line["event"] for line in logs] == ["token budget not settled"]
        store.is_away = False
        await store.watch.until(lambda: store.level <= 160 - 40 - 10 - 20)
