"""A target service together with its registration, which is the first to know that it leaves."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.target.registration import Registration
    from services.target.servicer import TargetService

_LEAVE_SHARE = 0.6
"""Share of the drain timeout in which live sessions may end here before they go to another replica."""


class Registered:
    """A `Service` that says that it drains before it does, and withdraws before it is gone."""

    def __init__(self, service: TargetService, registration: Registration, drain_timeout_s: float) -> None:
        self.service = service
        self._registration = registration
        self._patience_s = drain_timeout_s * _LEAVE_SHARE

    @property
    def grpc_services(self) -> Sequence[str]:
        """Those of the target."""
        return self.service.grpc_services

    async def drain(self) -> None:
        """Take no new sessions, let the live ones end, and hand over those that are left."""
        await self._registration.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self.service.quiet()
        await self.service.drain()

    async def withdraw(self) -> None:
        """Be no longer registered, now; what is under way is left to its fate."""
        await self._registration.close()

    async def close(self) -> None:
        """Withdraw, and give everything back."""
        try:
            await self._registration.close()
        finally:
            await self.service.close()
