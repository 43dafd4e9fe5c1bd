"""Build a gateway, drain and close it."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from galley.common.config.settings import OFF
from galley.common.fair_threads import FairThreads
from galley.common.logs import get_logger
from galley.common.metrics import catalogue
from galley.common.metrics.catalogue import PEER_CERTIFICATE_EXPIRY
from galley.common.metrics.metering import observe_expiry
from galley.common.metrics.registry import Count, Registry, Series
from galley.common.models.files import model_name
from galley.common.models.sampling_defaults import Recommended
from galley.common.models.tokenizer import Tokenizer
from galley.common.redis.calls import DEFAULT_CALL_TIMEOUT_S, Copies
from galley.common.redis.connections import refuse_bad_files
from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL, LeasePool, ReplicaRegistry
from galley.common.registry.spool import LearningSpool
from galley.common.registry.trials import DraftVersions
from galley.common.repeated_work import RepeatedWork
from galley.common.server.server import Parts, Prepared
from galley.common.sockets import bind_socket, socket_address
from galley.common.tls.channels import ChannelTls, open_channel
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile
from galley.core.cost.contention import contention
from galley.core.hints import MAX_DRAFT_TOKENS
from galley.core.names import MOVE_REASONS, SCHEMA_URL
from galley.core.routing.breaker import State
from galley.core.routing.choice import TargetLease
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import SessionStore, StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.audit.auditor import Auditor, AuditTools
from services.gateway.audit.records import AuditRecords
from services.gateway.auth.authentication import Authentication, PrincipalInterceptor, build_authentication
from services.gateway.clock import SECOND, MonotonicClock, Timeouts
from services.gateway.generation import Generation, ServedModel
from services.gateway.learning.collector import Collector
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import (
    AddressSource,
    RegisteredAddresses,
    ReplicaPool,
    StaticAddresses,
)
from services.gateway.replicas.target_session import TargetSession
from services.gateway.replicas.targets import TargetPool, TargetRequirements
from services.gateway.request.grammars import Grammars
from services.gateway.request.validate import DEFAULT_MAX_TOKENS, Limits
from services.gateway.servicer import GenerationServicer
from services.gateway.session.own_sources import OwnSources
from services.gateway.session.runner import Ports
from services.gateway.session.streams import Streams
from services.gateway.settings import (
    NO_DRAFT,
    TUNING,
    GatewaySettings,
    Tuning,
    comma_separated,
    split_setting,
)
from services.gateway.store.redis import RedisStore
from services.gateway.store.session_log import retry
from services.gateway.telemetry.call import CallMetrics
from services.gateway.telemetry.component_metrics import AuditMetrics, VersionMetrics, count_compiled
from services.gateway.telemetry.interceptor import RequestTracer, TraceInterceptor
from services.gateway.telemetry.observer import RequestObservers
from services.gateway.telemetry.session_metrics import SessionMetrics
from services.gateway.telemetry.spans import TraceOptions
from services.gateway.versions.keeper import VersionKeeper

_log = get_logger(__name__)
_HAND_OVER_SHARE = 0.6
"""Share of the drain timeout in which streams may end by themselves before they are handed over."""
_HTTP_GRACE_S = 1.0
"""Longest time that HTTP responses get to end after the drain, such as errors of streams handed over."""
_COLLECT_S = 5.0
_CONTENTION_S = 5.0
_CLOCK = MonotonicClock()
_COPY_TIMEOUT_S = 1.0
"""Longest time that one commit waits for the store's replicas; it is repeated for `store_timeout_s`."""
_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
_UNBOUNDED_MESSAGES = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_SHORT_QUEUES = (("grpc.http2.lookahead_bytes", 16 * 1024), ("grpc.http2.bdp_probe", 0))
"""What a replica may send before the gateway reads: it keeps the rest, and joins it into one message."""
REPLICA_CHANNEL = (*_UNBOUNDED_MESSAGES, *_SHORT_QUEUES)


