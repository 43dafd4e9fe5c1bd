"""Many items over one stream: joined within bounds, given up by name, failed and opened again as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from galley.common.tls.channels import open_channel
from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.replicas.clients import MAX_MESSAGE_BYTES, RequestStream, stream_of
from services.gateway.service import REPLICA_CHANNEL
from tests.fakes.waiting import PATIENCE_S

Stream = RequestStream[pb.VerifyItem, pb.VerifyAnswer]


class Pool(rpc.TargetServicer):
    def __init__(self) -> None:
        self.messages: list[pb.VerifyStreamRequest] = []
        self.arrived: asyncio.Queue[pb.VerifyStreamRequest] = asyncio.Queue()
        self.opened = 0
        self.hold = False
        self.script: Callable[[pb.VerifyItem], list[pb.VerifyAnswer]] | None = None
        self.end = asyncio.Event()
        self.ended = asyncio.Event()
        self.generation = 0
        self.fault: Exception | None = None
        """The error of what builds the next message."""

    def message(self, cancelled: list[pb.ItemRef], extensions: list[pb.Extension]) -> pb.VerifyStreamRequest:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return pb.VerifyStreamRequest(cancelled=cancelled, extensions=extensions)

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        self.opened += 1
        async for message in request_iterator:
            self.messages.append(message)
            self.arrived.put_nowait(message)
            if self.end.is_set():
                self.end.clear()
                return
            if self.script is not None:
                yield pb.VerifyStreamResponse(
                    answers=[answer for item in message.items for answer in self.script(item)]
                )
            elif not self.hold:
                yield pb.VerifyStreamResponse(
                    answers=[
                        pb.VerifyAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
                        for item in message.items
                    ]
                )
        self.ended.set()


@pytest.fixture
def pool() -> Pool:
    return Pool()  # type: ignore[abstract]  # the calls that are not made


@pytest.fixture
async def stream(pool: Pool) -> AsyncIterator[Stream]:
    server = grpc.aio.server()
    rpc.add_TargetServicer_to_server(pool, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream: Stream = RequestStream(
            stream_of(channel, "/galley.v1.Target/VerifyStream", pb.VerifyStreamResponse),
            pool.message,
            lambda answer: answer.result.more,
            lambda: pool.generation,
        )
        yield stream
        await stream.close()
    await server.stop(None)


class Responses:
    """Receive the responses of one request."""

    has_begun = False

    def __init__(self, stream: Stream, request: pb.VerifyItem) -> None:
        self.batches: asyncio.Queue[Sequence[pb.VerifyAnswer] | Exception] = asyncio.Queue()
        self.put, self.fail = self.batches.put_nowait, self.batches.put_nowait
        self.request = stream.open(request, self)

    async def next(self) -> list[int]:
        """Return the positions of what was delivered at once."""
        delivered = await self.batches.get()
        if isinstance(delivered, Exception):
            raise delivered
        return [response.result.position for response in delivered]


def item(session_id: str, tokens: int = 1) -> pb.VerifyItem:
    return pb.VerifyItem(slice=pb.SessionSlice(session_id=session_id, tokens=[40_000] * tokens))


async def test_each_request_gets_its_own_response(pool: Pool, stream: Stream) -> None:
    names = [f"s{number}" for number in range(50)]
    answers = await asyncio.gather(*(stream.send(item(name)) for name in names))
    assert [answer.session_id for answer in answers] == names
    assert pool.opened == 1
    assert len(pool.messages) < len(names), "what comes while a message is written goes into the next one"


async def test_requests_are_joined_up_to_a_bound(pool: Pool, stream: Stream) -> None:
    await asyncio.gather(*(stream.send(item(f"s{number}", tokens=8_000)) for number in range(20)))
    sizes = [message.ByteSize() for message in pool.messages]
    assert max(sizes) <= MAX_MESSAGE_BYTES + 100
    assert max(len(message.items) for message in pool.messages) > 1


async def test_a_large_request_is_sent_alone(pool: Pool, stream: Stream) -> None:
    await asyncio.gather(stream.send(item("large", tokens=60_000)), stream.send(item("small")))
    assert [len(message.items) for message in pool.messages] == [1, 1]


async def test_a_cancelled_request_is_sent_as_cancelled(pool: Pool, stream: Stream) -> None:
    pool.hold = True
    request = asyncio.create_task(stream.send(item("s")))
    sent = (await pool.arrived.get()).items[0].slice
    request.cancel()
    await asyncio.wait({request})
    (named,) = (await pool.arrived.get()).cancelled
    assert (named.session_id, named.request_id) == ("s", sent.request_id)


async def test_a_request_cancelled_early_is_not_sent(pool: Pool, stream: Stream) -> None:
    # Each too large to be joined: the last waits for the messages of all the others.
    requests = [asyncio.create_task(stream.send(item(f"s{number}", tokens=30_000))) for number in range(10)]
    await asyncio.sleep(0)
    requests[-1].cancel()
    await asyncio.gather(*requests[:-1])
    assert (await stream.send(item("after"))).session_id == "after"
    sent = {item.slice.session_id for message in pool.messages for item in message.items}
    assert sent == {*(f"s{number}" for number in range(9)), "after"}


async def test_a_closed_stream_fails_its_requests_and_reopens(pool: Pool, stream: Stream) -> None:
    pool.end.set()
    with pytest.raises((Unavailable, grpc.aio.AioRpcError)):
        await stream.send(item("s"))
    assert (await stream.send(item("s"))).session_id == "s"
    assert pool.opened == 2


async def test_a_message_that_cannot_be_built_fails_the_open_requests(pool: Pool, stream: Stream) -> None:
    pool.hold = True
    sent = Responses(stream, item("sent"))
    await pool.arrived.get()
    pool.hold, pool.fault = False, KeyError("no such field")
    with capture_logs() as logs:
        failed = await asyncio.gather(stream.send(item("s")), sent.next(), return_exceptions=True)
    assert [type(error) for error in failed] == [Unavailable, Unavailable]
    assert [(line["log_level"], line["event"]) for line in logs] == [("error", "stream to a replica failed")]
    assert stream.is_broken
    assert (await stream.send(item("s"))).session_id == "s"
    assert pool.opened == 2


def result(opened: pb.SessionSlice, position: int, *, more: bool) -> pb.VerifyAnswer:
    return pb.VerifyAnswer(
        session_id=opened.session_id,
        request_id=opened.request_id,
        result=pb.VerifyResult(position=position, more=more),
    )


async def test_responses_after_the_last_are_dropped(pool: Pool, stream: Stream) -> None:
    pool.script = lambda item: [
        result(item.slice, 1, more=True),
        result(item.slice, 2, more=False),
        result(item.slice, 3, more=False),
    ]
    responses = Responses(stream, item("s"))
    assert await responses.next() == [1, 2], "what has arrived together is delivered together"
    pool.script = None
    assert (await stream.send(item("after"))).session_id == "after"
    responses.request.cancel()
    assert not any(message.cancelled for message in pool.messages), "what is over is not given up"


async def test_an_extension_never_precedes_its_request(pool: Pool, stream: Stream) -> None:
    pool.hold = True
    # Each too large to be joined: the last waits for the messages of all others, and so does its extension.
    opened = [Responses(stream, item(f"s{number}", tokens=30_000)) for number in range(4)]
    opened[-1].request.extend(pb.Extension(limit=9))
    opened[0].request.extend(pb.Extension(limit=5))
    seen: list[str] = []
    while seen.count("extended s3") < 1:
        message = await pool.arrived.get()
        seen += [f"asked {item.slice.session_id}" for item in message.items]
        seen += [f"extended {extension.session_id}" for extension in message.extensions]
    assert seen.index("extended s0") > seen.index("asked s0")
    assert seen.index("extended s3") > seen.index("asked s3")


async def test_a_finished_request_is_not_extended(pool: Pool, stream: Stream) -> None:
    responses = Responses(stream, item("s"))
    await responses.next()
    responses.request.extend(pb.Extension(limit=9))
    await stream.send(item("after"))
    assert not any(message.extensions for message in pool.messages)


async def test_a_broken_stream_fails_after_its_responses(pool: Pool, stream: Stream) -> None:
    pool.script = lambda item: [result(item.slice, 1, more=True)]
    opened = Responses(stream, item("s"))
    await pool.arrived.get()
    pool.end.set()
    other = Responses(stream, item("ends it"))
    with pytest.raises((Unavailable, grpc.aio.AioRpcError)):
        await other.next()
    assert await opened.next() == [1]
    with pytest.raises((Unavailable, grpc.aio.AioRpcError)):
        await opened.next()


async def test_a_stream_is_outdated_by_a_new_connection(pool: Pool, stream: Stream) -> None:
    outdated = [stream.is_outdated]
    for generation in (1, 1, 2):
        pool.generation = generation
        outdated.append(stream.is_outdated)
        await stream.send(item("s"))
    assert outdated == [False, False, False, True], "one that is not open is not outdated"
    assert pool.opened == 1, "it goes on until it is renewed"
    stream.reconnect()
    outdated = [stream.is_outdated]
    await stream.send(item("s"))
    assert [*outdated, stream.is_outdated] == [False, False]
    assert pool.opened == 2


async def test_a_renewed_stream_ends_after_its_requests(pool: Pool, stream: Stream) -> None:
    pool.script = lambda item: [result(item.slice, 1, more=True)]
    first, second = Responses(stream, item("first")), Responses(stream, item("second"))
    for opened in (first, second):
        await opened.next()
    stream.reconnect()
    pool.script = None
    assert (await stream.send(item("after"))).session_id == "after"
    first.request.extend(pb.Extension(limit=9))
    while not (await pool.arrived.get()).extensions:
        pass
    first.request.cancel()
    (given_up,) = (await pool.arrived.get()).cancelled
    assert given_up.session_id == "first"
    assert not pool.ended.is_set()
    second.request.cancel()
    async with asyncio.timeout(30):
        await pool.ended.wait()
    assert (await stream.send(item("again"))).session_id == "again"
    assert pool.opened == 2


async def test_a_broken_renewed_stream_fails_its_own_requests(pool: Pool, stream: Stream) -> None:
    pool.hold = True
    request = asyncio.create_task(stream.send(item("old")))
    await pool.arrived.get()
    stream.reconnect()
    pool.hold = False
    assert (await stream.send(item("new"))).session_id == "new"
    await stream.close()
    with pytest.raises((Unavailable, grpc.aio.AioRpcError)):
        await request


class Ahead(rpc.TargetServicer):
    """A target that sends 40 KiB as fast as the transport takes them."""

    def __init__(self) -> None:
        self.all_sent = asyncio.Event()

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        for _ in range(40):
            yield pb.VerifyStreamResponse(answers=[pb.VerifyAnswer(session_id="s" * 1024)])
        self.all_sent.set()


async def test_a_replica_keeps_most_of_what_its_gateway_has_not_read() -> None:
    ahead, server = Ahead(), grpc.aio.server()  # type: ignore[abstract]  # the calls that are not made
    rpc.add_TargetServicer_to_server(ahead, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", None, (), REPLICA_CHANNEL) as channel:
        call: Any = rpc.TargetStub(channel).VerifyStream()
        await call.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ahead.all_sent.wait(), 0.5)
        for _ in range(39):
            await call.read()
        await asyncio.wait_for(ahead.all_sent.wait(), PATIENCE_S)
    await server.stop(None)
