"""The versions of a deployment's drafts in Redis: the split of sessions, the counts of a trial, the history.

Keys (they share a hash tag, so that a cluster keeps them together):

    galley:drafts:{<pool>}                    hash: the state (`galley.core.versions.state`)
    galley:drafts:{<pool>}:counts:<version>   hash: sums over the sessions of a version in its latest trial;
                                              without a version's name, those of all that no split names.
                                              NAME@GROUP is the sum NAME of a group of principals
    galley:drafts:{<pool>}:history            list: the changes as JSON, the latest first

A change is a compare-and-set of the state's epoch. It has a latest time on the server's clock, so one that
the network delivers after its caller gave up changes nothing. Counts belong to a trial: what a gateway adds
for an earlier one is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, fields
from functools import partial
from typing import Any, cast, get_args

from galley.common.redis.calls import DEFAULT_CALL_TIMEOUT_S, RedisCalls, script_of
from galley.common.registry.leases import DEFAULT_POOL, DRAFT_POOL, ReplicaRegistry
from galley.core.errors import Broken, StoreUnavailable
from galley.core.versions import state as versions
from galley.core.versions.counts import FIELDS, FLOATS, GAIN_FIELDS, VersionCounts
from galley.core.versions.rule import DEFAULT_TRIAL_TOKENS
from galley.core.versions.split import MAX_SHARE, Split, SplitBy
from galley.core.versions.state import Change, VersionEvent, VersionState

MAX_HISTORY = 200
_COUNTS_TTL_S = 90 * 24 * 3600
_ATTEMPTS = 16
_LATE = -1

_EVENT_FIELDS = frozenset(field.name for field in fields(VersionEvent))

# KEYS: state, history, then counts to reset. ARGV: latest time in ms, expected epoch, new epoch, most events,
# the event as JSON, then name, value of each field of the state. Returns 1, 0 if the epoch is another, or -1
# from the latest time on. Counts are reset where a trial begins; other changes keep its time.
_CHANGE = script_of("""
local now = redis.call('TIME')
local at = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
if tonumber(at) >= tonumber(ARGV[1]) then return -1 end
if (redis.call('HGET', KEYS[1], 'epoch') or '0') ~= ARGV[2] then return 0 end
local since = #KEYS == 2 and redis.call('HGET', KEYS[1], 'since_ms') or at
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'since_ms', since, unpack(ARGV, 6))
redis.call('LPUSH', KEYS[2],
  '{"at_ms": ' .. at .. ', "epoch": ' .. ARGV[3] .. ', ' .. string.sub(ARGV[5], 2))
redis.call('LTRIM', KEYS[2], 0, ARGV[4] - 1)
for at = 3, #KEYS do redis.call('DEL', KEYS[at]) end
return 1
""")

# KEYS: state, counts. ARGV: trial, seconds to keep the counts, then command, name, value of each sum.
# Returns 0 if another trial is the latest.
_ADD = script_of("""
if redis.call('HGET', KEYS[1], 'trial') ~= ARGV[1] then return 0 end
for at = 3, #ARGV, 3 do redis.call(ARGV[at], KEYS[2], ARGV[at + 1], ARGV[at + 2]) end
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
""")


class DraftVersions:
    """The versions of the pool `pool_name` at `url`.

    Every call of Redis is one attempt, and raises StoreUnavailable if it is away. `try_version`, `promote`,
    `drain` and `roll_back` apply the functions of `galley.core.versions.state` to the state as it is, and
    raise ValueError as those do.
    """

    def __init__(
        self,
        url: str,
        pool_name: str = DEFAULT_POOL,
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        self._calls = RedisCalls(url, call_timeout_s=call_timeout_s, max_connections=1)
        self._registry = ReplicaRegistry(url, pool_name, call_timeout_s=call_timeout_s)
        self._call_ms = int(call_timeout_s * 1000)
        self._key = f"galley:drafts:{{{pool_name}}}"

    async def read(self) -> VersionState:
        """Return the state; without one, that of no split."""
        return _state(await self._hash(self._key))

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool:
        """Replace the state of `expected_epoch`, and note the event. Return False if it has changed since.

        Without a reply, the call fails after `call_timeout_s` or later; from then on it changes nothing.
        A state that begins a trial resets the counts of both its versions, and of all that it does not name:
        they are the stable ones once a drain in mid-trial leaves none by name. Of more than `MAX_DECIDED`
        decisions the earliest are left out (`forget_earliest`).
        """
        if len(new.decided) > versions.MAX_DECIDED:
            leases = await self._registry.read(DRAFT_POOL)
            new = versions.forget_earliest(new, {lease.version for lease in leases})
        split = new.split
        resets = [self._counts_key(name) for name in {split.stable, split.canary, ""}]
        keys = (self._key, self._history_key, *(resets if new.trial == new.epoch else ()))
        noted = json.dumps({k: v for k, v in asdict(event).items() if k not in {"at_ms", "epoch"}})
        flat = [part for pair in _encode(new).items() for part in pair]
        latest_ms = await self.now_ms() + self._call_ms
        changed = await self._calls.run(
            _CHANGE, keys, latest_ms, expected_epoch, new.epoch, MAX_HISTORY, noted, *flat
        )
        if changed == _LATE:
            raise StoreUnavailable("the session store is unavailable", "a call reached it too late")
        return changed == 1

    async def add(self, version: str, counts: VersionCounts, trial: int) -> bool:
        """Add to a version's counts, unless a trial later than `trial` has begun. Return True if added.

        A call whose reply was lost may have added.
        """
        sums = [(name, name, counts) for name in FIELDS]
        for group, its in counts.groups.items():
            sums += [(name, f"{name}@{group}", its) for name in GAIN_FIELDS]
        flat = [
            part
            for name, key, its in sums
            if (value := getattr(its, name))
            for part in ("HINCRBYFLOAT" if name in FLOATS else "HINCRBY", key, repr(value))
        ]
        keys = (self._key, self._counts_key(version))
        return await self._calls.run(_ADD, keys, trial, _COUNTS_TTL_S, *flat) == 1

    async def counts(self, of: Collection[str] | None = None) -> dict[str, VersionCounts]:
        """Return the counts of versions, if not given, of all that the state names.

        Sessions that were given to no version by name count under the empty name.
        """
        if of is None:
            state = await self.read()
            of = dict.fromkeys((state.split.stable, state.split.canary, *state.decided))
        return {name: _counts(await self._hash(self._counts_key(name))) for name in of}

    async def history(self) -> list[VersionEvent]:
        """Return the changes, the latest first."""
        key = self._history_key
        items = cast("list[bytes]", await self._calls.command("LRANGE", key, 0, -1, key=key))
        return [_event(item) for item in items]

    async def now_ms(self) -> int:
        """Return the time on the server's clock, in ms."""
        return await self._calls.now_ms(self._key)

    async def try_version(
        self,
        version: str,
        share: float,
        *,
        by: SplitBy = "session",
        tokens: int = DEFAULT_TRIAL_TOKENS,
        author: str = "",
        reason: str = "",
        digest: str = "",
    ) -> VersionState:
        """Begin a trial; return the new state."""
        return await self._apply(
            lambda state: versions.try_version(
                state, version, share, by=by, tokens=tokens, author=author, reason=reason, digest=digest
            )
        )

    async def promote(self, version: str, *, author: str = "", reason: str = "") -> VersionState:
        return await self._apply(partial(versions.promote, version=version, author=author, reason=reason))

    async def drain(self, version: str, *, author: str = "", reason: str = "") -> VersionState:
        return await self._apply(partial(versions.drain, version=version, author=author, reason=reason))

    async def roll_back(self, *, author: str = "", reason: str = "") -> VersionState:
        return await self._apply(partial(versions.roll_back, author=author, reason=reason))

    async def close(self) -> None:
        await self._registry.close()
        await self._calls.close()

    async def _apply(self, action: Callable[[VersionState], Change]) -> VersionState:
        for _ in range(_ATTEMPTS):
            state = await self.read()
            new, event = action(state)
            if await self.change(state.epoch, new, event):
                return new
        raise Broken("the state of the drafts' versions changes all the time")

    async def _hash(self, key: str) -> dict[str, bytes]:
        flat = cast("list[bytes]", await self._calls.command("HGETALL", key, key=key))
        return dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))

    def _counts_key(self, version: str) -> str:
        return f"{self._key}:counts:{version}"

    @property
    def _history_key(self) -> str:
        return f"{self._key}:history"


