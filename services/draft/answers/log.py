"""The logs of recent answers in Redis, by which the drafts of a pool learn from each other.

Each kind of session (tenant and workload) has two logs. The newer one grows until it is full, or half as old
as it may become. Then the older one begins anew. So nothing outlives `ttl_s`, even if no draft is left.

    galley:answers:<pool>:{<hash>}:0    string: time of birth (16 digits), then parts of answers
    galley:answers:<pool>:{<hash>}:1    the other log

The hash is keyed by the tenant's salt, and covers the tokenizer and the workload. A part is a hash of its
session (8 bytes), its position (4), its number of tokens (2), and the tokens (4 each), little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import cast

from galley.common.redis.calls import RedisCalls, script_of
from galley.core.content import HASH_BYTES, token_bytes, tokens_from_bytes
from galley.core.lookup.lookup import ANSWER_TOKENS, AnswerPart
from services.draft.answers.mailbox import MOST_PART_TOKENS, SESSION_BYTES, Kind, SharedKind

# Bytes of each of the two logs of a kind: as many tokens as a draft keeps of a kind in memory, or fewer.
MOST_LOG_BYTES = ANSWER_TOKENS * 4 // 2
ANY_VOCABULARY = 2**32
"""Every token id that the log can hold."""
_BIRTH_BYTES = 16
_CALL_TIMEOUT_S = 1.0
_PERSON = b"galley.answers"
_HEADER = struct.Struct(f"<{SESSION_BYTES}sIH")

# KEYS: the two logs. ARGV: life in ms, most bytes of a log, new parts, then for each log the birth and the
# length that the caller has read. Returns for each log: birth, unread parts, then birth and length now.
# What the caller adds is not unread.
_EXCHANGE = script_of("""
local logs = {}
for at = 1, 2 do
  local birth = redis.call('GETRANGE', KEYS[at], 0, 15)
  local from = birth == ARGV[2 + 2 * at] and ARGV[3 + 2 * at] or 16
  logs[at] = {birth, redis.call('GETRANGE', KEYS[at], from, -1)}
end
if ARGV[3] ~= '' then
  local left = {redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2])}
  local at = left[1] >= left[2] and 1 or 2
  local length = redis.call('STRLEN', KEYS[at]) + #ARGV[3]
  if left[at] < tonumber(ARGV[1]) / 2 or length > tonumber(ARGV[2]) then
    at = 3 - at
    local now = redis.call('TIME')
    redis.call('SET', KEYS[at], string.format('%010d%06d', now[1], now[2]), 'PX', ARGV[1])
  end
  redis.call('APPEND', KEYS[at], ARGV[3])
end
for at = 1, 2 do
  logs[at][3] = redis.call('GETRANGE', KEYS[at], 0, 15)
  logs[at][4] = redis.call('STRLEN', KEYS[at])
end
return logs
""")


class AnswerLog:
    """The logs of one pool and tokenizer. Every call is one attempt, and raises what `RedisCalls` does."""

    def __init__(
        self, url: str, pool_name: str, tokenizer_hash: str, ttl_s: float, *, vocab_size: int = ANY_VOCABULARY
    ) -> None:
        """Read no part with a token id of `vocab_size` or more: whoever writes to the log is not trusted."""
        self._calls = RedisCalls(url, call_timeout_s=_CALL_TIMEOUT_S, max_connections=2)
        self._prefix = f"galley:answers:{pool_name}:"
        self._tokenizer = tokenizer_hash.encode()
        self._vocab_size = vocab_size
        self._life_ms = max(1, math.ceil(ttl_s * 1000))

    async def exchange(self, kind: SharedKind, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """Add `parts` to the log of the kind; return the parts that others have added since `kind.read`."""
        keys = self._keys(kind.kind)
        read = [value for position in kind.read for value in position]
        reply = await self._calls.run(_EXCHANGE, keys, self._life_ms, MOST_LOG_BYTES, encode(parts), *read)
        logs = cast("list[tuple[bytes, bytes, bytes, int]]", reply)
        first, second = ((birth, length) for *_, birth, length in logs)
        kind.read = (first, second)
        unread = sorted((birth, data) for birth, data, *_ in logs)  # the older log first
        return [part for _, data in unread for part in decode(data, self._vocab_size)]

    async def close(self) -> None:
        await self._calls.close()

    def _keys(self, kind: Kind) -> tuple[str, str]:
        salt, workload = kind
        text = self._tokenizer + b"\0" + workload.encode()
        tag = blake2b(text, key=salt, digest_size=HASH_BYTES, person=_PERSON).hexdigest()
        log = f"{self._prefix}{{{tag}}}"
        return f"{log}:0", f"{log}:1"


def encode(parts: Iterable[AnswerPart]) -> bytes:
    """Return the bytes of `parts`; of more than fit into a log, the last ones."""
    encoded: list[bytes] = []
    room = MOST_LOG_BYTES - _BIRTH_BYTES
    for part in reversed(list(parts)):
        data = _HEADER.pack(part.session, part.start, len(part.tokens)) + token_bytes(part.tokens)
        room -= len(data)
        if room < 0:
            break
        encoded.append(data)
    return b"".join(reversed(encoded))


def decode(data: bytes, vocab_size: int = ANY_VOCABULARY) -> Iterator[AnswerPart]:
    """Yield the parts in `data` up to the first malformed one, without those beyond the vocabulary."""
    at = 0
    while len(data) - at >= _HEADER.size:
        session, start, count = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        words = data[at : at + 4 * count]
        if not 0 < count <= MOST_PART_TOKENS or len(words) < 4 * count:
            return
        at += len(words)
        tokens = tokens_from_bytes(words)
        if max(tokens) < vocab_size:
            yield AnswerPart(session, start, tokens)
