"""Messages that are too large, truncated, gzip bombs, deeply nested, or made of many empty parts."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from galley.client.errors import rpc_error
from galley.common.server.deserialize import decompress
from galley.common.wire.fields import varint
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.attack.floods import KEY, gzip_bomb, gzip_bombs
from tests.attack.stack import MAX_MESSAGE_BYTES, MIB, SERVICES, Attacked, hello, unharmed
from tests.fakes.http2 import END_STREAM, Kind, frame, message, opening, wire
from tests.fakes.waiting import PATIENCE_S

GENERATE = "/galley.v1.Generation/Generate"
METHODS = {
    "gateway": ("/galley.v1.Generation/GetModelInfo", "GetModelInfoRequest"),
    "target": ("/galley.v1.Target/Verify", "VerifyRequest"),
    "draft": ("/galley.v1.Draft/Propose", "ProposeRequest"),
    "collector": (
        "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        "ExportTraceServiceRequest",
    ),
}


async def answer(
    stack: Attacked, service: str, data: bytes, compression: grpc.Compression = grpc.Compression.NoCompression
) -> Any:
    path, _ = METHODS[service]
    unlimited = [("grpc.max_send_message_length", -1)]
    address = stack.addresses[service]
    async with grpc.aio.insecure_channel(address, options=unlimited, compression=compression) as channel:
        call: Any = channel.unary_unary(path)
        try:
            return await call(data, metadata=KEY, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return rpc_error(error)


async def test_too_large_request_is_refused(stack: Attacked) -> None:
    async with unharmed(stack):
        for service in SERVICES:
            error = await answer(stack, service, b"\x0a" * (MAX_MESSAGE_BYTES + 1))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            bound = f"must be at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 1}"
            assert error.violations == ((METHODS[service][1], bound),)
            for size in (2 * MAX_MESSAGE_BYTES + 1, 4 * MIB):
                refused = await answer(stack, service, bytes(size))
                assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_gzip_bomb_is_inflated_up_to_the_message_limit(stack: Attacked) -> None:
    data = gzip_bomb(60 * MIB)
    assert len(data) < MAX_MESSAGE_BYTES
    stack.forget_peak()
    async with unharmed(stack) as before:
        for service in SERVICES:
            for status, error in await gzip_bombs(stack.addresses[service], METHODS[service][0], data, 10):
                assert status == "3"
                assert "got more when inflated" in error
    assert stack.peak_rss() - before.rss < 48 * MIB


async def test_gzip_requests_are_served_and_other_compression_refused(stack: Attacked) -> None:
    request = pb.GetModelInfoRequest(model="sim" * 500).SerializeToString()
    async with unharmed(stack):
        plain = await answer(stack, "gateway", request)
        assert vars(await answer(stack, "gateway", request, grpc.Compression.Gzip)) == vars(plain)
        error = await answer(stack, "gateway", request, grpc.Compression.Deflate)
        assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_gzip_is_read_whole_within_its_bound_or_not_at_all() -> None:
    assert await decompress(gzip.compress(b"x" * 100), 100) == b"x" * 100
    assert await decompress(b"plain", 5) == b"plain"
    for data in (b"x" * 3 * MIB, random.Random(1).randbytes(3 * MIB)):
        assert await decompress(gzip.compress(data), 4 * MIB) == data
    for data, most, problem in (
        (gzip.compress(b"x" * 101), 100, "at most 100 bytes, got more when inflated"),
        (b"plain.", 5, "at most 5 bytes, got 6"),
        (gzip.compress(b"x")[:-4], 100, "one complete gzip member, got a truncated one"),
        (gzip.compress(b"x") * 2, 100, "one complete gzip member, .* or data after its end"),
        (gzip.compress(b"x") + bytes(MIB), 2 * MIB, "one complete gzip member, .* or data after its end"),
        (b"\x1f\x8b", 100, "one complete gzip member"),
        (b"\x1f\x8bnothing of the kind", 100, "well-formed gzip"),
    ):
        with pytest.raises(ValueError, match=problem):
            await decompress(data, most)


async def test_messages_of_a_wrong_length_end_with_their_connection(stack: Attacked) -> None:
    sent: Sequence[bytes] = (
        b"",
        b"\0\0",
        message(b"ab", length=50),
        message(b"ab", length=1),
        message(b"ab", length=2**32 - 1),
        message(b"ab", compressed=1),
        message(b"ab", compressed=255),
        message(b"") * 3,
    )
    async with unharmed(stack):
        for service in SERVICES:
            async with wire(stack.addresses[service]) as attacker:
                await attacker.begin()
                for stream, data in zip(range(1, 99, 2), sent, strict=False):
                    last = frame(Kind.DATA, END_STREAM, stream, data)
                    await attacker.send(opening(stream, METHODS[service][0], KEY), last)
                assert await attacker.status(9) == "8"  # 4 GiB
                assert await attacker.status(11) == "13"
                assert await attacker.alive()


async def test_endless_messages_take_bounded_memory_each(stack: Attacked) -> None:
    streams = 60
    stack.forget_peak()
    piece = bytes(16_000)
    async with unharmed(stack) as before, wire(stack.gateway) as attacker:
        await attacker.begin()
        for stream in range(1, 2 * streams, 2):
            prefix = message(b"", length=2 * MAX_MESSAGE_BYTES)
            await attacker.send(opening(stream, GENERATE), frame(Kind.DATA, 0, stream, prefix))
        for _ in range(12):
            await attacker.send(*(frame(Kind.DATA, 0, stream, piece) for stream in range(1, 2 * streams, 2)))
        await attacker.alive()
    assert stack.peak_rss() - before.rss < 32 * MIB + streams * 2 * MAX_MESSAGE_BYTES


async def test_message_of_many_empty_parts_is_refused_cheaply(stack: Attacked) -> None:
    parts = MAX_MESSAGE_BYTES // 2
    stack.forget_peak()
    async with unharmed(stack) as before:
        for service in ("target", "draft"):
            error = await answer(stack, service, b"\x0a\x00" * parts)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.violations == (("items", f"must have at most 1024 entries, got {parts}"),)
    assert stack.peak_rss() - before.rss < 64 * MIB


@pytest.mark.parametrize("field", ["items", "cancelled", "extensions"])
async def test_stream_message_of_many_empty_parts_ends_it(stack: Attacked, field: str) -> None:
    tag = bytes([pb.VerifyStreamRequest.DESCRIPTOR.fields_by_name[field].number << 3 | 2, 0])
    parts = MAX_MESSAGE_BYTES // 2
    most = 1024 if field == "items" else 1 << 14
    async with unharmed(stack):
        for service in ("target",) if field == "extensions" else ("target", "draft"):
            error = await stream_end(stack.addresses[service], service, tag * parts)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.violations == ((field, f"must have at most {most} entries, got {parts}"),)


async def stream_end(address: str, service: str, data: bytes) -> Any:
    path = "/galley.v1.Target/VerifyStream" if service == "target" else "/galley.v1.Draft/ProposeStream"
    async with grpc.aio.insecure_channel(address) as channel:
        open_stream: Any = channel.stream_stream(path)
        try:
            return await open_stream(iter([data])).read()
        except grpc.RpcError as error:
            return rpc_error(error)


async def test_too_deep_nesting_is_invalid_argument(stack: Attacked) -> None:
    deep = b""
    for _ in range(4000):
        deep = b"\x0a" + varint(len(deep)) + deep  # ArrayValue.values
        deep = b"\x2a" + varint(len(deep)) + deep  # AnyValue.array_value
    value = b"\x12" + varint(len(deep)) + deep  # KeyValue.value
    for number in (1, 1, 1):  # attributes, resource, resource_spans
        value = bytes([number << 3 | 2]) + varint(len(value)) + value
    async with unharmed(stack):
        error = await answer(stack, "collector", value[:MAX_MESSAGE_BYTES])
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        ((_, problem),) = error.violations
        assert "well-formed" in problem


async def test_a_call_that_is_served_still_is(stack: Attacked) -> None:
    async with unharmed(stack), grpc.aio.insecure_channel(stack.gateway) as channel:
        call: Any = channel.unary_stream(GENERATE)
        async with asyncio.timeout(PATIENCE_S):
            events = [event async for event in call(hello().SerializeToString(), metadata=KEY)]
        assert len(events) > 2
