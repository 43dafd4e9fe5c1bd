"""The finished sessions from which a pool's drafts are trained, in Redis: token ids, never text.

Only principals that allow it have any (docs/operate/learning.md). Keys, which share a hash tag, so that a
cluster keeps those of a pool together:

    galley:learning:{<pool>}:principals                    sorted set of the principals, by their last entry
    galley:learning:{<pool>}:index:<principal>             sorted set of <session>:<bytes>, by time
    galley:learning:{<pool>}:bytes:<principal>             sum of the bytes in the index
    galley:learning:{<pool>}:entry:<session>:<principal>   one session
    galley:learning:{<pool>}:deleted:<session>             set for a while once the session was deleted
    galley:learning:{<pool>}:forgotten:<principal>         set for a while once the principal was forgotten

Every key expires at latest `ttl_s` after it was written. The last two refuse entries that were under way.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from galley.common.redis.calls import RedisCalls, script_of
from galley.common.registry.leases import DEFAULT_POOL
from galley.core.content import token_bytes, tokens_from_bytes

SPOOL_TTL_S = 24 * 3600.0
LATEST_ADD_S = 30.0
"""Longest time between the end of a session and its `add`, also of one that a cut link held back."""
_TOMBSTONE_MS = 4 * int(LATEST_ADD_S * 1000)
_CALL_TIMEOUT_S = 1.0
READ_AT_ONCE = 64
"""Sessions that are read together."""
LISTED_AT_ONCE = 1024
"""Sessions that are listed together: sessions in progress use the same Redis."""
_FORGOTTEN_AT_ONCE = 256
"""Sessions that are removed together: about 1 ms, in which Redis does nothing else."""

_FORMAT = 1
# Format, tokens of the prompt, temperature, bytes of the workload. The workload and the tokens follow.
_HEADER = struct.Struct("<BIfH")
_TOKEN_BYTES = 4

# KEYS: principals, index, bytes, entry, deleted, forgotten. ARGV: principal, session, entry, ttl_ms, most
# bytes of the principal, prefix of entries, latest time in ms. Adds nothing from the latest time on: marks of
# deletions may have expired. Drops what is too old, then the oldest while there is too much. Entries that it
# drops are no KEYS, but have the hash tag.
_ADD = script_of("""
if redis.call('EXISTS', KEYS[4], KEYS[5], KEYS[6]) > 0 then return 0 end
local size, ttl = #ARGV[3], tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if now >= tonumber(ARGV[7]) then return 0 end
local total = size + tonumber(redis.call('GET', KEYS[3]) or 0)
local function drop(member)
  local session, dropped = string.match(member, '^(.*):(%d+)$')
  redis.call('ZREM', KEYS[2], member)
  redis.call('DEL', ARGV[6] .. session .. ':' .. ARGV[1])
  total = total - dropped
end
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ttl, 'LIMIT', 0, 256)
for _, member in ipairs(old) do drop(member) end
while total > tonumber(ARGV[5]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
redis.call('SET', KEYS[4], ARGV[3], 'PX', ttl)
redis.call('ZADD', KEYS[2], now, ARGV[2] .. ':' .. size)
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('SET', KEYS[3], total, 'PX', ttl)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ttl)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ttl)
return 1
""")

# KEYS: index, bytes, entry, deleted. ARGV: session, tombstone_ms (0: none).
_REMOVE = script_of("""
if ARGV[2] ~= '0' then redis.call('SET', KEYS[4], 1, 'PX', ARGV[2]) end
local size = redis.call('STRLEN', KEYS[3])
if size == 0 then return 0 end
redis.call('DEL', KEYS[3])
if redis.call('ZREM', KEYS[1], ARGV[1] .. ':' .. size) == 1 then
  redis.call('SET', KEYS[2], redis.call('GET', KEYS[2]) - size, 'KEEPTTL')
end
return 1
""")

# KEYS: principals, index, bytes, forgotten. ARGV: principal, tombstone_ms, prefix of entries, most sessions.
# Returns how many were listed, and how many of them were removed.
_FORGET = script_of("""
redis.call('SET', KEYS[4], 1, 'PX', ARGV[2])
local removed, bytes = 0, 0
local members = redis.call('ZRANGE', KEYS[2], 0, ARGV[4] - 1)
for _, member in ipairs(members) do
  local session, size = string.match(member, '^(.*):(%d+)$')
  removed = removed + redis.call('DEL', ARGV[3] .. session .. ':' .. ARGV[1])
  redis.call('ZREM', KEYS[2], member)
  bytes = bytes + size
end
if #members == tonumber(ARGV[4]) then
  redis.call('SET', KEYS[3], (redis.call('GET', KEYS[3]) or bytes) - bytes, 'KEEPTTL')
