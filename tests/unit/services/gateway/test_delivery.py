"""Whose responses come next, and when the gateway is saturated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.gateway.replicas.delivery import (
    _CALL_TURNS,
    _DELIVERY,
    _INTERVAL_S,
    _MESSAGE_TURNS,
    _PAUSE_S,
    _SATURATED_S,
    _TURN,
    DeliveryQueue,
)

A_TURN = _TURN // (_DELIVERY + 1)
"""Requests with one response that have a turn."""


class Waiting:
    def __init__(self, served: list[Waiting], *, has_begun: bool = True, responses: int = 1) -> None:
        self.has_begun = has_begun
        self._served = served
        self._responses = responses

    def deliver(self) -> int:
        self._served.append(self)
        return self._responses


@pytest.fixture
def held_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hold the event loop's clock, so that a slow machine makes nothing wait too long."""
    return lambda: monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_first_responses_overtake_others_and_all_get_a_turn(held_clock: Callable[[], None]) -> None:
    held_clock()
    served: list[Waiting] = []
    queue = DeliveryQueue()
    running = [Waiting(served) for _ in range(2 * A_TURN)]
    for one in running:
        queue.add(one)
    await turns(_MESSAGE_TURNS)
    assert not served, "there may be more to read"
    await turns(1)
    assert served == running[:A_TURN], "then others have a turn"
    new = Waiting(served, has_begun=False)
    queue.add(new)
    await turns(1)
    assert served == [*running[:A_TURN], new], "it need not wait for what is read"
    await turns(_MESSAGE_TURNS)
    assert served == [*running[:A_TURN], new, *running[A_TURN:]]


async def test_a_request_with_many_responses_has_a_turn_alone(held_clock: Callable[[], None]) -> None:
    held_clock()
    served: list[Waiting] = []
    queue = DeliveryQueue()
    for responses in (1, 2 * _TURN, 1):
        queue.add(Waiting(served, responses=responses))
    await turns(_MESSAGE_TURNS + 1)
    assert len(served) == 2
    await turns(1)
    assert len(served) == 3


@pytest.mark.parametrize("is_call", [False, True])
async def test_what_comes_without_end_delays_responses_for_milliseconds(
    is_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, queue = 100.0, DeliveryQueue()
    served: list[Waiting] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    queue.add(Waiting(served))
    while not served:
        if is_call:
            queue.expect_calls()
        else:
            queue.add(Waiting([]))
        now_s += _PAUSE_S / 4
        await turns(1)
    assert _PAUSE_S / 2 < now_s - 100.0 <= 2 * _PAUSE_S


async def test_calls_are_accepted_before_responses_are_delivered(held_clock: Callable[[], None]) -> None:
    held_clock()
    served: list[Waiting] = []
    queue = DeliveryQueue()
    queue.add(Waiting(served))
    queue.expect_calls()
    queue.add(Waiting(served, has_begun=False))
    await turns(1)
    assert [one.has_begun for one in served] == [False], "a first token need not wait"
    await turns(_CALL_TURNS - 1)
    assert len(served) == 1
    await turns(1)
    assert len(served) == 2


async def test_a_response_that_raises_keeps_nobody_waiting() -> None:
    served: list[Waiting] = []

    class Broken(Waiting):
        def deliver(self) -> int:
            raise RuntimeError

    queue, raised = DeliveryQueue(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    queue.add(Broken(served))
    queue.add(Waiting(served))
    await turns(_MESSAGE_TURNS + 2)
    assert len(served) == len(raised) == 1


class Waits:
    """Responses that wait for given times, on a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.queue = DeliveryQueue()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)

    async def for_an_interval(self, wait_s: float, *, exception_s: float | None = None) -> bool:
        """Deliver responses that waited so long, one of them `exception_s`; return if that saturates."""
        ends_s, waits_s = self.now_s + _INTERVAL_S, exception_s
        while self.now_s <= ends_s:
            self.queue.add(Waiting([]))
            self.now_s += wait_s if waits_s is None else waits_s
            waits_s = None
            await asyncio.sleep(0)
        return self.queue.is_saturated(self.now_s)


async def test_only_a_standing_queue_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    assert not await waits.for_an_interval(0.01)
    assert not await waits.for_an_interval(0.01, exception_s=10 * _SATURATED_S), "one long turn is none"
    await waits.for_an_interval(_SATURATED_S)
    assert await waits.for_an_interval(_SATURATED_S)
    assert not await waits.for_an_interval(_SATURATED_S, exception_s=0.01), "it was short once"


async def test_saturation_ends_where_nothing_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    for _ in range(3):
        await waits.for_an_interval(_SATURATED_S)
    assert waits.queue.is_saturated(waits.now_s)
    assert not waits.queue.is_saturated(waits.now_s + 3 * _INTERVAL_S)
