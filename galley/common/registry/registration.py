"""Keep a replica registered in Redis: renew its lease and load about once a second.

A replica announces that it drains before it refuses sessions, and withdraws its lease before it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from galley.common.config.settings import ServiceSettings
from galley.common.cores import usable_cores
from galley.common.logs import get_logger
from galley.common.models.files import NumberFormat  # pydantic reads it
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it
from galley.common.registry.leases import (
    DEFAULT_LEASE_S,
    DEFAULT_POOL,
    LeasePool,
    LeaseT,
    Replaced,
    ReplicaRegistry,
    check_pool_name,
)
from galley.common.repeated_work import RepeatedWork
from galley.common.server.server import Service
from galley.common.sockets import host_and_port, joined
from galley.core.errors import GalleyError

_SHARE_OF_LEASE = 1 / 3
_CALL_TIMEOUT_S = 1.0

_LOG = get_logger(__name__)


PoolSetting: TypeAlias = Annotated[str, AfterValidator(check_pool_name)]
"""The name that separates deployments that share a Redis."""


def _with_brackets(address: str) -> str:
    """Return the address, that of IPv6 in brackets: a pod's environment has its IP address without them."""
    host, _, port = address.rpartition(":")
    if host.count(":") > 1 and not host.endswith("]"):
        address = f"[{host}]:{port}"
    return joined(*host_and_port(address)) if address else ""


def _read_auto(value: object) -> object:
    return 0 if value == "auto" else value


class ReplicaSettings(ServiceSettings):
    dtype: Literal["auto", NumberFormat] = Field(
        default="auto",
        description="Type of weights and KV. auto: bfloat16 on a GPU, or with AVX2 or AVX-512, else float32.",
    )
    device: str = Field(default="cpu", min_length=1, description="Torch device, such as cpu or cuda:0.")
    threads: Annotated[int, BeforeValidator(_read_auto)] = Field(
        default=1,
        ge=0,
        le=1024,
        description="Threads of the CPU kernels. auto or 0: as many as the cores that this process may use.",
    )
    redis_url: RedisUrlSetting = Field(
        default=SecretStr(""),
        description="URL of the Redis to register with (docs/operate/redis.md). Empty registers nowhere. "
        "Must come by environment or file if it has a password.",
    )
    redis_url_file: str = Field(default="", description="File that holds the value of --redis-url.")
    pool: PoolSetting = Field(
        default=DEFAULT_POOL,
        description="Name of the pool to register in; only gateways of the same --pool use this replica.",
    )
    advertise: Annotated[str, AfterValidator(_with_brackets)] = Field(
        default="",
        description="Address of this replica for gateways, host:port. An IPv6 address may lack its brackets. "
        "Empty uses the listening address.",
    )

    @property
    def thread_count(self) -> int:
        """Return `threads`, or what auto means here."""
        return self.threads or usable_cores()


class Registration(Generic[LeaseT]):
    """The registration of one replica, from its creation to `close`; it retries while Redis is away.

    Once a later process has replaced it, it stops renewing for good, even if the registry loses its data.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        pool: LeasePool[LeaseT],
        lease: Callable[[], LeaseT],
        every_s: float,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._lease = lease
        self._every_s = every_s
        self._latest: LeaseT | None = None
        """The lease that was published last, perhaps in vain."""
        self._draining = False
        self._away = False
        self._replaced = False
        self._one_at_a_time = asyncio.Lock()
        self._publication = RepeatedWork("registration", self._publish)
        self._stopping = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def drain(self) -> None:
        """Announce at once that no new sessions are accepted; return when Redis has it or is away."""
        self._draining = True
        await self._publication.run()

    async def close(self) -> None:
        if not self._stopping.done():
            self._stopping.set_result(None)
        await self._task  # not cancelled: its last publication must not come after the withdrawal
        if self._latest is not None:
            try:
                await self._registry.withdraw(self._pool, self._latest.address, self._latest.incarnation)
            except GalleyError as error:
                _LOG.warning("lease not withdrawn; it will expire", error=str(error))
        await self._registry.close()

    async def _keep(self) -> None:
        while not self._stopping.done():
            await self._publication.run()
            await asyncio.wait({self._stopping}, timeout=self._every_s)

    async def _publish(self) -> None:
        async with self._one_at_a_time:
            if self._replaced:
                return
            lease = self._latest = self._lease()
            if self._draining:
                lease = replace(lease, draining=True)
            try:
                await self._registry.publish(self._pool, lease)
            except Replaced as error:
                self._replaced = True
                _LOG.error("replica replaced; end this process", error=str(error))
            except GalleyError as error:
                if not self._away:
                    _LOG.warning("registration failed", error=str(error))
                self._away = True
            else:
                self._away = False


class Registered:
    """A `Service` that announces its drain first, and withdraws its lease before it stops."""

    def __init__(
        self,
        service: Service,
        registration: Registration[Any],
        last_sessions: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Wrap `service`. `last_sessions`, if given, waits for live sessions before `service` drains."""
        self.service = service
        self._registration = registration
        self._last_sessions = last_sessions

    @property
    def grpc_services(self) -> Sequence[str]:
        return self.service.grpc_services

    async def drain(self) -> None:
        await self._registration.drain()
        if self._last_sessions is not None:
            await self._last_sessions()
        await self.service.drain()

    async def withdraw(self) -> None:
        await self._registration.close()

    async def close(self) -> None:
        try:
            await self._registration.close()
        finally:
            await self.service.close()


def registered(
    service: Service,
    settings: ReplicaSettings,
    pool: LeasePool[LeaseT],
    lease: Callable[[], LeaseT],
    last_sessions: Callable[[], Awaitable[None]] | None = None,
) -> Service:
    """Return the service, registered at `settings.redis_url` unless that is empty."""
    url = settings.redis_url.get_secret_value()
    if not url:
        return service
    return Registered(service, start_registration(url, pool, lease, settings.pool), last_sessions)


def start_registration(
    redis_url: str,
    pool: LeasePool[LeaseT],
    lease: Callable[[], LeaseT],
    pool_name: str = DEFAULT_POOL,
    *,
    lease_s: float = DEFAULT_LEASE_S,
) -> Registration[LeaseT]:
    """Register the replica that serves at the address of its lease, as gateways reach it.

    Call it in the replica's event loop, where `lease` is called about once a second and must be quick.
    """
    registry = ReplicaRegistry(redis_url, pool_name, lease_s=lease_s, call_timeout_s=_CALL_TIMEOUT_S)
    return Registration(registry, pool, lease, lease_s * _SHARE_OF_LEASE)
