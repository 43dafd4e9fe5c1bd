"""Records of output tokens: what the log keeps of each besides its id.

One record per token, in order: a flags byte (1: proposed by the draft, 2: logprobs follow, 4: a fingerprint
follows, because another target build computes from here on). Then, as flagged, the fingerprint (length byte,
UTF-8) and the logprobs (float32 of the chosen token, a uint16 count, then uint32 id and float32 each). All
numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from galley.core.values import value

_FROM_DRAFT, _LOGPROBS, _FINGERPRINT = 1, 2, 4
_CHOSEN = struct.Struct("<fH")
_TOP = struct.Struct("<If")


@value
class PositionLogprobs:
    """Natural logarithms under the model's distribution: the chosen token and the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@value
class TokenRecord:
    """One output token. `fingerprint` is set on the first token that a target build computes."""

    from_draft: bool = False
    logprobs: PositionLogprobs | None = None
    fingerprint: str | None = None


DRAFTED, NOT_DRAFTED = TokenRecord(from_draft=True), TokenRecord()
"""The records of most tokens."""


def encode_records(records: Iterable[TokenRecord]) -> bytes:
    return b"".join([_encode(record) for record in records])


def _encode(record: TokenRecord) -> bytes:
    if record is NOT_DRAFTED:
        return b"\0"
    if record is DRAFTED:
        return bytes([_FROM_DRAFT])
    flags = _FROM_DRAFT if record.from_draft else 0
    body = b""
    if record.fingerprint is not None:
        flags |= _FINGERPRINT
        name = record.fingerprint.encode()
        body += bytes([len(name)]) + name
    if record.logprobs is not None:
        flags |= _LOGPROBS
        body += _CHOSEN.pack(record.logprobs.logprob, len(record.logprobs.top))
        body += b"".join(_TOP.pack(*entry) for entry in record.logprobs.top)
    return bytes([flags]) + body


def decode_records(data: bytes) -> Iterator[TokenRecord]:
    """Yield what `encode_records` was given. Raise ValueError where `data` is truncated."""
    try:
        yield from _decode(memoryview(data))
    except (IndexError, struct.error) as error:
        raise ValueError("the session's token records are truncated") from error


def _decode(data: memoryview) -> Iterator[TokenRecord]:
    at = 0
    while at < len(data):
        flags = data[at]
        at += 1
        fingerprint = None
        if flags & _FINGERPRINT:
            size = data[at]
            fingerprint = bytes(data[at + 1 : at + 1 + size]).decode()
            at += 1 + size
        logprobs = None
        if flags & _LOGPROBS:
            logprob, count = _CHOSEN.unpack_from(data, at)
            at += _CHOSEN.size
            top = tuple(_TOP.unpack_from(data, at + i * _TOP.size) for i in range(count))
            at += count * _TOP.size
            logprobs = PositionLogprobs(logprob, top)
        yield TokenRecord(bool(flags & _FROM_DRAFT), logprobs, fingerprint)
