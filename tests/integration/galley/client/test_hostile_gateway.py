"""Gateways that break the protocol: the client ends with an error that names the problem, and never hangs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from galley.client import streams
from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.options import Retries
from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SESSION, FakeGateway, serving
from tests.fakes.waiting import PATIENCE_S

SOON = Retries(patience_s=0.5, start_patience_s=0.5, first_pause_s=0.01)
STARTED = pb.StreamEvent(started=pb.Started(session_id=SESSION))


@dataclass
class Hostile(FakeGateway):
    """Send `events`, then end the stream; with `hang`, hold it open; with `error`, break it."""

    events: Iterable[pb.StreamEvent] = ()

    def _events(
        self, next_index: int, context: grpc.ServicerContext, max_tokens: int | None = None
    ) -> Iterator[pb.StreamEvent]:
        context.add_callback(self.cancelled.set)
        yield from self.events
        self._maybe_fail(0, context)


def chunk(index: int, *token_ids: int, text: str = "x") -> pb.StreamEvent:
    return pb.StreamEvent(chunk=pb.Chunk(index=index, token_ids=token_ids, text=text))


def finished(output_tokens: int) -> pb.StreamEvent:
    usage = pb.Usage(output_tokens=output_tokens)
    return pb.StreamEvent(finished=pb.Finished(reason=pb.Finished.REASON_STOP, usage=usage))


async def read(stream: AsyncStream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for _ in stream:
            pass


async def problem_of(gateway: FakeGateway, retries: Retries = NO_RETRIES) -> GalleyRpcError:
    with serving(gateway) as address:
        async with AsyncClient(address, retries=retries) as client:
            with pytest.raises(GalleyRpcError) as caught:
                await read(client.stream("x", max_tokens=4))
    return caught.value


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([STARTED, chunk(0, 1, 2), chunk(1, 2)], "continued at token 1, not at 2"),
        ([STARTED, chunk(3, 1)], "continued at token 3, not at 0"),
        ([STARTED, chunk(0, 1, 2, 3), chunk(3, 4, 5)], "sent 5 tokens, 4 were asked for"),
        ([STARTED, chunk(0, 1), finished(3)], "finished after 3 tokens, of which it sent 1"),
        ([STARTED, chunk(0, 1)], "ended the stream before the answer"),
        ([], "ended the stream before the answer"),
        ([STARTED, chunk(0, 1, text="x" * (5 << 20))], "larger than max"),
    ],
    ids=["backwards", "skipped", "too many", "some withheld", "no end", "nothing", "huge text"],
)
async def test_a_broken_answer_is_an_error(events: list[pb.StreamEvent], problem: str) -> None:
    assert problem in (await problem_of(Hostile(events=events))).message


@pytest.mark.parametrize(
    "make",
    [
        lambda: STARTED,
        lambda: chunk(0),
        lambda: chunk(0, text=""),
        lambda: pb.StreamEvent(numerics_changed=pb.NumericsChanged(index=0, fingerprint="f")),
        pb.StreamEvent,
    ],
    ids=["started", "text", "empty chunk", "numerics changed", "unknown to this version"],
)
async def test_events_without_tokens_do_not_go_on_for_ever(make: Callable[[], pb.StreamEvent]) -> None:
    events = itertools.chain([STARTED], itertools.repeat(make()))
    assert "events without a token" in (await problem_of(Hostile(events=events))).message


async def test_chunks_without_tokens_do_not_renew_the_patience() -> None:
    gateway = Hostile(events=[STARTED, chunk(0)], error=Unavailable("again"))
    problem = await problem_of(gateway, SOON)
    assert problem.message == "again"
    assert 2 < len(gateway.requests) < 12, "the pauses grow"


@pytest.fixture
def waits_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_END_WAIT_S", 0.1)


@pytest.mark.usefixtures("waits_briefly")
async def test_a_finished_answer_is_complete_though_its_stream_never_ends() -> None:
    gateway = Hostile(events=[STARTED, chunk(0, 1), finished(1)], hang=True)
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x")
            await read(stream)
            assert await asyncio.to_thread(gateway.cancelled.wait, PATIENCE_S), "the call stays open"
    assert stream.tokens == [1]


@pytest.mark.usefixtures("waits_briefly")
async def test_what_follows_the_end_is_not_delivered() -> None:
    events = itertools.chain([STARTED, chunk(0, 1), finished(1)], itertools.repeat(chunk(1, 2)))
    with serving(Hostile(events=events)) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x")
            await read(stream)
    assert stream.tokens == [1]
