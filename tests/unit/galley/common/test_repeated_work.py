"""Long-lived tasks go on after an unexpected error, which is logged once until the work succeeds."""

from __future__ import annotations

import asyncio

import pytest

from galley.common.repeated_work import RepeatedWork
from tests.fakes.waiting import PATIENCE_S

FIRST, SECOND = ValueError("first"), ValueError("second")


@pytest.mark.parametrize(
    ("outcomes", "noted"),
    [
        ([None, None], []),
        ([FIRST, FIRST, FIRST], [FIRST]),
        ([FIRST, SECOND, SECOND], [FIRST, SECOND]),
        ([FIRST, None, FIRST], [FIRST, FIRST]),
    ],
)
async def test_the_work_goes_on_after_unexpected_errors(
    outcomes: list[ValueError | None], noted: list[ValueError]
) -> None:
    contexts: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    left, is_over = list(outcomes), asyncio.Event()

    async def work() -> None:
        if not left:
            is_over.set()
        elif (error := left.pop(0)) is not None:
            raise error

    task = asyncio.create_task(RepeatedWork("reading", work).repeat(0.0))
    async with asyncio.timeout(PATIENCE_S):
        await is_over.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert contexts == [{"message": "reading failed", "exception": error} for error in noted]
