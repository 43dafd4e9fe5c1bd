"""Streams of one answer that go on by themselves: what breaks under one is a pause to who reads it.

A stream that broke is resumed after the last token that it gave out, at the next gateway. One that broke
before it had begun is asked for again, which the request's idempotency key makes safe. What another try
cannot help (a refusal, a lost log, another owner, the deadline) is raised.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import grpc.aio

from galley.client.errors import GalleyRpcError, rpc_error
from galley.client.options import Retries
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb

Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"

NO_RETRIES = Retries(patience_s=0.0)
_MAY_PASS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""CANCELLED by a server that is stopped: who cancels a stream himself does not read on."""
_BROKEN = ("RST_STREAM", "GOAWAY", "Stream removed")
"""What gRPC says, as INTERNAL or UNKNOWN, of a connection that ended beneath a call."""


class ResumePoint(NamedTuple):
    """The arguments of `AsyncClient.resume`: where a stream goes on."""

    session_id: str
    next_index: int
    seen_hash: bytes


class TokenStream(AsyncIterator[pb.StreamEvent]):
    """The events of one answer, in order and each once; raises GalleyRpcError where it cannot go on."""

    def __init__(
        self,
        # Of Generate or Resume: their responses both hold an `event`.
        call: Call,
        session_id: str = "",
        next_index: int = 0,
        seen: Sequence[int] = (),
        comeback: Comeback | None = None,
    ) -> None:
        """`seen` are the output tokens known before; without `comeback`, what breaks is raised."""
        self._call = call
        self._responses = call.__aiter__()
        self._comeback = comeback
        self._next_index = next_index
        self._begun = False
        self._cancelled = False
        self._numerics_changed: pb.NumericsChanged | None = None
        self.session_id = session_id
        # All output tokens from index 0 on, or from `next_index` on where the ones before are unknown.
        self.token_ids: list[int] = list(seen)
        self.finished: pb.Finished | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.StreamEvent:
        while True:
            try:
                event: pb.StreamEvent = (await anext(self._responses)).event
            except grpc.RpcError as error:
                await self._go_on_after(rpc_error(error))
            except asyncio.CancelledError:
                if self._cancelled or _reader_is_cancelled():
                    raise
                await self._go_on_after(GalleyRpcError(grpc.StatusCode.CANCELLED, "the gateway cancelled"))
            else:
                if self._note(event):
                    return event

    async def _go_on_after(self, error: GalleyRpcError) -> None:
        if self.finished is not None:
            raise StopAsyncIteration  # nothing of the answer was lost
        if self._comeback is None:
            raise error
        self._call = await self._comeback.after(error, self)
        self._responses = self._call.__aiter__()
        if self._cancelled:
            self._call.cancel()

    def _note(self, event: pb.StreamEvent) -> bool:
        """Whether it tells the reader anything: a stream that goes on begins again with what was told."""
        match event.WhichOneof("event"):
            case "started":
                self.session_id = event.started.session_id
                told, self._begun = self._begun, True
                return not told
            case "chunk":
                self._take(event.chunk)
            case "numerics_changed":
                if event.numerics_changed == self._numerics_changed:
                    return False
                self._numerics_changed = event.numerics_changed
            case "finished":
                self.finished = event.finished
            case _:
                pass
        return True

    def _take(self, chunk: pb.Chunk) -> None:
        if chunk.index != self._next_index:
            self._call.cancel()
            problem = f"the gateway went on at token {chunk.index}, not at {self._next_index}"
            raise GalleyRpcError(grpc.StatusCode.INTERNAL, problem)
        self.token_ids += chunk.token_ids
        self._next_index += len(chunk.token_ids)
        if self._comeback is not None:
            self._comeback.came_on()

    def resume_from(self) -> ResumePoint:
        """Where to go on; `seen_hash` is empty (not checked) if the stream itself began later than at 0."""
        whole = len(self.token_ids) == self._next_index
        seen_hash = prefix_hash(self.token_ids) if whole and self.token_ids else b""
        return ResumePoint(self.session_id, self._next_index, seen_hash)

    def cancel(self) -> None:
        """Stop the stream; the session stays resumable."""
        self._cancelled = True
        self._call.cancel()


class Comeback:
    """How one stream goes on after it broke. `timeout_s` is the deadline of the whole stream."""

    def __init__(
        self,
        retries: Retries,
        ask_again: Callable[[float | None], Call],
        resume: Callable[[ResumePoint, float | None], Call],
        leave: Callable[[], None],
        timeout_s: float | None,
    ) -> None:
        """`ask_again` and `resume` call the present gateway with what is left of the deadline.

        `leave` makes the next gateway the present one.
        """
        self._retries = retries
        self._ask_again = ask_again
        self._resume = resume
        self._leave = leave
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._broke_at_s: float | None = None
        self._pause_s = retries.first_pause_s

    def came_on(self) -> None:
        """Tokens came: what breaks from now on breaks anew."""
        self._broke_at_s = None
        self._pause_s = self._retries.first_pause_s

    async def after(self, error: GalleyRpcError, stream: TokenStream) -> Call:
        """A call that goes on with `stream`; raises `error` where that is of no use or took too long."""
        pause_s = self._pause_after(error, stream)
        if time.monotonic() + pause_s >= self._end_s(begun=bool(stream.session_id)):
            raise error
        self._leave()
        await asyncio.sleep(pause_s)
        remaining_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        if not stream.session_id:
            return self._ask_again(remaining_s)
        return self._resume(stream.resume_from(), remaining_s)

    def _end_s(self, *, begun: bool) -> float:
        """When to give up."""
        if self._broke_at_s is None:
            self._broke_at_s = time.monotonic()
        patience_s = self._retries.patience_s
        if not begun:
            patience_s = min(patience_s, self._retries.start_patience_s)
        end_s = self._broke_at_s + patience_s
        return end_s if self._deadline_s is None else min(end_s, self._deadline_s)

    def _pause_after(self, error: GalleyRpcError, stream: TokenStream) -> float:
        """How long to wait; raises `error` if another try will not help."""
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and stream.session_id:
            return max(error.retry_after_s or 0.0, self._next_pause_s())
        if error.code in _MAY_PASS or any(word in error.message for word in _BROKEN):
            return self._next_pause_s()
        raise error

    def _next_pause_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._retries.longest_pause_s)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311  # spreads clients, hides nothing


def _reader_is_cancelled() -> bool:
    """Else it is the call alone: grpc raises the same for a status CANCELLED that a server sent."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
