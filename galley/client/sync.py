"""The synchronous Python client: the asynchronous one, on an event loop in a thread of its own.

with Client("127.0.0.1:50051") as client:
    print(client.generate("The capital of France is", max_tokens=16, temperature=0.0).text)

So it works where an event loop runs already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from galley.client.arguments import show_options
from galley.client.audit import AuditCounts, AuditReport
from galley.client.client import AsyncClient
from galley.client.credentials import Key
from galley.client.options import Conversation, GenerateOptions, Prompt, Retries, Tls
from galley.client.result import Result
from galley.client.streams import AsyncStream, ResumePoint
from galley.pb.galley.v1 import galley_pb2 as pb

_T = TypeVar("_T")
_starting = threading.Lock()
# The event loop and the process that runs it. One for all clients: grpc.aio serves one event loop well, and
# several badly.
_started: list[tuple[int, asyncio.AbstractEventLoop]] = []


class Stream(Iterator[pb.StreamEvent]):
    """The events of one session, in order and each once.

    Iterate over it for the events, or call `result()` for the whole answer. `with` cancels it at the end of
    the block, and so does Python when nothing refers to it any more.

    >>> with client.stream("Say hello") as stream:
    ...     for event in stream:
    ...         print(event.chunk.text, end="")
    Hello, world!
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        # Its call must end in the thread of its event loop, not in the one that collects garbage.
        weakref.finalize(self, _loop().call_soon_threadsafe, stream.cancel).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __next__(self) -> pb.StreamEvent:
        event = _run(_next_event(self._stream))
        if event is None:
            raise StopIteration
        return event

    def result(self) -> Result:
        """Return the whole answer once the stream has ended. Raises RuntimeError if it was cancelled."""
        return _run(self._stream.result())

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
        """Return the arguments of `resume` that continue this stream, in another process if need be."""
        return self._stream.resume_from()

    def cancel(self) -> None:
        """End the stream before its end; the session stays resumable."""
        _loop().call_soon_threadsafe(self._stream.cancel)


class Client:
    """A client of one or more gateways over one session store. It may be used from several threads.

    Arguments and methods are those of AsyncClient, but for `interceptors` and `resume_stream`. End it by
    `with` or `close`. A process that is forked after the first call of any client can make no calls: they
    raise RuntimeError. Start processes by "spawn", or make the first call after the fork.

    >>> with Client("127.0.0.1:50051") as client:
    ...     result = client.generate("Say hello", max_tokens=4)
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, which ends open streams; further calls raise RuntimeError."""
        _run(self._client.close())

    @show_options
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Return the output for `prompt`: text to complete, messages for the chat template, or token ids.

        A gateway that dies meanwhile is a pause. Raises GalleyRpcError; if it has a `session_id`, `resume`
        returns what was generated.

        >>> result = client.generate("Say hello", max_tokens=4, temperature=0.0)
        >>> result.text, result.tokens, result.usage.output_tokens
        ('Hello, world!\\n', [11, 12, 13, 14], 4)
        >>> result.speculation.acceptance_rate
        0.5
        """
        return _run(self._client.generate(prompt, **options))

    @show_options
    def chat(self, messages: str | Conversation, **options: Unpack[GenerateOptions]) -> Result:
        """Return the model's answer to a conversation; text is one message of the user.

        A message is a `Message`, or a dict with `role` and `content`. `stream` takes a conversation too.

        >>> history = [{"role": "user", "content": "Say hello"}]
        >>> result = client.chat(history, temperature=0.0)
        >>> history.append(result.message)
        >>> result.message
        Message(role='assistant', content='Hello, world!\\n')
        """
        return _run(self._client.chat(messages, **options))

    @show_options
    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Return a stream of the output for `prompt`: text, messages for the chat template, or token ids.

        Each event has one of `started`, `chunk`, `numerics_changed` and `finished`. The text of others than a
        chunk is empty.

        >>> for event in client.stream("Say hello", max_tokens=4, temperature=0.0):
        ...     print(event.chunk.text, end="")
        Hello, world!
        """
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
        """Return a stream of a session from output token `next_index` on.

        `seen_hash` checks the tokens before it. `resume_from` of a stream returns these three arguments.

        >>> client.resume("session-1", 1).result().text
        ', world!\\n'
        """
        return _stream(
            lambda: self._client.resume(
                session_id, next_index, seen_hash, timeout_s=timeout_s, force_trace=force_trace
            )
        )

    def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good.

        >>> client.abort("session-1")
        """
        _run(self._client.abort(session_id, timeout_s=timeout_s))

    def audit(self, session_id: str, *, timeout_s: float | None = None) -> AuditReport:
        """Have a target compute the answer of a finished session again, and compare it with the token log.

        >>> client.audit("session-1").verdict
        <Verdict.SAME: 'same'>
        """
        return _run(self._client.audit(session_id, timeout_s=timeout_s))

    def audit_counts(self, *, timeout_s: float | None = None) -> AuditCounts:
        """Return the totals of all audits of the deployment.

        >>> client.audit_counts().differing
        0
        """
        return _run(self._client.audit_counts(timeout_s=timeout_s))

    def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the served model, its strategies and its limits; `model`, if given, must be its name.

        >>> client.model_info().model
        'tiny'
        """
        return _run(self._client.model_info(model, timeout_s=timeout_s))


def _loop() -> asyncio.AbstractEventLoop:
    if not _started:
        with _starting:
            if not _started:
                _started.append((os.getpid(), _start_loop()))
    ((process_id, loop),) = _started
    if process_id != os.getpid():  # its thread did not survive the fork
        problem = "Client: was used before this process was forked"
        raise RuntimeError(f"{problem}; start processes by 'spawn', or make the first call after the fork")
    return loop


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="galley-client", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        loop = _loop()
    except RuntimeError:
        work.close()  # else Python warns that it was never awaited
        raise
    future = asyncio.run_coroutine_threadsafe(work, loop)
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
