"""Real services in this process, over real gRPC: a gateway, targets and a draft of the tiny model.

What they tell is kept: their traces as `galley trace` would find them in a file, and their metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream
from galley.common.metrics.labels import DRAFT, GATEWAY, TARGET
from galley.common.metrics.metric import Metric
from galley.common.metrics.registry import Registry
from galley.common.models.files import tokenizer_hash
from galley.common.models.grammars import ReplicaGrammars, load_grammars
from galley.common.server.server import Parts, RunningServer, start_server
from galley.core.names import MODEL
from galley.core.step import StepOutcome, StepPlan, StepTrace
from galley.engine.model import CausalModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.trace.read.build import stories_of
from galley.trace.read.library import find
from galley.trace.read.model import Story
from galley.trace.read.otlp_file import Lines, OtlpFile
from services.draft.loop import DraftLoop
from services.draft.servicer import DraftService
from services.draft.settings import DraftSettings
from services.draft.strategies.base import DraftJob, Proposal
from services.draft.strategies.model import ModelSteps, ModelStrategy
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings, Tuning
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService
from services.target.settings import TargetSettings
from tests.fakes.readings import histogram, number
from tests.fakes.spans import KeptSpans
from tests.fakes.tiny_model import STOP, VOCAB, load_tiny_model
from tests.fakes.world import Gateway
from tests.integration.services.target.conftest import FLAT, KV_BLOCKS, Recording, Servable

_DRAIN_S = 5


def paged(model: CausalModel) -> Servable:
    return PagedEngine(model, "f00d")


class Priced(Recording):
    pass_s = row_s = company_s = 0.0

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        time.sleep(self.pass_s + self.row_s * plan.rows + self.company_s * (len(plan.chunks) - 1))
        return super().run(plan, watch)


class Stumbling:
    def __init__(self, inner: ModelStrategy) -> None:
        self._inner = inner
        self._steps = 0
        self.stumbles_at = 0
        self.stumble_s = 0.0

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return self._inner.begin(jobs)

    def advance(self, guesses: Sequence[Proposal]) -> None:
        self._steps += 1
        if self._steps == self.stumbles_at:
            time.sleep(self.stumble_s)
        self._inner.advance(guesses)


@dataclass(frozen=True)
class RealTarget:
    running: RunningServer
    engine: Priced

    @property
    def address(self) -> str:
        return self.running.address

    async def die(self) -> None:
        await self.running._servers[0].stop(None)


class Real:
    def __init__(
        self,
        directory: Path,
        tiny: Path,
        store: str,
        *,
        engines: Sequence[Callable[[CausalModel], Servable]] = (paged,),
        drafts: bool = False,
        **given: Any,
    ) -> None:
        self._tiny = tiny
        self._store = store
        self._given = given
        self._engines = engines
        self._file = directory / "traces.jsonl"
        self._registries = {name: [Registry(name)] for name in (GATEWAY, DRAFT)}
        self._registries[TARGET] = [Registry(TARGET) for _ in engines]
        self.kept = KeptSpans()
        self.targets: list[RealTarget] = []
        self.strategy = Stumbling(ModelStrategy(ModelSteps(load_tiny_model(tiny, kv_blocks=64))))
        self.draft_address = "" if drafts else "none"
        self.gateway: Gateway

    def generate(self, prompt: Sequence[int], **options: Any) -> AsyncStream:
        fields = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **options}
        return self.gateway.client.stream(list(prompt), **fields)

    def total(self, metric: Metric, *labels: str) -> float:
        registries = [registry for name in metric.services for registry in self._registries[name]]
        read = [registry for registry in registries if metric in registry.metrics]
        if metric.buckets:
            return sum(histogram(registry, metric, *labels).total for registry in read)
        return sum(number(registry, metric, *labels) for registry in read)

    def story(self, stream: AsyncStream) -> Story:
        file = OtlpFile(self._file)
        file.append(encode_spans(self.kept.spans))
        file.close()
        result = find(Lines(self._file), stream.session_id)
        [story] = stories_of(result.spans, result.session_id, result.index.sessions_of, cut=result.cut)
        return story

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for registry, engine in zip(self._registries[TARGET], self._engines, strict=True):
                self.targets.append(await self._target(registry, engine))
                opened.push_async_callback(self.targets[-1].running.stop)
                opened.callback(self.targets[-1].engine.gate.set)
            if not self.draft_address:
                draft = await start_server(
                    DraftSettings(drain_timeout_s=_DRAIN_S),
                    self._build_draft,
                    self._parts(DRAFT),
                )
                self.draft_address = draft.address
                opened.push_async_callback(draft.stop)
            parts = self._parts(GATEWAY)
            gateway = await self._gateway(parts)
            opened.push_async_callback(gateway.stop)
            client = await opened.enter_async_context(AsyncClient(gateway.address, retries=NO_RETRIES))
            self.gateway = Gateway(gateway, client, parts.addresses.get("http", ""))
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    def _grammars(self) -> ReplicaGrammars | None:
        return load_grammars(self._tiny, VOCAB, [STOP])

    def _parts(self, service: str) -> Parts:
        return self.kept.parts(service, self._registries[service][0])

    async def _target(self, registry: Registry, make: Callable[[CausalModel], Servable]) -> RealTarget:
        engine = Priced(make(load_tiny_model(self._tiny, kv_blocks=KV_BLOCKS)))

        async def build_target(server: grpc.aio.Server, parts: Parts) -> TargetService:
            spans = parts.telemetry.scope("target")
            target = engine.serve(FLAT, Limits(max_sessions=16))
            service = TargetService(target, spans, parts.metrics, grammars=self._grammars())
            rpc.add_TargetServicer_to_server(service, server)
            return service

        settings = TargetSettings(drain_timeout_s=_DRAIN_S)
        return RealTarget(
            await start_server(settings, build_target, self.kept.parts(TARGET, registry)), engine
        )

    async def _build_draft(self, server: grpc.aio.Server, parts: Parts) -> DraftService:
        info = pb.GetDraftInfoResponse(
            model="tiny",
            tokenizer_hash=tokenizer_hash(self._tiny),
            strategies=[MODEL],
            default_strategy=MODEL,
            max_draft_tokens=16,
            vocab_size=VOCAB,
        )
        spans = parts.telemetry.scope("draft")
        loop = DraftLoop(
            {MODEL: self.strategy},
            max_sessions=16,
            max_tokens=4096,
            max_batch=8,
            max_waiting=64,
            spans=spans,
            metrics=parts.metrics,
        )
        service = DraftService(loop, info, spans, grammars=self._grammars())
        rpc.add_DraftServicer_to_server(service, server)
        return service

    async def _gateway(self, parts: Parts) -> RunningServer:
        settings = GatewaySettings.model_validate(
            {
                "target": ",".join(target.address for target in self.targets),
                "draft": self.draft_address,
                "redis_url": self._store,
                "model": str(self._tiny),
                "model_name": "tiny",
                "draft_timeout_s": 10,
                "drain_timeout_s": _DRAIN_S,
                "audit_ratio": 0,
                **self._given,
            }
        )
        prepared = prepare(settings, tuning=Tuning(lookup_fallback=False))
        return await start_server(settings, prepared.build, parts, prepared.interceptors)
