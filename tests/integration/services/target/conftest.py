"""A target over the tiny model, served by a real grpc.aio server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc
import pytest

from galley.common.metrics.registry import Registry
from galley.common.models.grammars import ReplicaGrammars
from galley.common.server.server import Parts, start_server
from galley.common.tracing.light_spans import SpanScope
from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError
from galley.core.step import Draw, Sampled, StepChunk, StepOutcome, StepPlan, StepTrace
from galley.engine.model import CausalModel
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits, TargetEngine
from services.target.engine.vllm.target import VllmTarget
from services.target.servicer import TargetService
from services.target.settings import TargetSettings
from tests.fakes.stepped_core import StubCore
from tests.fakes.tiny_model import VLLM_HEAD_SIZE, load_tiny_model, save_tiny_model
from tests.fakes.vocabularies import ascii_vocabulary
from tests.integration.services.target.vllm.conftest import MARKS, started_core

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

# A step costs the same however many rows it has, so that drafts always pay.
FLAT = StepTimes.measured([(1, 1_000_000), (1024, 1_000_001)])
KV_BLOCKS = 32


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, as vLLM can serve it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), head_size=VLLM_HEAD_SIZE)


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("poisoned"), poisoned=True, head_size=VLLM_HEAD_SIZE)


@pytest.fixture(scope="session")
def loaded(poisoned: Path) -> CausalModel:
    return load_tiny_model(poisoned, kv_blocks=KV_BLOCKS)


class Servable(Protocol):
    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine: ...


class Recording:
    """An engine, and the target that it serves.

    Record passes and wait for `gate` before each; raise `failure` and omit `missing` outcomes once.
    """

    def __init__(self, engine: Servable) -> None:
        self._engine = engine
        self._target: TargetEngine
        self.passes: list[StepPlan] = []
        self.started = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.missing = 0

    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine:
        self._target = self._engine.serve(times, limits)
        return cast("TargetEngine", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def sessions(self) -> list[int]:
        return [len(plan.chunks) for plan in self.passes]

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        self.passes.append(plan)
        self.started.release()
        if not self.gate.wait(10):
            raise TimeoutError
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        missing, self.missing = self.missing, 0
        return self._target.run(plan, watch)[missing:]


class StubVllm:
    """A target over a stub of vLLM's core, which draws what the model draws in one fresh pass."""

    def __init__(self, model: CausalModel, fingerprint: str = "f00d") -> None:
        self._engine = PagedEngine(model, fingerprint)

    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine:
        info = self._engine.info
        core = StubCore(
            blocks=info.kv_blocks,
            block_tokens=info.kv_block_tokens,
            context_window=info.context_window,
            max_rows=limits.max_rows,
            draw=self._draw,
        )
        core.info = replace(info, feature_size=0, feature_layers=0)
        return VllmTarget(core, times, limits)

    def _draw(self, draw: Draw) -> Sampled | GalleyError:
        tokens = [*draw.history, *draw.draft_tokens]
        blocks = range(-(-len(tokens) // self._engine.info.kv_block_tokens))
        chunk = StepChunk(0, tokens, blocks, 1 + len(draw.draft_tokens), draw)
        (outcome,) = self._engine.run(StepPlan((chunk,)))
        assert isinstance(outcome, Sampled | GalleyError)
        return outcome


class RealVllm:
    """A target over vLLM's core, which serves all tests of a module, one after another."""

    def __init__(self, core: VllmCore) -> None:
        self._core = core

    def serve(self, times: StepTimes, limits: Limits) -> TargetEngine:
        return VllmTarget(self._core, times, limits)


@pytest.fixture(scope="module")
def vllm_core(poisoned: Path) -> Iterator[VllmCore]:
    with started_core(poisoned, num_gpu_blocks_override=KV_BLOCKS + 1) as core:  # one is vLLM's own
        core.info = replace(core.info, fingerprint="f00d", deterministic=True)
        yield core


def paged(request: pytest.FixtureRequest) -> Iterator[Servable]:
    yield PagedEngine(request.getfixturevalue("loaded"), "f00d")


def vllm_stub(request: pytest.FixtureRequest) -> Iterator[Servable]:
    yield StubVllm(request.getfixturevalue("loaded"))


def vllm(request: pytest.FixtureRequest) -> Iterator[Servable]:
    core: VllmCore = request.getfixturevalue("vllm_core")
    yield RealVllm(core)
    core.end(list(core._requests))
    core.reset_prefix_cache()
    core.facts()


# For tests of blocks or row budgets that the scheduler divides, which other engines do themselves.
pages = pytest.mark.parametrize("engine", [paged], indirect=True)
# For tests of long prompts: the limits bound the rows of a step, which those of vLLM's core do not.
limited = pytest.mark.parametrize("engine", [paged, vllm_stub], indirect=True)


@pytest.fixture(params=[paged, vllm_stub, pytest.param(vllm, marks=MARKS)])
def engine(request: pytest.FixtureRequest) -> Iterator[Recording]:
    yield from map(Recording, request.param(request))


@pytest.fixture
def limits() -> Limits:
    return Limits(max_draft_tokens=8, max_waiting=64, max_sessions=10)


@pytest.fixture
def spans() -> SpanScope | None:
    return None


@pytest.fixture
def registry() -> Registry | None:
    return None


@pytest.fixture
async def service(
    engine: Recording, limits: Limits, spans: SpanScope | None, registry: Registry | None
) -> AsyncIterator[Served]:
    served = Served(engine, limits, spans, registry)
    await served.start()
    yield served
    await served.stop()


class Served:
    def __init__(
        self,
        engine: Servable,
        limits: Limits,
        spans: SpanScope | None,
        registry: Registry | None = None,
        grammars: Callable[[], ReplicaGrammars | None] = lambda: ReplicaGrammars(ascii_vocabulary()),
    ) -> None:
        self._spans = spans
        self._grammars = grammars
        self._registry = registry
        self._engine = engine
        self._limits = limits

    async def start(self) -> None:
        async def build(server: grpc.aio.Server, parts: Parts) -> TargetService:
            engine = self._engine.serve(FLAT, self._limits)
            service = TargetService(engine, self._spans, parts.metrics, grammars=self._grammars())
            rpc.add_TargetServicer_to_server(service, server)
            return service

        parts = Parts(metrics=self._registry)
        self.running = await start_server(TargetSettings(drain_timeout_s=5), build, parts)

    async def stop(self) -> None:
        await self.running.stop()


@pytest.fixture
async def target(service: Served) -> AsyncIterator[rpc.TargetAsyncStub]:
    async with grpc.aio.insecure_channel(service.running.address) as channel:
        yield rpc.TargetStub(channel)
