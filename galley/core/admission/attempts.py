"""The calls of one stream, in order: which of two is the later one.

A client that leaves a gateway for another one leaves a call behind. A slow network may deliver it later, when
its session goes on elsewhere, and before the news that its client is gone. So a stream numbers its calls, and
the nonce of an owner (`galley/core/store.py`) begins with the call that it serves.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

ATTEMPT_KEY = "x-galley-attempt"
"""Name of the metadata in which a call tells its stream and number."""
STREAM_BYTES = 6
_NUMBER_BYTES = 2
MAX_NUMBER = 256**_NUMBER_BYTES - 1
_TEXT = re.compile(rf"([0-9a-fA-F]{{{2 * STREAM_BYTES}}})-([0-9]{{1,5}})")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Call `number` of the stream that has a random name of STREAM_BYTES bytes.

    All calls after number MAX_NUMBER have that number, too.
    Whoever counts from 1 again needs a new name: earlier numbers are refused.
    """

    stream: bytes
    number: int

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Return what `str` gave. Raise ValueError."""
        parts = _TEXT.fullmatch(text)
        if parts is None or int(parts[2]) > MAX_NUMBER:
            form = f"{2 * STREAM_BYTES} hexadecimal digits, - and a number <= {MAX_NUMBER}"
            raise ValueError(f"must be {form}, got {text[:32]!r}")
        return cls(bytes.fromhex(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.stream.hex()}-{self.number}"

    def nonce(self, random: bytes) -> bytes:
        """Return a nonce of as many bytes as `random` that begins with this call."""
        return (self.stream + self.number.to_bytes(_NUMBER_BYTES, "big") + random)[: len(random)]

    def precedes(self, nonce: bytes) -> bool:
        """Return True if that is the nonce of a later call of this stream."""
        number = int.from_bytes(nonce[STREAM_BYTES : STREAM_BYTES + _NUMBER_BYTES], "big")
        return nonce.startswith(self.stream) and number > self.number


class Attempts:
    """Number the calls of one stream, from 1 on."""

    def __init__(self) -> None:
        self._latest = Attempt(secrets.token_bytes(STREAM_BYTES), 0)

    def next(self) -> Attempt:
        latest = self._latest
        self._latest = Attempt(latest.stream, min(latest.number + 1, MAX_NUMBER))
        return self._latest
