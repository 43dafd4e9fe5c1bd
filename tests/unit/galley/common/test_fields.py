"""The fields of a message are counted before it is parsed: as many as its parser finds, and no further."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from galley.common.wire.fields import check_fields
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.waiting import with_turns

MOST, MOST_NUMBERS_BYTES = 1 << 14, 3 << 18
GENERATE = pb.GenerateRequest.DESCRIPTOR


def fields_in(message: Message) -> int:
    """Count the fields of a message on the wire, but for packed lists of which each is one."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            texts = field.is_repeated and field.cpp_type == field.CPPTYPE_STRING
            count += len(value) if texts else 1
        elif field.message_type.GetOptions().map_entry:
            count += 3 * len(value)
        else:
            parts = value if field.is_repeated else [value]
            count += sum(1 + fields_in(part) for part in parts)
    return count


async def check(message: Message, most: int = MOST) -> None:
    await check_fields(message.SerializeToString(), GENERATE, most, MOST_NUMBERS_BYTES)


_texts = st.text(max_size=200)
_requests = st.builds(
    pb.GenerateRequest,
    model=_texts,
    messages=st.builds(
        pb.ChatMessages,
        messages=st.lists(st.builds(pb.ChatMessage, role=_texts, content=_texts), max_size=5),
    ),
    sampling=st.builds(
        pb.SamplingParams,
        temperature=st.floats(0, 2, width=32),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(st.integers(1, 2**32 - 1), st.floats(1, 2, width=32), max_size=5),
    ),
    stop=st.lists(_texts, max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    priority=st.integers(-(2**31), 2**31 - 1),
)


@seed(1)
@settings(max_examples=60, deadline=None, database=None)
@given(_requests)
def test_the_fields_of_any_message_are_counted(request: Any) -> None:
    count = fields_in(request)
    asyncio.run(check(request, count))
    if count:
        with pytest.raises(ValueError, match=f"at most {count - 1} fields"):
            asyncio.run(check(request, count - 1))


async def test_the_largest_requests_that_are_served_pass() -> None:
    turns = [pb.ChatMessage(role="user", content="x" * 1000) for _ in range(1024)]
    sampling = pb.SamplingParams(seed=7, logit_bias=dict.fromkeys(range(1 << 20, (1 << 20) + 1024), 1.0))
    request = pb.GenerateRequest(sampling=sampling, stop=["y" * 256] * 16, stop_token_ids=range(256))
    request.messages.messages.extend(turns)
    await check(request)
    request.token_ids.ids.extend(range(1 << 18, (1 << 18) + (1 << 18) - 256))
    await check(request)
    request.text = "x" * (4 << 20)
    await check(request)


@pytest.mark.parametrize(
    "data",
    [
        pb.GenerateRequest(
            messages=pb.ChatMessages(messages=[pb.ChatMessage()] * (MOST + 1))
        ).SerializeToString(),
        pb.GenerateRequest(stop=[""] * (MOST + 1)).SerializeToString(),
        b"\x0a\x00" * (MOST + 1),
        b"\xfd\x07\x00\x00\x00\x00" * (MOST + 1),
        b"\x48\x01" * (MOST + 1),
    ],
    ids=["messages", "texts", "one field again", "unknown fields", "numbers that are not packed"],
)
async def test_too_many_fields_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"at most {MOST} fields"):
        await check_fields(data, GENERATE, MOST)
    # What is wrong elsewhere hides none of them from the count: the parser may read them first.
    for wrong in (b"\x1a\xff\xff\x7f", b"\x1a\x04\x0a\x7f\x00\x00", b"\xff" * 20):
        with pytest.raises(ValueError, match=f"at most {MOST} fields"):
            await check_fields(data + wrong, GENERATE, MOST)


async def test_long_lists_of_numbers_are_refused() -> None:
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MOST_NUMBERS_BYTES + 1)))
    stops = pb.GenerateRequest(stop_token_ids=[1] * (MOST_NUMBERS_BYTES // 2 + 1)).SerializeToString()
    for data in (ids.SerializeToString(), stops * 2):
        await check_fields(data, GENERATE, MOST)
        with pytest.raises(ValueError, match=f"at most {MOST_NUMBERS_BYTES} bytes of lists of numbers"):
            await check_fields(data, GENERATE, MOST, MOST_NUMBERS_BYTES)


@pytest.mark.parametrize("data", [b"\xff" * (1 << 16), b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 100, b"\x07"])
async def test_what_is_no_message_is_left_to_the_parser(data: bytes) -> None:
    await check_fields(data, GENERATE, MOST)


async def test_others_get_a_turn_while_fields_are_counted() -> None:
    _, turns = await with_turns(check_fields(b"\x0a\x00" * MOST, GENERATE, MOST))
    assert turns >= MOST // 1024
