"""The results of audits in Redis, and whose turn it is to audit at a target.

Keys (those of a pool share a hash tag):

    galley:audit:{<pool>}                    hash: the totals, one field for each of AuditCounts
    galley:audit:{<pool>}:incidents          list of JSON objects, the latest first; kept for 90 days
    galley:audit:{<pool>}:turn:<address>     string: the nonce of a turn while a target computes for an audit,
                                             then empty for so long that audits take a small share of its time

They hold no text and no token ids.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from typing import Any, cast

from galley.common.redis.calls import DEFAULT_CALL_TIMEOUT_S, RedisCalls, script_of
from galley.core.audit import AuditCounts, AuditReport, Verdict
from services.gateway.clock import MILLISECOND

MOST_SHARE = 0.01
"""Largest share of a target's time that audits take which gateways make by themselves."""
MAX_INCIDENTS = 100
_INCIDENTS_MS = 90 * 24 * 3600 * 1000
_TURN_S = 150
"""Time after which the turn of a gateway ends that has died; longer than any request."""
_NONCE_BYTES = 8
_FIELDS = tuple(item.name for item in dataclasses.fields(AuditCounts))

# KEYS: totals, incidents. ARGV: an incident or "", most incidents, for how many ms, then name, value of each
# count. A call with an incident that is listed repeats one whose reply was lost, and changes nothing.
_ADD = script_of("""
if ARGV[1] ~= '' then
  for _, listed in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    if listed == ARGV[1] then return redis.status_reply('OK') end
  end
end
for at = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
if ARGV[1] ~= '' then
  redis.call('LPUSH', KEYS[2], ARGV[1])
  redis.call('LTRIM', KEYS[2], 0, ARGV[2] - 1)
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
return redis.status_reply('OK')
""")

# KEYS: the turn. ARGV: nonce, longest turn in ms. Returns 0, or in how many ms to try again. A call with the
# same nonce repeats one whose response was lost.
_BEGIN = script_of("""
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return math.max(1, redis.call('PTTL', KEYS[1])) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
""")

# KEYS: the turn. ARGV: nonce, rest in ms. Changes nothing if the turn, or a later rest, is another gateway's.
_END = script_of("""
local held = redis.call('GET', KEYS[1])
if not held or held == ARGV[1] then redis.call('SET', KEYS[1], '', 'PX', ARGV[2]) end
return redis.status_reply('OK')
""")


def counts_of(report: AuditReport) -> AuditCounts:
    """Return what a report adds to the totals."""
    if report.verdict is Verdict.NOT_COMPARED:
        return AuditCounts()
    if report.verdict is Verdict.DAMAGED:
        return AuditCounts(sessions=1, damaged=1)
    if report.deterministic:
        return AuditCounts(sessions=1, tokens=report.compared, differing=report.differing)
    return AuditCounts(sessions=1, loose_tokens=report.compared, loose_differing=report.differing)


def is_incident(report: AuditReport) -> bool:
    """Return True for what must not happen: a changed log, or other tokens of a deterministic build."""
    return report.verdict is Verdict.DAMAGED or (report.deterministic and report.differing > 0)


def report_facts(report: AuditReport) -> dict[str, Any]:
    """Return what logs and records tell of a report: no token ids."""
    return {
        "session_id": report.session_id,
        "verdict": report.verdict.value,
        "fingerprint": report.fingerprint,
        "replica": report.replica,
        "output_tokens": report.output_tokens,
        "compared": report.compared,
        "differing": report.differing,
    }


def rest_ms(compute_ns: int) -> int:
    """Return how long a target rests after it has computed for audits: that is MOST_SHARE of its time."""
    return max(1, math.ceil(compute_ns * (1 / MOST_SHARE - 1) / MILLISECOND))


class AuditRecords:
    """The records of the pool `pool_name` at `url`. Every call is one attempt, and may raise GalleyError."""

    def __init__(self, url: str, pool_name: str, *, call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S) -> None:
        self._calls = RedisCalls(url, call_timeout_s=call_timeout_s, max_connections=2)
        self._totals = f"galley:audit:{{{pool_name}}}"
        self._incidents = f"{self._totals}:incidents"
        self._nonces: dict[str, str] = {}
        """Those of the turns that have not ended, by address."""

    async def add(self, report: AuditReport, now_ms: int) -> None:
        """Add a report to the totals, and to the incidents if it is one. `now_ms` is a Unix time.

        A call with an incident can be repeated with the same time; it adds once.
        """
        counts = counts_of(report)
        if counts == AuditCounts():
            return
        incident = json.dumps(_incident(report, now_ms)) if is_incident(report) else ""
        added = [part for name in _FIELDS if (value := getattr(counts, name)) for part in (name, value)]
        keys = (self._totals, self._incidents)
        await self._calls.run(_ADD, keys, incident, MAX_INCIDENTS, _INCIDENTS_MS, *added)

    async def counts(self) -> AuditCounts:
        """Return the totals of all gateways of the pool."""
        reply = await self._calls.command("HMGET", self._totals, *_FIELDS, key=self._totals)
        values = cast("list[bytes | None]", reply)
        return AuditCounts(**{name: int(value or 0) for name, value in zip(_FIELDS, values, strict=True)})

    async def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents, the latest first."""
        reply = await self._calls.command("LRANGE", self._incidents, 0, -1, key=self._incidents)
        return [json.loads(entry) for entry in cast("list[bytes]", reply)]

    async def wait_ms(self, address: str) -> int:
        """Return in how many ms to try to begin a turn at a target; 0: now."""
        key = self._turn(address)
        return max(0, cast("int", await self._calls.command("PTTL", key, key=key)))

    async def begin_turn(self, address: str) -> int:
        """Take the turn to audit at a target, or keep it. Return 0, or in how many ms to try again."""
        nonce = self._nonce(address)
        return cast("int", await self._calls.run(_BEGIN, [self._turn(address)], nonce, _TURN_S * 1000))

    async def end_turn(self, address: str, compute_ns: int) -> None:
        """End the turn: the target computed for so long, so no gateway audits there for much longer.

        A turn that has ended in the store ends none of another gateway. A call that failed can be repeated.
        """
        await self._calls.run(_END, [self._turn(address)], self._nonce(address), rest_ms(compute_ns))
        self._nonces.pop(address, None)

    async def close(self) -> None:
        await self._calls.close()

    def _nonce(self, address: str) -> str:
        return self._nonces.setdefault(address, secrets.token_hex(_NONCE_BYTES))

    def _turn(self, address: str) -> str:
        return f"{self._totals}:turn:{address}"


def _incident(report: AuditReport, now_ms: int) -> dict[str, Any]:
    """Return what an incident's record holds: no token ids."""
    return {
        "at_ms": now_ms,
        **report_facts(report),
        "differences": [
            {
                "index": difference.index,
                "logged_logprob": difference.logged_logprob,
                "computed_logprob": difference.computed_logprob,
            }
            for difference in report.differences
        ],
    }
