"""All that a Redis holds, and the forms in which a program might have written tokens there or elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fakes.redis_servers import Server


async def stored(server: Server) -> dict[str, bytes]:
    """Return the keys of a server, each with all that it holds."""
    async with server.raw() as raw:
        return {key.decode(): key + b"\n" + await _value(raw, key) async for key in raw.scan_iter("*")}


async def _value(raw: Any, key: bytes) -> bytes:
    match await raw.type(key):
        case b"string":
            return bytes(await raw.get(key))
        case b"hash":
            return b"\n".join(part for pair in (await raw.hgetall(key)).items() for part in pair)
        case b"list":
            return b"\n".join(await raw.lrange(key, 0, -1))
        case b"zset":
            return b"\n".join(await raw.zrange(key, 0, -1))
        case b"set":
            return b"\n".join(await raw.smembers(key))
        case kind:
            raise AssertionError(f"{key!r} is a {kind!r}")


def written(tokens: Sequence[int]) -> Iterator[bytes]:
    """Return a run of tokens in all forms in which it might be written."""
    for kind in "HIQ":
        numbers = array(kind, tokens)
        yield numbers.tobytes()
        numbers.byteswap()
        yield numbers.tobytes()
    for separator in (",", ", ", " "):
        yield separator.join(map(str, tokens)).encode()
