"""Faults of the gateway's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc

from tests.fakes.world import World, hear, refused


async def test_a_tokenizer_that_fails_ends_the_stream_and_hides_its_cause(world: World) -> None:
    """Whatever raises in the shell: a client must not wait for ever."""

    def fails(ids: Sequence[int]) -> str:
        raise ValueError("cannot decode")

    gateway = await world.gateway()
    cast("Any", gateway.running.service)._streams._decode = fails
    error = await refused(hear(gateway.ask()))
    assert (error.code, error.message) == (grpc.StatusCode.INTERNAL, "internal error")
    await gateway.idle()
