"""The synchronous Python client: the asynchronous one, on an event loop in a thread of its own.

with Client("127.0.0.1:50051") as client:
    for event in client.stream("The capital of France is", max_tokens=16, temperature=0.0):
        print(event.chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from galley.client.client import AsyncClient
from galley.client.credentials import Key
from galley.client.options import GenerateOptions, Prompt, Retries, Tls
from galley.client.streams import AsyncStream, ResumePoint
from galley.pb.galley.v1 import galley_pb2 as pb

_T = TypeVar("_T")


class Stream(Iterator[pb.StreamEvent]):
    """The events of one session; see AsyncStream, whose attributes it has."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __next__(self) -> pb.StreamEvent:
        event = _run(_next_event(self._stream))
        if event is None:
            raise StopIteration
        return event

    @property
    def session_id(self) -> str:
        """Return the id of the session; empty before the first event."""
        return self._stream.session_id

    @property
    def tokens(self) -> list[int]:
        """Return the output tokens received so far."""
        return self._stream.tokens

    @property
    def finished(self) -> pb.Finished | None:
        """Return the last event; None before it."""
        return self._stream.finished

    def resume_from(self) -> ResumePoint:
        """Return the arguments of `resume` that continue this stream."""
        return self._stream.resume_from()

    def cancel(self) -> None:
        """Stop the stream; the session stays resumable."""
        _loop().call_soon_threadsafe(self._stream.cancel)


class Client:
    """A synchronous client; open it with `with`. It may be used from several threads.

    Arguments and methods are those of AsyncClient, but for `interceptors` and `resume_stream`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        retries: Retries = Retries(),  # noqa: B008  # frozen
        tls: Tls | None = None,
        api_key: Key | None = None,
        force_trace: bool = False,
    ) -> None:
        self._client = AsyncClient(
            addresses, retries=retries, tls=tls, api_key=api_key, force_trace=force_trace
        )

    def __enter__(self) -> Self:
        _run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        _run(self._client.__aexit__())

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Stream the output for `prompt`: text to complete, messages for the chat template, or token ids."""
        return _stream(lambda: self._client.stream(prompt, **options))

    def resume(
        self,
        session_id: str,
        next_index: int = 0,
        seen_hash: bytes = b"",
        *,
        timeout_s: float | None = None,
        force_trace: bool = False,
    ) -> Stream:
        """Stream a session from output token `next_index` on; `seen_hash` checks the tokens before it."""
        return _stream(
            lambda: self._client.resume(
                session_id, next_index, seen_hash, timeout_s=timeout_s, force_trace=force_trace
            )
        )

    def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good."""
        _run(self._client.abort(session_id, timeout_s=timeout_s))

    def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the served model, its strategies and its limits; `model`, if given, must be its name."""
        return _run(self._client.model_info(model, timeout_s=timeout_s))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    # One for all clients of the process: grpc.aio serves one event loop well, and several badly.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="galley-client", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C: do not leave it running
        raise


def _stream(start: Callable[[], AsyncStream]) -> Stream:
    async def started() -> AsyncStream:
        return start()

    return Stream(_run(started()))


async def _next_event(stream: AsyncStream) -> pb.StreamEvent | None:
    return await anext(stream, None)
