"""The registry of replicas in Redis: who serves where, in which state. Leases end by the server's clock.

Keys (those of one pool share a hash tag, so that a cluster keeps them together):

    galley:replicas:{pool}            set of the addresses that are or were registered
    galley:replicas:{pool}:<address>  hash, one field a fact; expires with the lease

Nothing in it is secret.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from services.common.logs import get_logger
from services.common.redis_calls import DEFAULT_CALL_TIMEOUT_S, RedisCalls, script_of
from services.core.content import HASH_BYTES
from services.core.routing import ReplicaLease

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.common.pb.galley.v1 import galley_pb2 as pb

TARGET_POOL = "target"
DEFAULT_LEASE_S = 3.0
MAX_CACHED_PREFIXES = 512

_log = get_logger(__name__)

# KEYS: set, hash. ARGV: lease_ms, incarnation, then name, value of each fact.
# Answers whether this life of the replica was registered already.
_PUBLISH = script_of("""
local known = redis.call('HGET', KEYS[2], 'incarnation') == ARGV[2]
if not known then redis.call('DEL', KEYS[2]) end
redis.call('SADD', KEYS[1], string.sub(KEYS[2], #KEYS[1] + 2))
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return known and 1 or 0
""")

# KEYS: set, hash. ARGV: incarnation. Another life at the same address is left alone.
_WITHDRAW = script_of("""
if redis.call('HGET', KEYS[2], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[1], string.sub(KEYS[2], #KEYS[1] + 2))
return 1
""")

# KEYS: set, then the hash of each of its members. Answers the hashes; sweeps members whose lease has ended.
_READ = script_of("""
local facts = {}
for at = 2, #KEYS do
  local held = redis.call('HGETALL', KEYS[at])
  if #held == 0 then
    redis.call('SREM', KEYS[1], string.sub(KEYS[at], #KEYS[1] + 2))
  else
    facts[#facts + 1] = held
  end
end
return facts
""")


class ReplicaRegistry:
    """The registry at `url`. Every call is one attempt; it raises StoreUnavailable if Redis is away."""

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        self._calls = RedisCalls(url, call_timeout_s=call_timeout_s, max_connections=2)
        self._lease_ms = max(1, math.ceil(lease_s * 1000))
        self._published: dict[tuple[str, str], frozenset[bytes]] = {}

    async def publish(self, pool: str, lease: ReplicaLease) -> None:
        """Register the replica, or renew its lease with what it says now."""
        key = (pool, lease.address)
        # Forgotten until all went well: what is there after a call that failed is not known.
        changed = self._published.pop(key, None) != lease.cached_prefixes
        known = await self._publish(pool, lease, with_prefixes=changed)
        if not known and not changed:  # the lease had ended, and its prefixes with it
            await self._publish(pool, lease, with_prefixes=True)
        self._published[key] = lease.cached_prefixes

    async def _publish(self, pool: str, lease: ReplicaLease, *, with_prefixes: bool) -> bool:
        facts = _encode(lease)
        if not with_prefixes:
            del facts["cached_prefixes"]
        incarnation = facts.pop("incarnation")
        flat = [part for pair in facts.items() for part in pair]
        return bool(
            await self._calls.run(_PUBLISH, _keys(pool, lease.address), self._lease_ms, incarnation, *flat)
        )

    async def withdraw(self, pool: str, address: str, incarnation: str) -> None:
        """End the lease now, if it is of this life of the replica."""
        self._published.pop((pool, address), None)
        await self._calls.run(_WITHDRAW, _keys(pool, address), incarnation)

    async def read(self, pool: str) -> list[ReplicaLease]:
        """The replicas whose lease has not ended, by address."""
        members = cast("set[bytes]", await self._calls.command("SMEMBERS", _set(pool)))
        if not members:
            return []
        keys = [_hash(pool, member.decode()) for member in sorted(members)]
        found = cast("list[list[bytes]]", await self._calls.run(_READ, (_set(pool), *keys)))
        return [lease for flat in found if (lease := _lease(flat)) is not None]

    async def close(self) -> None:
        """Let go of connections."""
        await self._calls.close()


def lease_of(
    address: str,
    info: pb.GetTargetInfoResponse,
    *,
    draining: bool = False,
    cached_prefixes: Iterable[bytes] = (),
) -> ReplicaLease:
    """The lease of a target that says this of itself; of the prefixes, the first MAX_CACHED_PREFIXES."""
    return ReplicaLease(
        address=address,
        incarnation=info.incarnation,
        model=info.model,
        fingerprint=info.fingerprint,
        tokenizer_hash=info.tokenizer_hash,
        vocab_size=info.vocab_size,
        context_window=info.context_window,
        eos_token_ids=tuple(info.eos_token_ids),
        max_draft_tokens=info.max_draft_tokens,
        deterministic=info.deterministic,
        dtype=info.dtype,
        device=info.device,
        ranks=info.ranks,
        kv_block_tokens=info.kv_block_tokens,
        kv_blocks_free=info.kv_blocks_free,
        kv_blocks_total=info.kv_blocks_total,
        queue_depth=info.queue_depth,
        draining=draining,
        cached_prefixes=frozenset(list(cached_prefixes)[:MAX_CACHED_PREFIXES]),
    )


def _set(pool: str) -> str:
    return f"galley:replicas:{{{pool}}}"


def _hash(pool: str, address: str) -> str:
    return f"{_set(pool)}:{address}"


def _keys(pool: str, address: str) -> tuple[str, str]:
    return _set(pool), _hash(pool, address)


def _encode(lease: ReplicaLease) -> dict[str, bytes | str]:
    """One field a fact: numbers in decimal, lists of numbers with commas, hashes one after the other."""
    return {item.name: _written(getattr(lease, item.name)) for item in fields(lease)}


def _written(value: object) -> bytes | str:
    if isinstance(value, frozenset):
        return b"".join(sorted(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _lease(flat: list[bytes]) -> ReplicaLease | None:
    """None, and a word in the log, for what another release wrote and this one cannot read."""
    facts = dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))
    try:
        return ReplicaLease(
            **{item.name: _read(item.type, facts[item.name]) for item in fields(ReplicaLease)}
        )
    except (KeyError, ValueError) as error:
        _log.warning("a lease that cannot be read", address=facts.get("address"), problem=str(error))
        return None


def _read(kind: Any, value: bytes) -> Any:
    """`kind` is the annotation as it stands in ReplicaLease."""
    match kind:
        case "str":
            return value.decode()
        case "int":
            return int(value)
        case "bool":
            return value == b"1"
        case "tuple[int, ...]":
            return tuple(int(number) for number in value.split(b",") if number)
        case _:
            return frozenset(value[at : at + HASH_BYTES] for at in range(0, len(value), HASH_BYTES))
