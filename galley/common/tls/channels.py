"""A channel whose TLS files may change under it.

Calls that begin after a change go by a connection that was made with the new files, as soon as there is one;
those under way stay where they are, and the old connection is closed after the last of them. Until the new
one stands, calls go by the old one, as long as that is connected: files that do not fit the peer yet fail no
call. An old connection that breaks is not made again.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from galley.common.server.logs import get_logger
from galley.common.tls.files import WatchedFiles
from galley.common.tls.material import Material

_log = get_logger(__name__)
_READY = grpc.ChannelConnectivity.READY


class _Life:
    """One channel of gRPC's own, from one reading of the files."""

    def __init__(self, channel: grpc.aio.Channel, material: Material) -> None:
        self.channel = channel
        self.material = material
        self.calls = 0
        self.retired = False

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more."""
        return self.retired and not self.calls


class ReloadingChannel(grpc.aio.Channel):
    """A `grpc.aio.Channel` over channels that `open_channel` opens, each for one reading of `files`."""

    def __init__(
        self,
        address: str,
        open_channel: Callable[[Material], grpc.aio.Channel],
        files: WatchedFiles[Material],
    ) -> None:
        """`address` is for the log."""
        self._address = address
        self._open_channel = open_channel
        self._files = files
        self._lives: set[_Life] = set()
        self._now = self._open(files.current())
        self._next: _Life | None = None
        self._generation = 0
        self._connecting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def generation(self) -> int:
        """Grows when calls begin to go by another connection than before."""
        self._current()
        return self._generation

    # ---------------------------------------------------------------------- as grpc.aio has it --

    def unary_unary(self, *method: Any, **serializers: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._multi_callable(lambda channel: channel.unary_unary(*method, **serializers))

    def unary_stream(self, *method: Any, **serializers: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._multi_callable(lambda channel: channel.unary_stream(*method, **serializers))

    def stream_unary(self, *method: Any, **serializers: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._multi_callable(lambda channel: channel.stream_unary(*method, **serializers))

    def stream_stream(self, *method: Any, **serializers: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._multi_callable(lambda channel: channel.stream_stream(*method, **serializers))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`; of the connection that calls go by."""
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`; of the connection that calls go by now."""
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`; of the connection that calls go by now."""
        await self._current().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """See `grpc.aio.Channel`."""
        self._closed = True
        await self._stop_connecting()
        await asyncio.gather(*(life.channel.close(grace) for life in self._lives), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------- calls --

    def _multi_callable(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        of, made = self._now, make(self._now.channel)

        def call(*request: Any, **options: Any) -> Any:
            nonlocal of, made
            life = self._current()
            if life is not of:
                of, made = life, make(life.channel)
            begun = made(*request, **options)
            life.calls += 1
            begun.add_done_callback(lambda _: self._ended(life))
            return begun

        return call

    def _ended(self, life: _Life) -> None:
        life.calls -= 1
        self._close_if_over(life)

    # ----------------------------------------------------------------------------- connections --

    def _current(self) -> _Life:
        """What a call that begins now goes by."""
        material = self._files.current()
        if material is not (self._next or self._now).material:
            self._change_to(material)
        if self._next is not None and self._now.channel.get_state() is not _READY:
            self._go_over(self._next)  # what is not connected is not connected again with what was before
        return self._now

    def _change_to(self, material: Material) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._next is not None:
            self._retire(self._next)
        self._next = self._open(material)
        # Not in the context of the call that happened to find the change: its span is its own.
        self._connecting = asyncio.create_task(self._connect(self._next), context=contextvars.Context())

    async def _connect(self, life: _Life) -> None:
        """Go over to it once it is connected."""
        told = False
        while (state := life.channel.get_state(try_to_connect=True)) is not _READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not told:
                told = True
                _log.warning("cannot connect with the TLS files as they are now", address=self._address)
            await life.channel.wait_for_state_change(state)
        if life is self._next:
            self._go_over(life)

    def _go_over(self, life: _Life) -> None:
        before, self._now, self._next = self._now, life, None
        self._generation += 1
        self._retire(before)

    def _open(self, material: Material) -> _Life:
        life = _Life(self._open_channel(material), material)
        self._lives.add(life)
        return life

    def _retire(self, life: _Life) -> None:
        life.retired = True
        self._close_if_over(life)

    def _close_if_over(self, life: _Life) -> None:
        if not life.over or self._closed or life not in self._lives:
            return
        self._lives.remove(life)
        closing = asyncio.create_task(life.channel.close(), context=contextvars.Context())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})


def generation_of(channel: grpc.aio.Channel) -> Callable[[], int]:
    """Tells what grows when calls begin to go by another connection; of a plain channel, nothing does."""
    if isinstance(channel, ReloadingChannel):
        return lambda: channel.generation
    return lambda: 0
