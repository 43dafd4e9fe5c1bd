"""A gateway that leaves under load: each of its streams ends in order, or goes on at another."""

from __future__ import annotations

import asyncio

import grpc

from galley.client.client import GalleyRpcError, TokenStream
from tests.fakes.world import Gateway, Heard, World, any_credit, must_be_true

STREAMS = 16
SHORT, LONG = 20, 400


async def to_its_end(stream: TokenStream, heard: Heard, staying: Gateway) -> bool:
    """Whether the stream had to go on at the other gateway; nothing but a hand-over may end it early."""
    try:
        await heard.listen(stream)
    except GalleyRpcError as error:
        code, message = error.code, error.message
    else:
        return False
    assert code is grpc.StatusCode.UNAVAILABLE, message
    assert "resume at another" in message
    await heard.listen(staying.client.resume_stream(stream))
    return True


@any_credit
async def test_no_stream_fails_where_a_gateway_drains_under_load(world: World) -> None:
    leaving, staying = await world.gateway(draft="none", drain_timeout_s=4), await world.gateway()
    world.target.pass_s = 0.02  # the short ones end within 0.7 s, the long ones not within 8 s
    lengths = [(SHORT, LONG)[number % 2] + number for number in range(STREAMS)]
    streams = [leaving.ask(max_tokens=length, seed=length) for length in lengths]
    everyone = [Heard() for _ in streams]
    for stream, heard in zip(streams, everyone, strict=True):
        heard.hear(await anext(stream))
    reading = [
        asyncio.create_task(to_its_end(stream, heard, staying))
        for stream, heard in zip(streams, everyone, strict=True)
    ]
    await leaving.running.stop()
    world.target.pass_s = 0
    handed_over = await asyncio.gather(*reading)
    for heard, length in zip(everyone, lengths, strict=True):
        must_be_true(heard, length, seed=length)
    assert True in handed_over
    assert False in handed_over
    await leaving.idle()
