"""The Python client against a scripted gateway over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import grpc
import pytest

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.errors import BadKey, NotFoundError
from galley.client.options import Message, Speculation
from galley.core.audit import AuditCounts, AuditReport, Difference, Verdict
from galley.core.content import prefix_hash
from galley.core.errors import InvalidField, Overloaded, Unavailable, UnknownSession
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SESSION, FakeGateway, serving


async def _text(stream: AsyncIterator[pb.StreamEvent]) -> str:
    return "".join([event.chunk.text async for event in stream])


@contextlib.asynccontextmanager
async def client_of(gateway: FakeGateway, **options: Any) -> AsyncIterator[AsyncClient]:
    with serving(gateway) as address:
        async with AsyncClient(address, **options) as client:
            yield client


def generate_request_of(gateway: FakeGateway) -> pb.GenerateRequest:
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    return request


async def test_events_come_in_order_and_the_stream_keeps_the_tokens() -> None:
    async with client_of(FakeGateway()) as client:
        stream = client.stream("Say hello")
        events = [event.WhichOneof("event") async for event in stream]
    assert events == ["started", "chunk", "chunk", "chunk", "finished"]
    assert stream.tokens == [11, 12, 13, 14]
    assert stream.finished is not None
    assert stream.resume_from() == (SESSION, 4, prefix_hash([11, 12, 13, 14]))


@pytest.mark.parametrize("key", ["sec\nret", "secrét", "sec\0ret"])
async def test_key_that_cannot_be_sent_is_refused_without_showing_it(
    key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = FakeGateway()

    async def generate(client: AsyncClient) -> None:
        await _text(client.stream("x"))

    async def model_info(client: AsyncClient) -> None:
        await client.model_info()

    async with client_of(gateway, api_key=key) as client:
        for call in (generate, model_info):
            with pytest.raises(BadKey, match="printable ASCII") as raised:
                await call(client)
            assert "sec" not in str(raised.value)
    assert gateway.requests == []
    assert "Metadata" not in capfd.readouterr().err


async def test_options_left_out_are_not_sent() -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as client:
        await _text(client.stream("x", temperature=None, max_tokens=None, idempotency_key="key"))
    assert generate_request_of(gateway) == pb.GenerateRequest(
        text="x",
        sampling=pb.SamplingParams(),
        use_default_sampling=True,
        speculation=pb.Speculation(mode=pb.Speculation.MODE_AUTO),
        idempotency_key="key",
    )


async def test_options_reach_the_wire() -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as client:
        stream = client.stream(
            [Message("system", "Be brief."), Message("user", "Hi")],
            temperature=0.0,
            top_k=0,
            seed=2**64 - 1,
            logit_bias={7: -1.5},
            stop=["a", "b"],
            logprobs=0,
            max_tokens=3,
            speculation=Speculation(k=0, strategy="ngram"),
            idempotency_key="key",
            timeout_s=60.0,
        )
        await _text(stream)
    turns = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
    assert generate_request_of(gateway) == pb.GenerateRequest(
        messages=pb.ChatMessages(messages=turns),
        sampling=pb.SamplingParams(temperature=0.0, top_k=0, seed=2**64 - 1, logit_bias={7: -1.5}),
        use_default_sampling=True,
        stop=["a", "b"],
        logprobs=0,
        max_tokens=3,
        speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=0, strategy="ngram"),
        idempotency_key="key",
    )
    assert gateway.deadline_s == pytest.approx(60, abs=10)


@pytest.mark.parametrize(
    ("speculation", "mode"),
    [
        (Speculation(), pb.Speculation.MODE_AUTO),
        (Speculation(off=True), pb.Speculation.MODE_OFF),
        (Speculation(strategy="model"), pb.Speculation.MODE_FIXED),
        (Speculation(width=2), pb.Speculation.MODE_FIXED),
    ],
)
async def test_speculation_modes(speculation: Speculation, mode: pb.Speculation.Mode.ValueType) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as client:
        await _text(client.stream([1, 2], speculation=speculation))
    assert list(generate_request_of(gateway).token_ids.ids) == [1, 2]
    assert generate_request_of(gateway).speculation.mode == mode


async def test_mixed_prompt_is_refused() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="got messages and token ids"):
            client.stream([Message("user", "Hi"), 1])  # type: ignore[arg-type]  # that is the point


async def test_a_refusal_names_the_field() -> None:
    gateway = FakeGateway(error=InvalidField("sampling.top_p", "must be in (0, 1], is 2"))
    async with client_of(gateway) as client:
        with pytest.raises(GalleyRpcError) as caught:
            await _text(client.stream("x", top_p=2.0))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.violations == (("sampling.top_p", "must be in (0, 1], is 2"),)
    assert str(caught.value) == "INVALID_ARGUMENT: sampling.top_p: must be in (0, 1], is 2"


async def test_overload_has_a_retry_time() -> None:
    async with client_of(FakeGateway(error=Overloaded("too many open sessions", 1.5), silent=True)) as client:
        with pytest.raises(GalleyRpcError, match=r"retry after 1\.5 s") as caught:
            await _text(client.stream("x"))
    assert caught.value.retry_after_s == 1.5


async def test_resume_without_retries() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=2)
    async with client_of(gateway, retries=NO_RETRIES) as client:
        first = client.stream("x")
        text, error = await _until_broken(first)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        gateway.error = None
        second = client.resume_stream(first)
        text += await _text(second)
    assert text == "Hello, world!\n"
    assert second.tokens == [11, 12, 13, 14]
    request = gateway.requests[1]
    assert request == pb.ResumeRequest(session_id=SESSION, next_index=3, seen_hash=prefix_hash([11, 12, 13]))


async def _until_broken(stream: AsyncStream) -> tuple[str, GalleyRpcError]:
    text = ""
    try:
        async for event in stream:
            text += event.chunk.text
    except GalleyRpcError as error:
        return text, error
    raise AssertionError("the stream did not break")


async def test_resume_without_earlier_tokens_sends_no_hash() -> None:
    async with client_of(FakeGateway()) as client:
        stream = client.resume(SESSION, 1)
        assert stream.resume_from() == (SESSION, 1, b"")
        assert await _text(stream) == ", world!\n"
        assert stream.resume_from() == (SESSION, 4, b"")


async def test_cancelling_the_reader_cancels_the_call() -> None:
    gateway = FakeGateway(hang=True, fail_at=1)
    async with client_of(gateway) as client:
        stream = client.stream("x")
        assert (await anext(stream)).HasField("started")
        assert (await anext(stream)).chunk.text == "Hello"
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(gateway.cancelled.wait, 10)


async def test_abort_and_model_info() -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as client:
        await client.abort(SESSION)
        assert (await client.model_info()).model == "tiny"
        gateway.error = UnknownSession("nobody")
        with pytest.raises(GalleyRpcError) as caught:
            await client.abort("nobody")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(GalleyRpcError):
            await client.model_info()
    assert gateway.requests[0] == pb.AbortRequest(session_id=SESSION)


AUDIT = pb.AuditResponse(
    verdict=pb.AuditResponse.VERDICT_DIFFERS,
    output_tokens=9,
    compared=8,
    differing=2,
    differences=[
        pb.AuditDifference(
            index=3, logged_token_id=5, computed_token_id=6, logged_logprob=-0.75, computed_logprob=0.0
        ),
        pb.AuditDifference(index=7, logged_token_id=1, computed_token_id=2),
    ],
    fingerprint="build-1",
    deterministic=True,
)


async def test_an_audit_is_reported_as_the_gateway_says() -> None:
    gateway = FakeGateway(audit=AUDIT)
    async with client_of(gateway) as client:
        report = await client.audit(SESSION)
    assert report == AuditReport(
        session_id=SESSION,
        verdict=Verdict.DIFFERS,
        output_tokens=9,
        compared=8,
        differing=2,
        differences=(Difference(3, 5, 6, -0.75, 0.0), Difference(7, 1, 2)),
        fingerprint="build-1",
        deterministic=True,
    )
    assert gateway.requests == [pb.AuditRequest(session_id=SESSION)]


@pytest.mark.parametrize("name", pb.AuditResponse.Verdict.keys())
async def test_each_verdict_is_known_and_an_unknown_one_compares_nothing(name: str) -> None:
    gateway = FakeGateway(audit=pb.AuditResponse(verdict=pb.AuditResponse.Verdict.Value(name)))
    async with client_of(gateway) as client:
        verdict = (await client.audit(SESSION)).verdict
    known = name.removeprefix("VERDICT_")
    assert verdict is (Verdict.NOT_COMPARED if known == "UNSPECIFIED" else Verdict[known])


async def test_totals_of_audits() -> None:
    counts = AuditCounts(sessions=1, tokens=2, differing=3, loose_tokens=4, loose_differing=5, damaged=6)
    gateway = FakeGateway(audit_counts=pb.GetAuditCountsResponse(**asdict(counts)))
    async with client_of(gateway) as client:
        assert await client.audit_counts() == counts


async def test_an_audit_of_no_session_is_refused() -> None:
    async with client_of(FakeGateway(error=UnknownSession("nobody"))) as client:
        with pytest.raises(NotFoundError, match="no session 'nobody'"):
            await client.audit("nobody")
        with pytest.raises(GalleyRpcError):
            await client.audit_counts()