else
  redis.call('DEL', KEYS[3])
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return {#members, removed}
""")


@dataclass(frozen=True, slots=True)
class SpooledSession:
    """A finished session: the prompt's tokens and the answer's, and what the answer was sampled with."""

    session_id: str
    workload: str
    temperature: float
    prompt_len: int
    tokens: Sequence[int]


class LearningSpool:
    """The spool of the pool `pool_name` at `url`. Every call is one attempt, and raises as `RedisCalls`."""

    def __init__(self, url: str, pool_name: str = DEFAULT_POOL, *, ttl_s: float = SPOOL_TTL_S) -> None:
        self._calls = RedisCalls(url, call_timeout_s=_CALL_TIMEOUT_S, max_connections=2)
        self._prefix = f"galley:learning:{{{pool_name}}}:"
        self._ttl_ms = max(1, math.ceil(ttl_s * 1000))

    async def add(
        self, principal: str, session: SpooledSession, most_tokens: int, *, ended_s: float | None = None
    ) -> bool:
        """Keep a session, and the principal's newest others, `most_tokens` together.

        It ended at `ended_s` on the event loop's clock, by default now. Return False for a session that is
        kept already, that was deleted, whose principal was just forgotten, or that ended LATEST_ADD_S ago.
        """
        loop = asyncio.get_running_loop()
        ended_s = loop.time() if ended_s is None else ended_s
        entry, session_id = _encode(session), session.session_id
        if len(session.tokens) > most_tokens:
            return False
        names = [f"index:{principal}", f"bytes:{principal}", f"entry:{session_id}:{principal}"]
        names += [f"deleted:{session_id}", f"forgotten:{principal}"]
        keys = self._keys("principals", *names)
        now_ms = await self._calls.now_ms(keys[0])
        latest_ms = now_ms + math.floor(1000 * (ended_s + LATEST_ADD_S - loop.time()))
        args = (principal, session_id, entry, self._ttl_ms, most_tokens * _TOKEN_BYTES, self._entries)
        return bool(await self._calls.run(_ADD, keys, *args, latest_ms))

    async def remove(self, principal: str, session_id: str, *, is_recent: bool) -> bool:
        """Remove a session, if the principal has it here; with `is_recent` also one that is not added yet."""
        names = (f"index:{principal}", f"bytes:{principal}", f"entry:{session_id}:{principal}")
        keys = self._keys(*names, f"deleted:{session_id}")
        return bool(await self._calls.run(_REMOVE, keys, session_id, _TOMBSTONE_MS if is_recent else 0))

    async def forget(self, principal: str) -> int:
        """Remove all sessions of a principal; return how many there were."""
        keys = self._keys("principals", f"index:{principal}", f"bytes:{principal}", f"forgotten:{principal}")
        args = (principal, _TOMBSTONE_MS, self._entries, _FORGOTTEN_AT_ONCE)
        removed, listed = 0, _FORGOTTEN_AT_ONCE
        while listed == _FORGOTTEN_AT_ONCE:
            listed, count = cast("list[int]", await self._calls.run(_FORGET, keys, *args))
            removed += count
        return removed

    async def principals(self) -> list[str]:
        """Return the principals that may have sessions here, in the order of their names."""
        [key] = self._keys("principals")
        names = cast("list[bytes]", await self._calls.command("ZRANGE", key, 0, -1, key=key))
        return sorted(name.decode() for name in names)

    async def sessions(self, principal: str, first: int = 0, count: int = LISTED_AT_ONCE) -> list[str]:
        """Return the ids of some of a principal's sessions, the newest first, after the `first` newest."""
        [key] = self._keys(f"index:{principal}")
        reply = await self._calls.command("ZRANGE", key, first, first + count - 1, "REV", key=key)
        return [member.decode().rpartition(":")[0] for member in cast("list[bytes]", reply)]

    async def read(self, principal: str, session_ids: Sequence[str]) -> list[SpooledSession]:
        """Return those of the sessions that are still here and can be read, in their order."""
        sessions = []
        for at in range(0, len(session_ids), READ_AT_ONCE):
            part = session_ids[at : at + READ_AT_ONCE]
            keys = self._keys(*(f"entry:{session_id}:{principal}" for session_id in part))
            entries = await asyncio.gather(*(self._calls.command("GET", key, key=key) for key in keys))
            for session_id, entry in zip(part, cast("list[bytes | None]", entries), strict=True):
                session = None if entry is None else _decode(session_id, entry)
                if session is not None:
                    sessions.append(session)
        return sessions

    async def close(self) -> None:
        await self._calls.close()

    @property
    def _entries(self) -> str:
        return f"{self._prefix}entry:"

    def _keys(self, *names: str) -> list[str]:
        return [self._prefix + name for name in names]


def _encode(session: SpooledSession) -> bytes:
    workload = session.workload.encode()
    header = _HEADER.pack(_FORMAT, session.prompt_len, session.temperature, len(workload))
    return header + workload + token_bytes(session.tokens)


def _decode(session_id: str, entry: bytes) -> SpooledSession | None:
    """Return the session, or None for an entry of another format or a damaged one."""
    try:
        version, prompt_len, temperature, length = _HEADER.unpack_from(entry)
        start = _HEADER.size + length
        workload, tokens = entry[_HEADER.size : start].decode(), tokens_from_bytes(entry[start:])
    except (struct.error, ValueError):
        return None
    if version != _FORMAT or not 0 < prompt_len < len(tokens) or not math.isfinite(temperature):
        return None
    return SpooledSession(session_id, workload, temperature, prompt_len, tokens)