class GatewayService:
    grpc_services: Sequence[str] = ("galley.v1.Generation",)

    def __init__(
        self,
        streams: Streams,
        parts: AsyncExitStack,
        drain_timeout_s: float,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`parts` closes the HTTP port and everything that the streams use."""
        self._streams = streams
        self._parts = parts
        self._drain_timeout_s = drain_timeout_s
        self._on_drain = on_drain

    async def drain(self) -> None:
        self._on_drain()
        await self._streams.drain(self._drain_timeout_s * _HAND_OVER_SHARE)

    async def close(self) -> None:
        await self._parts.aclose()


def open_redis(settings: GatewaySettings) -> SessionStore:
    copies = settings.redis_wait_replicas
    return RedisStore(
        settings.redis_url.get_secret_value(),
        settings.session_ttl_s,
        settings.finished_ttl_s,
        pool_name=settings.pool,
        call_timeout_s=min(DEFAULT_CALL_TIMEOUT_S, settings.store_timeout_s),
        copies=Copies(copies, _COPY_TIMEOUT_S) if copies else None,
    )


StoreOpener: TypeAlias = Callable[[GatewaySettings], SessionStore]
ChannelOpener: TypeAlias = "Callable[[str], grpc.aio.Channel]"


def prepare(
    settings: GatewaySettings, open_store: StoreOpener = open_redis, tuning: Tuning = TUNING
) -> Prepared:
    """Return what makes the service; measurements pass another store. Raise BadFile."""
    refuse_bad_files(settings.redis_url)
    tls = {role: _channel_tls(settings, role) for role in ("target", "draft")}
    gateway = _Gateway(settings, tuning, tls, open_store, build_authentication(settings, tuning))
    return Prepared(gateway.build, gateway.interceptors)


def _channel_tls(settings: GatewaySettings, role: str) -> ChannelTls | None:
    """Return None for plain text. Raise BadFile if a file is unusable."""
    if not settings.peer_ca_file:
        return None
    files = TlsFiles(
        NamedFile("peer_ca_file", settings.peer_ca_file),
        NamedFile("peer_cert_file", settings.peer_cert_file),
        NamedFile("peer_key_file", settings.peer_key_file),
    )
    return ChannelTls(files.watch(CHECK_INTERVAL_S), getattr(settings, f"{role}_tls_name"))


@dataclass(frozen=True, slots=True)
class _Gateway:
    """Build a gateway; `tls` is that of channels, by role."""

    settings: GatewaySettings
    tuning: Tuning
    tls: Mapping[str, ChannelTls | None]
    open_store: StoreOpener
    authentication: Authentication

    def interceptors(self, parts: Parts) -> Sequence[grpc.aio.ServerInterceptor]:
        self.authentication.start()
        principals = PrincipalInterceptor(self.authentication)
        tracer = self._tracer(parts)
        return (principals,) if tracer is None else (TraceInterceptor(tracer), principals)

    async def build(self, server: grpc.aio.Server, parts: Parts) -> GatewayService:
        async with AsyncExitStack() as opened:
            bound = self._bind_http(opened)
            generation = await self._generation(parts, opened)
            self.authentication.on_stream_unidentified = generation.observers.count_unidentified
            rpc.add_GenerationServicer_to_server(GenerationServicer(generation), server)
            if bound is not None:
                await self._serve_http(generation, parts, bound, opened)
                parts.addresses["http"] = socket_address(bound)
            return GatewayService(
                generation.streams, opened.pop_all(), self.settings.drain_timeout_s, generation.auditor.stop
            )

    async def _generation(self, parts: Parts, opened: AsyncExitStack) -> Generation:
        parts.readiness.stage("loading the tokenizer")
        tokenizer = await asyncio.to_thread(
            Tokenizer.load,
            self.settings.model,
            control_tokens_in_messages=self.settings.control_tokens_in_messages,
        )

        def opener(role: str) -> ChannelOpener:
            return lambda address: open_channel(
                address, self.tls[role], parts.telemetry.client_interceptors(), REPLICA_CHANNEL
            )

        targets = TargetPool(
            self._source(self.settings.target, TARGET_POOL),
            TargetRequirements(tokenizer.hash, self._target_models(), MAX_DRAFT_TOKENS),
            opener("target"),
            _CLOCK,
            hedge_quantile=self.settings.hedge_quantile,
        )
        opened.push_async_callback(targets.close)
        parts.readiness.stage("waiting for a target")
        await targets.start(self.settings.startup_timeout_s)
        parts.readiness.stage("pairing with the drafts")
        drafts = DraftPool(
            self._source(self.settings.draft, DRAFT_POOL),
            tokenizer.hash,
            opener("draft"),
            _CLOCK,
            int(self.settings.draft_timeout_s * SECOND),
        )
        opened.push_async_callback(drafts.close)
        await self._meet_drafts(drafts)
        parts.readiness.stage("connecting to the session store")
        store = self.open_store(self.settings)
        opened.push_async_callback(store.close)
        until_ns = _CLOCK.now_ns() + int(self.settings.startup_timeout_s * SECOND)
        await retry("ping", store.ping, until_ns, _CLOCK)
        parts.readiness.stage("reading the vocabulary")
        grammars = await asyncio.to_thread(
            Grammars.of_tokenizer, tokenizer.to_json(), targets.info.vocab_size, targets.info.eos_token_ids
        )
        model = self._served_model(tokenizer, targets, drafts, grammars)
        keeper = await self._version_keeper(drafts, parts.metrics, opened)
        streams = self._streams(store, drafts, targets, tokenizer, keeper)
        threads = FairThreads()
        streams.own_sources = OwnSources(partial(grammars.compiled, threads))
        if keeper is not None:
            streams.draft_version_of = keeper.version_of
        streams.on_call = targets.turns.expect_calls
        streams.is_saturated = lambda: targets.turns.is_saturated(asyncio.get_running_loop().time())
        opened.push_async_callback(streams.close)
        opened.callback(asyncio.create_task(_follow_contention(streams.shared, drafts, targets)).cancel)
        opened.callback(asyncio.create_task(_collect_garbage(streams)).cancel)
        collector = self._collector(streams, opened)
        observers, audit_metrics = RequestObservers(_CLOCK), None
        if (registry := parts.metrics) is not None:
            peer_files = None if self.tls["target"] is None else self.tls["target"].files
            observe_expiry(registry, PEER_CERTIFICATE_EXPIRY, peer_files)
            grammars.on_compiled = count_compiled(registry)
            audit_metrics = AuditMetrics(registry)
            sessions = SessionMetrics(registry, model.name, names_principals=self.settings.usage_by_principal)
            # Also where nothing is collected: the series are at 0 then.
            collected = registry.count(catalogue.LEARNING_SESSIONS)
            if collector is not None:
                collector.on_collected = partial(_count_collected, collected)
            observe_gateway(registry, streams, targets, None if self.settings.draft == NO_DRAFT else drafts)
            registry.observe(catalogue.SESSIONS_LIMIT, lambda: [((), model.max_sessions)])
            registry.observe(catalogue.SESSIONS, lambda: _by_progress(streams.held, sessions.running))
            observers = RequestObservers(_CLOCK, CallMetrics(registry), sessions)
        auditor = self._auditor(targets, store, audit_metrics)
        streams.on_finished.append(auditor.note_finished)
        opened.push_async_callback(auditor.close)
        secret = self._id_secret()
        return Generation(
            streams, model, _CLOCK, secret, observers, auditor, parts.address, threads, collector
        )

    def _tracer(self, parts: Parts) -> RequestTracer | None:
        """Return None where traces are off."""
        scope = parts.telemetry.scope("galley.gateway", SCHEMA_URL)
        if scope is None:
            return None
        slow_ns = round(self.tuning.slow_round_ms * 1_000_000)
        options = TraceOptions(self.settings.round_spans, slow_ns, self.settings.trace_content)
        return RequestTracer(scope, options, _CLOCK)

    def _auditor(self, targets: TargetPool, store: SessionStore, metrics: AuditMetrics | None) -> Auditor:
        records = AuditRecords(self.settings.redis_url.get_secret_value(), self.settings.pool)
        verify_ns = int(self.tuning.verify_timeout_s * SECOND)
        kept_ns = int(self.settings.finished_ttl_s * SECOND)
        tools = AuditTools(targets, store, records, _CLOCK, verify_ns, kept_ns, metrics)
        return Auditor(tools, self.settings.audit_ratio)

    def _collector(self, streams: Streams, opened: AsyncExitStack) -> Collector | None:
        """Return what collects finished sessions to train drafts on; None unless the deployment does."""
        if not self.settings.learn_tokens:
            return None
        spool = LearningSpool(self.settings.redis_url.get_secret_value(), self.settings.pool)
        collector = Collector(spool, self.settings.learn_tokens, self.authentication.current_principal)
        opened.push_async_callback(collector.close)
        streams.on_finished.append(collector.finished)
        return collector

    async def _version_keeper(
        self, drafts: DraftPool, registry: Registry | None, opened: AsyncExitStack
    ) -> VersionKeeper | None:
        """Return what splits sessions between versions of drafts; None without drafts."""
        metrics = None if registry is None else VersionMetrics(registry)
        if self.settings.draft == NO_DRAFT:
            return None
        store = DraftVersions(self.settings.redis_url.get_secret_value(), self.settings.pool)
        trial = split_setting(self.settings.draft_split) if self.settings.draft_split else None
        keeper = VersionKeeper(store, drafts, trial, metrics)
        if metrics is not None:
            metrics.observe_split(lambda: keeper.state.split)
        opened.push_async_callback(keeper.close)
        await keeper.start()
        return keeper

    def _streams(
        self,
        store: SessionStore,
        drafts: DraftPool,
        targets: TargetPool,
        tokenizer: Tokenizer,
        keeper: VersionKeeper | None,
    ) -> Streams:
        may_look_up = self.tuning.lookup_fallback and self.settings.draft != NO_DRAFT

        def ports_of(stored: StoredSession, session: Session) -> Ports:
            draft = DraftSession(drafts, stored.directory.draft, may_look_up=may_look_up)
            target = TargetSession(targets, session.answer.fingerprint or "", stored.directory.target, draft)
            begins = len(stored.tokens) == stored.prompt_len
            tally = keeper.tally(session.spec, draft, begins=begins) if keeper is not None else None
            return Ports(draft, target, _CLOCK, tally)

        return Streams(
            store,
            _CLOCK,
            ports_of,
            tokenizer.decode,
            SessionLimits(
                window=self.tuning.window,
                buffer=self.settings.buffer,
                credit=self.settings.credit,
                item_drafts=min(MAX_DRAFT_TOKENS, targets.info.max_draft_tokens),
                target_timeout_ns=int(self.settings.target_timeout_s * SECOND),
            ),
            Timeouts(
                store_ns=int(self.settings.store_timeout_s * SECOND),
                verify_ns=int(self.tuning.verify_timeout_s * SECOND),
                draft_ns=int(self.settings.draft_timeout_s * SECOND),
                renew_ns=int(min(self.settings.session_ttl_s, self.settings.finished_ttl_s) * SECOND / 3),
                client_ns=int(self.settings.client_timeout_s * SECOND),
            ),
            self.settings.max_sessions,
        )

    def _served_model(
        self, tokenizer: Tokenizer, targets: TargetPool, drafts: DraftPool, grammars: Grammars
    ) -> ServedModel:
        max_draft_tokens = min(MAX_DRAFT_TOKENS, targets.info.max_draft_tokens)
        is_auto = self.settings.generation_config == "auto"
        recommended = tokenizer.recommended if is_auto else Recommended({}, None)
        return ServedModel(
            name=self.settings.model_name or targets.info.model,
            targets=targets,
            tokenizer=tokenizer,
            drafts=drafts,
            limits=Limits(recommended.max_tokens or DEFAULT_MAX_TOKENS, max_draft_tokens),
            max_sessions=self.settings.max_sessions,
            default_k=0 if self.settings.draft == NO_DRAFT else min(self.settings.k, max_draft_tokens),
            default_strategy=self.tuning.strategy,
            grammars=grammars,
            default_sampling=pb.SamplingParams(**recommended.sampling),
        )

    def _source(self, addresses: str, pool: LeasePool[Any]) -> AddressSource:
        if addresses == NO_DRAFT:
            return StaticAddresses([])
        if configured := comma_separated(addresses):
            return StaticAddresses(configured)
        registry = ReplicaRegistry(self.settings.redis_url.get_secret_value(), self.settings.pool)
        return RegisteredAddresses(registry, pool)

    async def _meet_drafts(self, drafts: DraftPool) -> None:
        """Start the pool.

        Raise TokenizerMismatch if all drafts configured by address have another tokenizer.
        """
        await drafts.start()
        if self.settings.draft and drafts.mismatch is not None:
            raise drafts.mismatch
        if self.settings.draft != NO_DRAFT and not drafts.strategies:
            _log.warning("no draft available", reason=drafts.problem)

    def _id_secret(self) -> bytes:
        given = self.settings.id_secret.get_secret_value().encode()
        if not given:
            _log.warning(
                "no id secret: idempotency keys and cached prefixes are this gateway's own, until it restarts"
            )
        return given or secrets.token_bytes(32)

    def _bind_http(self, opened: AsyncExitStack) -> socket.socket | None:
        """Bind the HTTP port, so that one in use fails at once; return None without one.

        Raise CannotBind.
        """
        if self.settings.http_port == OFF:
            return None
        return opened.enter_context(bind_socket(self.settings.host, self.settings.http_port))

    async def _serve_http(
        self, generation: Generation, parts: Parts, bound: socket.socket, opened: AsyncExitStack
    ) -> None:
        from services.gateway.http.port import open_port  # noqa: PLC0415  # imports FastAPI

        server = await open_port(
            self.settings, generation, self.authentication, self._tracer(parts), parts.metrics, bound
        )
        opened.push_async_callback(server.stop, _HTTP_GRACE_S)

    def _target_models(self) -> Sequence[str]:
        return comma_separated(self.settings.target_models) or [model_name(self.settings.model)]


def _count_collected(series: Series[Count], is_kept: bool) -> None:
    series.at("kept" if is_kept else "dropped").value += 1


async def _collect_garbage(streams: Streams) -> None:
    """Collect all garbage when no stream is open: there is little to visit then, and nobody waits."""
    while True:
        await asyncio.sleep(_COLLECT_S)
        if not streams.held and gc.get_count()[2]:
            gc.collect()


async def _follow_contention(shared: SharedStatistics, drafts: DraftPool, targets: TargetPool) -> None:
    """Note how much of the drafts' time is lost to targets on the same cores, as replicas come and go."""

    async def read() -> None:
        shared.contention = contention(drafts.hosts(), targets.hosts())

    reading = RepeatedWork("reading of contention", read)
    await reading.run()
    await reading.repeat(_CONTENTION_S)


def observe_gateway(
    registry: Registry, streams: Streams, targets: TargetPool, drafts: DraftPool | None
) -> None:
    pools: list[ReplicaPool[Any]] = [targets] if drafts is None else [targets, drafts]
    add = registry.observe
    add(catalogue.SESSIONS_OPEN, lambda: [((), streams.held)])
    add(
        catalogue.REPLICAS,
        lambda: [
            ((pool.role, state), count)
            for pool in pools
            for state, count in zip(("up", "down"), pool.up_and_down(), strict=True)
        ],
    )
    add(
        catalogue.FAILOVERS,
        lambda: [((p.role, reason), p.move_counts[reason]) for p in pools for reason in MOVE_REASONS],
    )
    add(
        catalogue.BREAKER_STATE,
        lambda: [
            (("draft", address), _BREAKER[state])
            for address, state in (drafts.breakers() if drafts is not None else ())
        ],
    )
    add(catalogue.TARGETS_KV_USAGE, lambda: _kv_usage(targets.leases() if targets.knows_load else ()))
    add(catalogue.TARGETS_CACHE, lambda: _cache(targets.leases()))


def _by_progress(held: int, running: int) -> Iterator[tuple[tuple[str], float]]:
    """Count a session as queued from its admission on; one that stopped may hold its slot a little longer."""
    yield ("running",), running
    yield ("queued",), max(0, held - running)


def _kv_usage(leases: Sequence[TargetLease]) -> Iterator[tuple[tuple[()], float]]:
    if total := sum(lease.kv_blocks_total for lease in leases):
        yield (), 1 - sum(lease.kv_blocks_free for lease in leases) / total


def _cache(leases: Sequence[TargetLease]) -> Iterator[tuple[tuple[str, str], float]]:
    if total := sum(lease.kv_blocks_total for lease in leases):
        yield (str(max(lease.kv_block_tokens for lease in leases)), str(total)), 1
