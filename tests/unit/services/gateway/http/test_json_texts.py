"""JSON of large values is made in slices, and is the same as of small ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.http.transport.encoding import UNICODE, json_texts

SMALL = {"a": [1, -2.5, None, True, 'é\x7f中"\\'], "": {}}
LARGE: list[Any] = [
    [SMALL] * 2000,
    {f"n{index}": (index, [], {}) for index in range(5000)},
    ["x" * 5000] * 200,
    [10**300] * 2000,
]


@pytest.mark.parametrize("values", [[], [SMALL], [SMALL] * 2000, *([one, SMALL] for one in LARGE)])
async def test_texts_are_those_of_the_encoder(values: list[Any]) -> None:
    assert await json_texts(values, asyncio.Lock()) == [UNICODE.encode(value) for value in values]


async def test_those_who_share_the_lock_take_it_between_the_slices_of_a_value() -> None:
    lock = asyncio.Lock()
    encoding = asyncio.create_task(json_texts([LARGE[0]], lock))
    taken = 0
    while not encoding.done():
        async with lock:
            taken += 1
            await asyncio.sleep(0)
    assert taken > 6


@pytest.mark.parametrize("value", LARGE)
async def test_others_get_turns_while_a_large_value_is_encoded(value: Any) -> None:
    turns, lock = 0, asyncio.Lock()
    encoding = asyncio.create_task(json_texts([value], lock))
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 6
    assert not lock.locked()


async def test_few_small_values_take_no_further_turn() -> None:
    coroutine = json_texts([SMALL] * 20, asyncio.Lock())
    with pytest.raises(StopIteration):
        coroutine.send(None)
