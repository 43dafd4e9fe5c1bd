"""Messages within a bound, those too that came compressed: no byte more is inflated than would be taken."""

from __future__ import annotations

import zlib

# As no message of protobuf begins: its first byte would be a field of wire type 7.
_MAGIC = b"\x1f\x8b"
_WITH_HEADER = 16 + zlib.MAX_WBITS


def within(data: bytes, most: int) -> bytes:
    """The message: `data` as it is, or what gzip made of it. Raises ValueError, which says what is wrong."""
    if len(data) > most:
        raise ValueError(f"must be at most {most} bytes, is {len(data)}")
    return _inflated(data, most) if data.startswith(_MAGIC) else data


def _inflated(data: bytes, most: int) -> bytes:
    inflater = zlib.decompressobj(_WITH_HEADER)
    try:
        plain = inflater.decompress(data, most + 1)
    except zlib.error:
        raise ValueError("is not well-formed gzip") from None
    if len(plain) > most:
        raise ValueError(f"must be at most {most} bytes, is more when inflated")
    if not inflater.eof or inflater.unused_data:
        raise ValueError("is not well-formed gzip")
    return plain