def _encode(state: VersionState) -> dict[str, str]:
    """Return the fields, without those that the script sets."""
    split = state.split
    return {
        "stable": split.stable,
        "canary": split.canary,
        "share": repr(split.share),
        "by": split.by,
        "drained": ",".join(sorted(split.drained)),
        "tokens": str(state.tokens),
        "trial": str(state.trial),
        "author": state.author,
        "digest": state.digest,
        "decided": json.dumps(dict(state.decided)),
    }


def _state(values: dict[str, bytes]) -> VersionState:
    """Decode the state. Raise Broken if it cannot be read."""
    if not values:
        return VersionState()
    try:
        text = {name: value.decode() for name, value in values.items()}
        split = Split(
            _version(text["stable"]),
            _version(text["canary"]),
            _share(text["share"]),
            _split_by(text["by"]),
            frozenset(name for name in text["drained"].split(",") if name),
        )
        return VersionState(
            split,
            tokens=int(text["tokens"]),
            since_ms=int(text["since_ms"]),
            epoch=int(text["epoch"]),
            trial=int(text["trial"]),
            # A gateway of an earlier version writes none of these.
            author=text.get("author", ""),
            digest=text.get("digest", ""),
            decided=_decided(text["decided"]),
        )
    except (KeyError, ValueError) as error:
        raise Broken(f"the state of the drafts' versions cannot be read: {error}") from error


def _version(name: str) -> str:
    return versions.check_version(name) if name else ""


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= MAX_SHARE:
        raise ValueError(f"share: {text}")
    return share


def _decided(text: str) -> dict[str, str]:
    try:
        return {str(name): str(reason) for name, reason in json.loads(text).items()}
    except AttributeError:
        raise ValueError(f"decided: {text}") from None


def _split_by(text: str) -> SplitBy:
    if text not in get_args(SplitBy):
        raise ValueError(text)
    return cast("SplitBy", text)


def _counts(values: dict[str, bytes]) -> VersionCounts:
    """Decode counts. Raise Broken if they cannot be read."""
    sums: dict[str, dict[str, Any]] = {"": {}}
    try:
        for key, value in values.items():
            name, _, group = key.partition("@")
            if name in FIELDS:
                sums.setdefault(group, {})[name] = float(value) if name in FLOATS else int(value)
        groups = {int(group): VersionCounts(**its) for group, its in sums.items() if group}
    except ValueError as error:
        raise Broken(f"the counts of a draft's version cannot be read: {error}") from error
    return VersionCounts(**sums[""], groups=groups)


def _event(item: bytes) -> VersionEvent:
    return VersionEvent(**{name: value for name, value in json.loads(item).items() if name in _EVENT_FIELDS})
