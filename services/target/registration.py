"""A target replica's registration: it tells Redis each second that it lives, and how it is doing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.logs import get_logger
from services.common.registry import DEFAULT_LEASE_S, ReplicaRegistry, lease_of
from services.core.errors import GalleyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.common.pb.galley.v1 import galley_pb2 as pb

_SHARE_OF_LEASE = 1 / 3
_CALL_TIMEOUT_S = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica says of itself: as GetTargetInfo answers, and hashes of cached blocks, best first."""

    info: pb.GetTargetInfoResponse
    cached_prefixes: Sequence[bytes] = ()


class Registration:
    """Keeps one replica registered from `start` to `close`; with Redis away, until it is back."""

    def __init__(
        self, registry: ReplicaRegistry, pool: str, address: str, facts: Callable[[], Facts], every_s: float
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._address = address
        self._facts = facts
        self._every_s = every_s
        self._incarnation = ""
        self._draining = False
        self._away = False
        self._one_at_a_time = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    async def drain(self) -> None:
        """Say, at once, that no new sessions are taken; returns when it was said or Redis is away."""
        self._draining = True
        await self._publish()

    async def close(self) -> None:
        """Withdraw, and stop."""
        self._stopping.set()
        await self._task  # not cancelled: its last publication must not come after the withdrawal
        try:
            await self._registry.withdraw(self._pool, self._address, self._incarnation)
        except GalleyError as error:
            _log.warning("could not withdraw; the lease will end", problem=str(error))
        await self._registry.close()

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            await self._publish()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._stopping.wait()

    async def _publish(self) -> None:
        async with self._one_at_a_time:
            facts = self._facts()
            self._incarnation = facts.info.incarnation
            lease = lease_of(
                self._address, facts.info, draining=self._draining, cached_prefixes=facts.cached_prefixes
            )
            try:
                await self._registry.publish(self._pool, lease)
            except GalleyError as error:
                self._log_once(error)
            else:
                self._away = False

    def _log_once(self, error: GalleyError) -> None:
        if not self._away:
            self._away = True
            _log.warning("not registered: the registry does not answer", problem=str(error))


def start_registration(
    redis_url: str, pool: str, address: str, facts: Callable[[], Facts], *, lease_s: float = DEFAULT_LEASE_S
) -> Registration:
    """Register the replica that serves at `address`, as gateways reach it; call in its event loop.

    `facts` is called in the event loop, about once a second, and must be quick. Call `drain` when it begins
    to drain and `close` when it has stopped.
    """
    registry = ReplicaRegistry(redis_url, lease_s=lease_s, call_timeout_s=_CALL_TIMEOUT_S)
    return Registration(registry, pool, address, facts, lease_s * _SHARE_OF_LEASE)
