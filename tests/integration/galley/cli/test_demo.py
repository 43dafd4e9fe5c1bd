"""The demo's comparison, against a scripted gateway over real gRPC."""

from __future__ import annotations

import io
from collections.abc import Iterator

import grpc
from rich.console import Console

from galley.cli.demo import compare
from galley.client.client import AsyncClient
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SCRIPT, SESSION, FakeChunk, FakeGateway, serving


class Liar(FakeGateway):
    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        plain = request.speculation.mode == pb.Speculation.MODE_OFF
        self.script = (FakeChunk((99,), "Bye"),) if plain else SCRIPT
        return super().Generate(request, context)


async def _compare(gateway: FakeGateway) -> tuple[bool, str]:
    out = io.StringIO()
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            same = await compare(client, Console(file=out, width=100), "Say hello", 32)
    return same, out.getvalue()


async def test_the_answer_and_what_was_measured_are_shown() -> None:
    gateway = FakeGateway()
    same, output = await _compare(gateway)
    assert same
    assert "Say hello" in output
    assert "Hello[, wor]ld!" in output
    rows = {cells[0]: cells[1:] for line in output.splitlines() if len(cells := _cells(line)) == 3}
    assert rows["prompt tokens"] == ["5", "5"]
    assert rows["output tokens"] == ["4", "4"]
    assert rows["rounds"] == ["2", "2"]
    assert rows["drafted"] == rows["verified"] == ["4", "4"]
    assert rows["accepted"] == ["2", "2"]
    assert rows["mean accepted length"] == ["2.00", "2.00"]
    assert rows["time to first token"][0].endswith(" ms")
    assert float(rows["tokens/s"][0]) > 0
    assert float(rows["tokens/s"][1]) > 0
    assert rows["same tokens"][0] == "yes"
    assert f"session {SESSION}, plain {SESSION}" in output


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("│")]


async def test_both_ways_are_warmed_up_before_either_is_measured() -> None:
    gateway = FakeGateway()
    await _compare(gateway)
    calls = [
        (request.speculation.mode, request.max_tokens)
        for request in gateway.requests
        if isinstance(request, pb.GenerateRequest)
    ]
    auto, off = pb.Speculation.MODE_AUTO, pb.Speculation.MODE_OFF
    assert calls == [(auto, 8), (off, 8), (auto, 32), (off, 32)]


async def test_different_tokens_without_speculation_are_reported() -> None:
    same, output = await _compare(Liar())
    assert not same
    assert "NO" in output
