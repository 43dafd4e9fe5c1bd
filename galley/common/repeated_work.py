"""Keep long-lived tasks alive: an unexpected error is logged, and the work is done again later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn


class RepeatedWork:
    """Work that is done many times. `name` is its name in logs."""

    def __init__(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        self._name = name
        self._work = work
        self._problem = ""

    async def run(self) -> None:
        """Do the work once; give an unexpected error to the event loop's exception handler, which logs it.

        An error that is repeated is logged once, until the work succeeds.
        """
        try:
            await self._work()
        except Exception as error:  # noqa: BLE001  # the next time it may succeed
            problem = repr(error)
            if problem != self._problem:
                self._problem = problem
                context = {"message": f"{self._name} failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        else:
            self._problem = ""

    async def repeat(self, every_s: float) -> NoReturn:
        """Do the work after each pause of `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.run()
