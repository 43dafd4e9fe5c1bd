"""The sink of a telemetry benchmark as a process, and what it has counted from block to block."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from bench.arms import Cpu
from bench.otlp_sink import READ, TOLD
from bench.telemetry_summary import AGAIN, FEW, OFF
from galley.stack.part import PartSpec
from galley.stack.parts import python_module
from galley.stack.stack import Stack, StackOptions

_SINK = "sink"


@asynccontextmanager
async def running_sink() -> AsyncIterator[SinkReader]:
    """Start it, and end it with the context."""
    spec = PartSpec(_SINK, lambda _: python_module("bench.otlp_sink"))
    async with Stack(StackOptions(threads=1), parts=lambda _options, _dirs: [spec]) as stack:
        address = stack.address(_SINK)
        async with grpc.aio.insecure_channel(address) as channel:
            yield SinkReader(address, Cpu([stack.pid(_SINK)]), channel)


class SinkReader:
    """What the sink has counted, from block to block."""

    def __init__(self, address: str, cpu: Cpu, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._cpu = cpu
        self._ask: Any = channel.unary_unary(TOLD)
        self._exports = self._bytes = 0
        self._late = 0

    @property
    def cpu_s(self) -> float:
        """Spent by the sink so far."""
        return self._cpu.seconds()

    async def since(self) -> tuple[int, int]:
        """Exports and bytes since it was asked last."""
        told = json.loads(await self._ask(b""))
        came = told["exports"] - self._exports, told["bytes"] - self._bytes
        self._exports, self._bytes = told["exports"], told["bytes"]
        return came

    async def between_blocks(self) -> None:
        """What has come since the last block came too late to be counted with it."""
        _, late = await self.since()
        self._late += late

    async def of_block(self, arm: str) -> tuple[int, int]:
        """Exports and bytes of the block of an arm that ends now; RuntimeError if it was not traced."""
        if arm in {OFF, AGAIN}:  # what came meanwhile is of a block before
            await self.between_blocks()
            return 0, 0
        exports, size = await self.since()
        if arm != FEW and not size:
            raise RuntimeError(f"{arm} exported nothing: this is not what is to be measured")
        return exports, size

    async def facts(self) -> dict[str, Any]:
        """What the whole run exported."""
        told = json.loads(await self._ask(READ))
        a_span = told["kept_bytes"] / told["kept_spans"] if told.get("kept_spans") else None
        return {
            "exports": told["exports"],
            "exported_bytes": told["bytes"],
            "bytes_per_span": a_span,
            "exported_too_late_to_count": self._late / max(1, told["bytes"]),
        }
