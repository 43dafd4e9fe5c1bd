"""Each call leaves one line in the log: how it finished, or why it was rejected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from services.gateway.auth.authentication import KEY_NEEDED
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT,
    PROMPT_TOKENS,
    Gateway,
    Received,
    World,
    must_be_true,
    receive,
    refused,
)
from tests.integration.services.gateway.callers import ALICE, KeyFile, calling

FINISHED = "call finished"
SERVICE = "galley.v1.Generation"
BOUND = "max_tokens: must be in [1, 65535] (context window: 65536 tokens)"


class Lines:
    def __init__(self, captured: list[Any]) -> None:
        self._captured = captured

    def __repr__(self) -> str:
        return repr(self._captured)

    def of(self, event: str) -> list[Any]:
        return [line for line in self._captured if line["event"] == event]

    async def one(self, event: str) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while not self.of(event):  # noqa: ASYNC110  # nothing tells when a line is written
                await asyncio.sleep(0)
        [line] = self.of(event)
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs(processors=[merge_contextvars]) as captured:
        yield Lines(captured)


async def test_a_finished_stream_is_logged_with_its_figures(
    world: World, gateway: Gateway, lines: Lines
) -> None:
    stream = gateway.generate()
    must_be_true(await receive(stream))
    line = await lines.one(FINISHED)
    assert line["log_level"] == "info"
    assert line["session_id"] == stream.session_id
    assert (line["reason"], line["status"]) == ("length", "ok")
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(PROMPT_TOKENS), MAX_TOKENS)
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert 0 < line["accepted"] < MAX_TOKENS
    assert line["principal"] == "anonymous"
    assert (line["method"], line["model"]) == (f"{SERVICE}/Generate", "tiny")
    assert line["rounds"] == len(world.target.calls)
    assert "error" not in line
    assert "field" not in line


async def test_a_stream_whose_client_left_is_logged_once(world: World, lines: Lines) -> None:
    gateway = await world.gateway()
    world.target.gate.close_after(2)
    stream = gateway.generate()
    await Received().listen(stream, until=1)
    stream.cancel()
    await gateway.idle()
    line = await lines.one(FINISHED)
    assert (line["status"], line["reason"]) == ("cancelled", "")
    assert (line["session_id"], line["log_level"]) == (stream.session_id, "info")


async def test_a_failed_stream_is_logged_with_its_error(world: World, gateway: Gateway, lines: Lines) -> None:
    world.target.gate.close()
    assert (await refused(receive(gateway.generate(timeout_s=1.0)))).code is grpc.StatusCode.DEADLINE_EXCEEDED
    line = await lines.one(FINISHED)
    assert (line["status"], line["error"]) == ("deadline_exceeded", "the deadline of the call has passed")
    assert (line["ttft_ms"], line["output_tokens"]) == (None, 0)


async def test_rejected_calls_are_logged_without_their_content(world: World, lines: Lines) -> None:
    gateway = await world.gateway(api_keys_file=KeyFile().write(world))
    await refused(receive(gateway.generate()))
    async with calling(gateway, ALICE) as alice:
        await refused(receive(alice.generate(max_tokens=0)))
        await refused(receive(alice.client.resume("0" * 32, 0)))
        await refused(alice.client.abort("no id"))
        await refused(alice.client.model_info("other"))
        await alice.client.model_info()
    told = ("method", "status", "field", "principal", "error")
    facts = [tuple(line.get(fact) for fact in told) for line in lines.of(FINISHED)]
    unknown = f"session_id: no session {'0' * 32!r}"
    assert facts == [
        (f"{SERVICE}/Generate", "unauthenticated", None, "unknown", KEY_NEEDED),
        (f"{SERVICE}/Generate", "invalid_argument", "max_tokens", "key", BOUND),
        (f"{SERVICE}/Resume", "not_found", None, "key", unknown),
        (f"{SERVICE}/Abort", "not_found", None, "key", "session_id: no session 'no id'"),
        (f"{SERVICE}/GetModelInfo", "invalid_argument", "model", "key", "model: must be 'tiny' or empty"),
        (f"{SERVICE}/GetModelInfo", "ok", None, "key", None),
    ]
    assert all(line["duration_ms"] >= 0 for line in lines.of(FINISHED))
    assert PROMPT not in repr(lines)


async def test_a_call_without_a_place_is_logged_with_the_reason(world: World, lines: Lines) -> None:
    gateway = await world.gateway(max_sessions=1)
    world.target.gate.close()
    stream = gateway.generate()
    await world.target.called(1)
    await refused(receive(gateway.generate()))
    line = await lines.one(FINISHED)
    assert (line["status"], line["reason"], line["model"]) == ("resource_exhausted", "streams", "tiny")
    world.target.gate.open()
    must_be_true(await receive(stream))
