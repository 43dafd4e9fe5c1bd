"""The registry of replicas in Redis: addresses, states and leases, which end by the server's clock.

Keys (those of one pool share a hash tag, so that a cluster keeps them together). <pool> is the name that
separates deployments in one Redis, <role> is target or draft:

    galley:replicas:{<pool>}:<role>                  set of the addresses that are or were registered
    galley:replicas:{<pool>}:<role>:<address>        hash, one field for each value; expires with the lease
    galley:replicas:{<pool>}:<role>:<address>:born   start time of the latest process there; expires a day
                                                     after its last update

A process gets its start time from the server before it registers. So processes at one address have an order,
a late update of a dead one is ignored, and a replaced process stays replaced.

The registry holds no secrets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

from galley.common.logs import get_logger
from galley.common.redis.calls import DEFAULT_CALL_TIMEOUT_S, RedisCalls, script_of
from galley.core.content import HASH_BYTES
from galley.core.errors import ServerFault
from galley.core.routing.choice import DraftLease, ReplicaLease, TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb

LeaseT = TypeVar("LeaseT", bound=ReplicaLease)


@dataclass(frozen=True, slots=True)
class LeasePool(Generic[LeaseT]):
    name: str
    lease: type[LeaseT]


TARGET_POOL = LeasePool("target", TargetLease)
DRAFT_POOL = LeasePool("draft", DraftLease)
DEFAULT_POOL = "default"
DEFAULT_LEASE_S = 3.0
MAX_CACHED_PREFIXES = 512
"""Hashes of cached blocks in a lease: those of prefixes that many sessions share."""

_POOL_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

_LOG = get_logger(__name__)

_BORN_MS = 24 * 3600 * 1000
# Fields that a lease has in common with the information of its replica; repeated ones are tuples in leases.
_TARGET_FIELDS = {item.name for item in fields(TargetLease)} & {
    *pb.GetTargetInfoResponse.DESCRIPTOR.fields_by_name
}
_DRAFT_FIELDS = {item.name for item in fields(DraftLease)} & {
    *pb.GetDraftInfoResponse.DESCRIPTOR.fields_by_name
}
_REPEATED = ("eos_token_ids", "lora_adapters", "grammar_kinds", "strategies")

# KEYS: born. Returns a start time in microseconds, later than that of every registered process.
_BEAR = script_of("""
local now = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or 0)
return math.max(now[1] * 1000000 + now[2], last + 1)
""")

# KEYS: set, hash, born. ARGV: lease_ms, incarnation, its birth, born_ms, then name, value of each fact.
# Returns 1 if this process was registered already, 0 if not, -1 if a later one has replaced it.
_PUBLISH = script_of("""
if tonumber(ARGV[3]) < tonumber(redis.call('GET', KEYS[3]) or 0) then return -1 end
local known = redis.call('HGET', KEYS[2], 'incarnation') == ARGV[2]
if not known then redis.call('DEL', KEYS[2]) end
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[1], string.sub(KEYS[2], #KEYS[1] + 2))
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return known and 1 or 0
""")

# KEYS: set, hash. ARGV: incarnation. Another process at the same address is left alone.
_WITHDRAW = script_of("""
if redis.call('HGET', KEYS[2], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[1], string.sub(KEYS[2], #KEYS[1] + 2))
return 1
""")

# KEYS: set, then the hash of each member. Returns the hashes; removes members whose lease has ended, or whose
# key holds something else.
_READ = script_of("""
local facts = {}
for at = 2, #KEYS do
  local held = redis.pcall('HGETALL', KEYS[at])
  local is_other = held.err and string.find(held.err, 'WRONGTYPE')
  if held.err and not is_other then return held end
  if is_other or #held == 0 then
    redis.call('SREM', KEYS[1], string.sub(KEYS[at], #KEYS[1] + 2))
  else
    facts[#facts + 1] = held
  end
end
return facts
""")


class Replaced(ServerFault):
    """A later process has registered at the same address; this one must not update its lease."""

    def __init__(self, address: str) -> None:
        super().__init__(f"a later process has registered at {address}")


class ReplicaRegistry:
    """The registry of the pool `pool_name` at `url`.

    Every call is one attempt, and raises StoreUnavailable if Redis is away.
    """

    def __init__(
        self,
        url: str,
        pool_name: str = DEFAULT_POOL,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        self._calls = RedisCalls(url, call_timeout_s=call_timeout_s, max_connections=2)
        self._prefix = f"galley:replicas:{{{pool_name}}}:"
        self._lease_ms = max(1, math.ceil(lease_s * 1000))
        self._published: dict[tuple[str, str], dict[str, bytes]] = {}
        self._born: dict[tuple[str, str, str], int] = {}

    async def publish(self, pool: LeasePool[LeaseT], lease: LeaseT) -> None:
        """Register the replica, or renew its lease. Raise Replaced if a later process took its address."""
        key = (pool.name, lease.address)
        facts, hashes = _encode(lease)
        # Forget it until the call succeeds: after a failed call the stored state is unknown.
        changed = self._published.pop(key, None) != hashes
        known = await self._publish(pool, lease, {**facts, **(hashes if changed else {})})
        if not known and not changed:  # the lease had ended, and its hashes with it
            await self._publish(pool, lease, {**facts, **hashes})
        self._published[key] = hashes

    async def _publish(
        self, pool: LeasePool[LeaseT], lease: LeaseT, facts: Mapping[str, bytes | str]
    ) -> bool:
        flat = [part for pair in facts.items() for part in pair]
        keys = (self._set(pool), self._hash(pool, lease.address), self._born_key(pool, lease.address))
        how = (self._lease_ms, lease.incarnation, await self._born_at(pool, lease), _BORN_MS)
        known = await self._calls.run(_PUBLISH, keys, *how, *flat)
        if known == -1:
            raise Replaced(lease.address)
        return bool(known)

    async def _born_at(self, pool: LeasePool[LeaseT], lease: LeaseT) -> int:
        life = (pool.name, lease.address, lease.incarnation)
        if life not in self._born:
            answer = await self._calls.run(_BEAR, (self._born_key(pool, lease.address),))
            self._born[life] = cast("int", answer)
        return self._born[life]

    async def withdraw(self, pool: LeasePool[Any], address: str, incarnation: str) -> None:
        """End the lease now, if it belongs to this process."""
        self._published.pop((pool.name, address), None)
        await self._calls.run(_WITHDRAW, (self._set(pool), self._hash(pool, address)), incarnation)

    async def read(self, pool: LeasePool[LeaseT]) -> list[LeaseT]:
        """Return the leases that have not expired, in the order of their addresses."""
        index = self._set(pool)
        keys = []
        for member in sorted(cast("set[bytes]", await self._calls.command("SMEMBERS", index, key=index))):
            try:
                keys.append(self._hash(pool, member.decode()))
            except UnicodeDecodeError:  # no replica added it
                await self._calls.command("SREM", index, member, key=index)
        if not keys:
            return []
        found = cast("list[list[bytes]]", await self._calls.run(_READ, (index, *keys)))
        return [lease for flat in found if (lease := _lease(pool, flat)) is not None]

    async def close(self) -> None:
        await self._calls.close()

    def _set(self, pool: LeasePool[Any]) -> str:
        return self._prefix + pool.name

    def _hash(self, pool: LeasePool[Any], address: str) -> str:
        return f"{self._set(pool)}:{address}"

    def _born_key(self, pool: LeasePool[Any], address: str) -> str:
        return f"{self._hash(pool, address)}:born"


def check_pool_name(name: str) -> str:
    """Return `name`. Raise ValueError unless it can be part of a key, and of a pattern for a Redis user."""
    if not _POOL_NAME.fullmatch(name):
        raise ValueError(f"must be 1 to 128 letters, digits and . _ -, got {name!r}")
    return name


def target_lease(
    address: str, info: pb.GetTargetInfoResponse, cached_prefixes: Iterable[bytes] = ()
) -> TargetLease:
    """Return the lease of a target, with its first MAX_CACHED_PREFIXES cached prefixes."""
    prefixes = frozenset(list(cached_prefixes)[:MAX_CACHED_PREFIXES])
    return TargetLease(address=address, cached_prefixes=prefixes, **_shared(_TARGET_FIELDS, info))


def draft_lease(
    address: str, info: pb.GetDraftInfoResponse, *, sessions: int = 0, queue_depth: int = 0
) -> DraftLease:
    return DraftLease(
        address=address, sessions=sessions, queue_depth=queue_depth, **_shared(_DRAFT_FIELDS, info)
    )


def _shared(names: Iterable[str], info: pb.GetTargetInfoResponse | pb.GetDraftInfoResponse) -> Any:
    values = {name: getattr(info, name) for name in names}
    return values | {name: tuple(values[name]) for name in _REPEATED if name in values}


def _encode(lease: ReplicaLease) -> tuple[dict[str, str], dict[str, bytes]]:
    """Encode numbers in decimal, lists with commas, hashes one after the other; hashes come second."""
    facts: dict[str, str] = {}
    hashes: dict[str, bytes] = {}
    for item in fields(lease):
        value = getattr(lease, item.name)
        if isinstance(value, frozenset):
            hashes[item.name] = b"".join(sorted(value))
        elif item.name != "incarnation":
            facts[item.name] = _written(value)
    return facts, hashes


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _lease(pool: LeasePool[LeaseT], flat: list[bytes]) -> LeaseT | None:
    """Decode a lease; log and return None for one that another release wrote and this one cannot read."""
    values = dict(zip(flat[::2], flat[1::2], strict=True))
    types = {item.name: item.type for item in fields(pool.lease) if item.name.encode() in values}
    try:
        return pool.lease(**{name: _read(kind, values[name.encode()]) for name, kind in types.items()})
    except (TypeError, ValueError) as error:
        _LOG.warning("lease unreadable", address=values.get(b"address"), error=str(error))
        return None


def _read(kind: Any, value: bytes) -> Any:
    match kind:
        case "str":
            return value.decode()
        case "int":
            return int(value)
        case "bool":
            return value == b"1"
        case "tuple[int, ...]":
            return tuple(int(number) for number in value.split(b",") if number)
        case "tuple[str, ...]":
            return tuple(name.decode() for name in value.split(b",") if name)
        case _:
            return frozenset(value[at : at + HASH_BYTES] for at in range(0, len(value), HASH_BYTES))
