"""Token streams that survive a broken connection.

A broken stream is resumed at the next gateway, after the last token that it delivered. A stream that broke
before it started is requested again; its idempotency key makes that safe. Errors that another attempt cannot
help (a refusal, a lost log, another owner, the deadline) are raised, and so is INTERNAL for an answer that
breaks the protocol.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

import grpc
import grpc.aio

from galley.client.errors import GalleyRpcError, rpc_error, status_error
from galley.client.options import Retries
from galley.client.result import Output, Result
from galley.core.admission.attempts import Attempts
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb

Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"

NO_RETRIES = Retries(patience_s=0.0)
# CANCELLED is what a stopping gateway sends.
RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Words of gRPC's INTERNAL and UNKNOWN errors for a connection that ended during a call.
_BROKEN_CONNECTION = ("RST_STREAM", "GOAWAY", "Stream removed")
# gRPC's own RESOURCE_EXHAUSTED for a message above the client's limit.
_TOO_LARGE = "larger than max"
_UNFINISHED = "the gateway ended the stream before the answer was complete"
_MAX_EVENTS_WITHOUT_TOKEN = 100
_COMPLETE = frozenset({pb.Finished.REASON_STOP, pb.Finished.REASON_LENGTH})
# A gateway ends the stream at once after the last event; the client does not wait longer for that.
_END_WAIT_S = 5.0


class ResumePoint(NamedTuple):
    """The arguments of `resume`: where a stream continues."""

    session_id: str
    next_index: int
    seen_hash: bytes


BEGINNING = ResumePoint("", 0, b"")


class Gateways:
    """The gateway that the calls of a client use, by its index: the first until it fails, then the next."""

    def __init__(self, count: int) -> None:
        self.current = 0
        self._count = count

    def after(self, index: int) -> int:
        return (index + 1) % self._count

    def leave(self, failed: int) -> None:
        """Make the gateway after `failed` current, unless another call has left it already."""
        if self.current == failed:
            self.current = self.after(failed)


class AsyncStream(AsyncIterator[pb.StreamEvent]):
    """The events of one session, in order and each once.

    Iterate over it for the events, or `await result()` for the whole answer. `async with` cancels it at the
    end of the block. Raises GalleyRpcError when the session cannot be continued. `tokens` are the output
    tokens from index 0 on, or from the index at which the stream was resumed if the earlier ones are unknown.
    `finished` is the last event, None before it.

    >>> async with client.stream("Say hello") as stream:
    ...     async for event in stream:
    ...         print(event.chunk.text, end="")
    Hello, world!
    """

    def __init__(
        self,
        call: Call,
        point: ResumePoint = BEGINNING,
        seen: Output | None = None,
        recovery: Recovery | None = None,
        max_tokens: int | None = None,
        attempts: Attempts | None = None,
    ) -> None:
        """Read `call`, of Generate, or of Resume at `point`.

        `seen` is the output before `point`, if known. Without `recovery`, a break is raised.
        `max_tokens` is that of the request; None: unknown, and not checked. `attempts` numbers the calls of
        this stream, and of one that continues it.
        """
        self._call = call
        self._responses = call.__aiter__()
        self._recovery = recovery
        self._point = point
        self.output = Output(point.next_index) if seen is None else seen.copy()
        self._next_index = point.next_index
        self._started = False
        self._is_answered = False
        self._events_without_token = 0
        self._cancelled = False
        self._is_read_cancelled = False
        self.max_tokens = max_tokens
        self._numerics_changed: pb.NumericsChanged | None = None
        self.session_id = point.session_id
        self.finished: pb.Finished | None = None
        self.attempts = attempts

    @property
    def tokens(self) -> list[int]:
        """Return the output tokens received so far."""
        return self.output.tokens

    async def result(self) -> Result:
        """Return the whole answer once the stream has ended. Raises RuntimeError if it was cancelled."""
        async for _ in self:
            pass
        if self.finished is None:
            raise RuntimeError("result: the stream was cancelled before the answer had ended")
        return self.output.result(self.finished)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.StreamEvent:
        while self.finished is None and not self._cancelled:
            if self._is_read_cancelled:
                await self._call_again()
            try:
                event: pb.StreamEvent = (await anext(self._responses)).event
            except StopAsyncIteration:
                await self._recover(status_error(grpc.StatusCode.UNAVAILABLE, _UNFINISHED))
            except grpc.RpcError as error:
                await self._recover(rpc_error(error))
            except asyncio.CancelledError:
                if _is_reader_cancelled():
                    self._is_read_cancelled = True
                    raise
                if not self._cancelled:
                    await self._recover(status_error(grpc.StatusCode.CANCELLED, "the gateway cancelled"))
            else:
                if self._apply(event):
                    return event
        await self._end_call()
        raise StopAsyncIteration

    async def _end_call(self) -> None:
        """Wait for the end of a complete or cancelled call, whatever follows; cancel it after a while."""
        try:
            async with asyncio.timeout(_END_WAIT_S):
                async for _ in self._responses:
                    pass
        except (grpc.RpcError, TimeoutError):
            self._call.cancel()
        except asyncio.CancelledError:
            if _is_reader_cancelled():
                raise

    async def _recover(self, error: GalleyRpcError) -> None:
        error.session_id = self.session_id
        if self._recovery is None:
            raise error
        self._continue_with(await self._recovery.reconnect(error, self, is_answered=self._is_answered))

    async def _call_again(self) -> None:
        """Replace a call that gRPC cancelled with its reader, which is no fault of the gateway."""
        if self._recovery is not None:
            self._continue_with(await self._recovery.call_again(self))
        self._is_read_cancelled = False

    def _continue_with(self, call: Call) -> None:
        self._call = call
        self._responses = self._call.__aiter__()
        self._is_answered = False
        self._events_without_token = 0
        if self._cancelled:
            self._call.cancel()

    def _apply(self, event: pb.StreamEvent) -> bool:
        """Take note of `event`. Return False if a resumed stream only repeats it."""
        self._is_answered = True
        self._events_without_token = 0 if event.chunk.token_ids else self._events_without_token + 1
        if self._events_without_token > _MAX_EVENTS_WITHOUT_TOKEN:
            self._refuse(f"the gateway sent {self._events_without_token} events without a token")
        match event.WhichOneof("event"):
            case "started":
                self.session_id = event.started.session_id
                self.output.started = event.started
                is_repeated, self._started = self._started, True
                return not is_repeated
            case "chunk":
                self._append(event.chunk)
            case "numerics_changed":
                if event.numerics_changed == self._numerics_changed:
                    return False
                self._numerics_changed = event.numerics_changed
                self.output.numerics_changed.append(event.numerics_changed.index)
            case "finished":
                self._finish(event.finished)
            case _:
                pass
        return True

    def _append(self, chunk: pb.Chunk) -> None:
        if chunk.index != self._next_index:
            self._refuse(f"the gateway continued at token {chunk.index}, not at {self._next_index}")
        end = chunk.index + len(chunk.token_ids)
        if self.max_tokens is not None and end > self.max_tokens:
            self._refuse(f"the gateway sent {end} tokens, {self.max_tokens} were asked for")
        self.output.add(chunk)
        self._next_index = end
        if self._recovery is not None and chunk.token_ids:
            self._recovery.reset()

    def _finish(self, finished: pb.Finished) -> None:
        tokens = finished.usage.output_tokens
        if finished.reason in _COMPLETE and tokens > self._next_index:
            self._refuse(f"the gateway finished after {tokens} tokens, of which it sent {self._next_index}")
        self.finished = finished

    def _refuse(self, problem: str) -> NoReturn:
        self._call.cancel()
        error = status_error(grpc.StatusCode.INTERNAL, problem)
        error.session_id = self.session_id
        raise error

    def resume_from(self) -> ResumePoint:
        """Return the arguments of `resume`.

        If the tokens before the point of `resume` are unknown, `seen_hash` is the one given there until
        tokens have come, and then empty (no check).
        """
        seen_hash = self._point.seen_hash if self._next_index == self._point.next_index else b""
        if self.tokens and len(self.tokens) == self._next_index:
            seen_hash = prefix_hash(self.tokens)
        return ResumePoint(self.session_id, self._next_index, seen_hash)

    def cancel(self) -> None:
        """End the stream before its end; the session stays resumable."""
        self._cancelled = True
        self._call.cancel()


class Recovery:
    """The attempts to reconnect one stream after it broke."""

    def __init__(
        self,
        retries: Retries,
        start: Callable[[float | None], Call] | None,
        resume: Callable[[ResumePoint, float | None], Call],
        gateways: Gateways,
        timeout_s: float | None,
    ) -> None:
        """Reconnect by `start` and `resume`, which call the current gateway with the seconds that are left.

        Without `start`, the stream can only be resumed.
        """
        self._retries = retries
        self._start = start
        self._resume = resume
        self._gateways = gateways
        self._used = gateways.current
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._broken_since_s: float | None = None
        self._pause_s = retries.first_pause_s
        self._again_at_s = -math.inf
        """When a reader that was cancelled may call again."""

    def reset(self) -> None:
        """Note that tokens came: the next break may be retried for the full time again."""
        self._broken_since_s = None
        self._pause_s = self._retries.first_pause_s

    async def reconnect(self, error: GalleyRpcError, stream: AsyncStream, *, is_answered: bool) -> Call:
        """Return a call that continues `stream`; raises `error` if that is useless or took too long.

        If the deadline would pass before the next attempt, that is raised instead, with `error` as its cause.
        Later calls of the client use the next gateway in either case, if another may help. `is_answered`:
        the broken call has sent an event, so that a passed deadline is not the gateway's fault.
        """
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not is_answered:
            self._gateways.leave(self._used)
        pause_s = self._pause_after(error, stream)
        self._gateways.leave(self._used)
        give_up_s = self._give_up_at_s(started=bool(stream.session_id))
        if time.monotonic() + pause_s >= min(give_up_s, self._deadline_s):
            # A refusal is raised as it is, because it says when to come back.
            if give_up_s < self._deadline_s or error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise error
            raise _too_late(error) from error
        await asyncio.sleep(pause_s)
        return self._call(stream)

    async def call_again(self, stream: AsyncStream) -> Call:
        """Return a call that continues `stream`, which did not break; raises DeadlineExceededError.

        Further ones without a token between them wait for longer and longer, as after failures.
        """
        if time.monotonic() >= self._deadline_s:
            late = status_error(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")
            late.session_id = stream.session_id
            raise late
        await asyncio.sleep(self._again_at_s - time.monotonic())
        self._again_at_s = time.monotonic() + self._next_pause_s()
        return self._call(stream)

    def _call(self, stream: AsyncStream) -> Call:
        self._used = self._gateways.current
        remaining_s = None if self._deadline_s == math.inf else self._deadline_s - time.monotonic()
        if self._start is not None and not stream.session_id:
            return self._start(remaining_s)
        return self._resume(stream.resume_from(), remaining_s)

    def _give_up_at_s(self, *, started: bool) -> float:
        if self._broken_since_s is None:
            self._broken_since_s = time.monotonic()
        patience_s = self._retries.patience_s
        if not started:
            patience_s = min(patience_s, self._retries.start_patience_s)
        return self._broken_since_s + patience_s

    def _pause_after(self, error: GalleyRpcError, stream: AsyncStream) -> float:
        """Return the pause before the next attempt; raises `error` if no attempt can help."""
        if _TOO_LARGE in error.message:
            raise error
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and stream.session_id:
            return max(error.retry_after_s or 0.0, self._next_pause_s())
        if error.code in RETRYABLE or any(word in error.message for word in _BROKEN_CONNECTION):
            return self._next_pause_s()
        raise error

    def _next_pause_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._retries.longest_pause_s)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311  # spreads clients, hides nothing


def _too_late(error: GalleyRpcError) -> GalleyRpcError:
    problem = f"no time is left for another attempt; the last one failed: {error}"
    late = status_error(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
    late.session_id = error.session_id
    return late


def _is_reader_cancelled() -> bool:
    # grpc raises CancelledError for a status CANCELLED of the server as well.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
