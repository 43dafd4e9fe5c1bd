"""What is opened and then left as it is: calls and connections, by the thousand."""

from __future__ import annotations

from contextlib import AsyncExitStack

from tests.attack.floods import KEY, WATCH
from tests.attack.http2 import MAX_CONCURRENT_STREAMS, Kind, Wire, frame, message, opening, wire
from tests.attack.stack import Attacked, files_allowed

_REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_VERIFY, _PROPOSE = "/galley.v1.Target/VerifyStream", "/galley.v1.Draft/ProposeStream"
# Beside those that are held.
_OTHER_FILES = 500
# Connections of 100 calls: while more than 1,000 wait to be taken, gRPC drops some by chance.
_AT_ONCE = 5


class _Holder:
    """Opens idle streams, over as many connections as they need, as fast as the server takes them."""

    def __init__(self, stack: Attacked, opened: AsyncExitStack, calls: int) -> None:
        """`calls` are under way without it."""
        self.wires: list[Wire] = []
        self._stack = stack
        self._opened = opened
        self._calls = calls

    async def hold(self, name: str, path: str, streams: int) -> None:
        while streams > 0:
            attacker = await self._opened.enter_async_context(wire(self._stack.addresses[name]))
            self.wires.append(attacker)
            await attacker.begin()
            taken = min(streams, 100, attacker.heard.settings.get(MAX_CONCURRENT_STREAMS, 100))
            for stream in range(1, 2 * taken, 2):
                asked = frame(Kind.DATA, 1, stream, message(b"")) if path == WATCH else b""
                await attacker.send(opening(stream, path, KEY), asked)
            streams -= taken
            self._calls += taken
            if not len(self.wires) % _AT_ONCE:
                await self._stack.has_taken(self._calls)


async def idle_streams(stack: Attacked, opened: AsyncExitStack, calls: int, items: int) -> list[Wire]:
    """Streams of items, so many, halves at target and draft, and 100 each of watches and reflection.

    `calls` are under way without them.
    """
    holder = _Holder(stack, opened, calls)
    await holder.hold("target", _VERIFY, items // 2)
    await holder.hold("draft", _PROPOSE, items // 2)
    await holder.hold("gateway", WATCH, 100)
    await holder.hold("gateway", _REFLECT, 100)
    return holder.wires


async def idle_connections(stack: Attacked, opened: AsyncExitStack, count: int) -> int:
    """To the gateway, each begun in good order: how many, as far as a process may open files here."""
    count = min(count, files_allowed() - _OTHER_FILES)
    for _ in range(count):
        attacker = await opened.enter_async_context(wire(stack.gateway))
        await attacker.begin()
    return count
