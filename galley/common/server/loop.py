"""The event loop of a service: uvloop's, which takes all completions of gRPC in one turn.

grpc.aio's thread writes a byte to a socket for each operation that has completed. The reader of that socket
takes one byte a turn, and handles all operations that have completed by then. So a burst of completions is
followed by as many turns without work, each with a poll, a read and a callback (docs/decisions/068).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVarTuple

import uvloop

_Ts = TypeVarTuple("_Ts")

_MOST_BYTES = 4096
"""More than the socket holds."""
_GRPC_READER = "PollerCompletionQueue"


class ServiceLoop(uvloop.Loop):
    """A loop that reads all wake-ups of gRPC at once; all other readers are called as they are."""

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        if isinstance(fd, socket.socket) and _is_grpcs(callback):
            super().add_reader(fd, take_completions, fd, partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)


def take_completions(woken: socket.socket, handle: Callable[[], Any]) -> None:
    """Read all bytes but the one that `handle` reads; it handles all that they announce."""
    others = len(woken.recv(_MOST_BYTES, socket.MSG_PEEK)) - 1
    if others > 0:
        woken.recv(others)
    handle()


def _is_grpcs(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, partial) else callback
    return type(getattr(function, "__self__", None)).__name__ == _GRPC_READER
