"""The timer of a request to a target, on the event loop that the gateway runs on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvloop

from galley.core.session import events as ev
from services.gateway.replicas.target_session import TargetRequest
from tests.fakes.session_ports import SPEC


class Nowhere:
    """A session without a replica, which looks for one."""

    def place(self, *_: object) -> None:
        return None

    async def find(self, *_: object) -> None:
        await asyncio.Event().wait()


def test_a_timer_that_is_due_is_set_again() -> None:
    async def set_twice() -> None:
        request = ev.Verify(1, ev.Slice(0, (1,), b""), ())
        target = TargetRequest(cast("Any", Nowhere()), SPEC, request, None, lambda _: None)
        now_s = asyncio.get_running_loop().time()
        for within_ns in (-1, 1_000_000_000, 500_000_000):
            target._set_timer(now_s, within_ns)
        target.close()
        await asyncio.sleep(0)

    uvloop.run(set_twice())
