"""A target over the tiny model, served by a real grpc.aio server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc
import pytest
from opentelemetry import trace

from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.server import start_server
from services.target.servicer import TargetService
from services.target.settings import TargetSettings
from services.target.verifier import Verifier
from tests.target.tiny import load_tiny_model, save_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from services.common.batching import Unfinished
    from services.common.server import Parts
    from services.engine.model import CausalModel
    from services.target.engine import EngineInfo, VerifyJob, VerifyOutcome


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(tiny: Path) -> CausalModel:
    return load_tiny_model(tiny)


class Recording:
    """An engine that remembers how its jobs were batched, and waits for `gate` before it computes."""

    def __init__(self, engine: Verifier) -> None:
        self.engine = engine
        self.batches: list[list[str]] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def step(self, jobs: Sequence[VerifyJob]) -> list[VerifyOutcome | Unfinished]:
        self.batches.append([job.slice.key[1] for job in jobs])
        self.begun.release()
        if not self.gate.wait(10):
            raise TimeoutError
        return self.engine.step(jobs)


@pytest.fixture
def engine(model: CausalModel) -> Recording:
    return Recording(Verifier(model, "f00d", max_sessions=10, max_kv_tokens=1024))


@pytest.fixture
async def target(engine: Recording) -> AsyncIterator[rpc.TargetAsyncStub]:
    async def build(server: grpc.aio.Server, parts: Parts) -> TargetService:
        service = TargetService(engine, trace.NoOpTracer(), max_draft_tokens=8, max_waiting=64)
        rpc.add_TargetServicer_to_server(service, server)
        return service

    running = await start_server(TargetSettings(drain_timeout_s=5), build)
    async with grpc.aio.insecure_channel(running.address) as channel:
        yield rpc.TargetStub(channel)
    await running.stop()
