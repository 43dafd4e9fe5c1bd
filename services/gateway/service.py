"""Build a gateway, drain and close it."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
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
from services.gateway.http.shared import Shared
from services.gateway.learning.collector import Collector
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import (
    AddressSource,
    RegisteredAddresses,
    ReplicaPool,
    StaticAddresses,
)
from services.gateway.replicas.requirements import TargetRequirements
from services.gateway.replicas.target_session import TargetSession
from services.gateway.replicas.targets import TargetPool
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
from services.gateway.telemetry.audit_metrics import AuditMetrics
from services.gateway.telemetry.call import CallMetrics
from services.gateway.telemetry.grammar_metrics import GrammarMetrics
from services.gateway.telemetry.interceptor import RequestTracer, TraceInterceptor
from services.gateway.telemetry.observer import RequestObservers
from services.gateway.telemetry.session_metrics import SessionMetrics
from services.gateway.telemetry.spans import TraceOptions
from services.gateway.telemetry.version_metrics import VersionMetrics
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
    authentication = build_authentication(settings, tuning)
    return Prepared(
        partial(_build, settings, tuning, tls, open_store, authentication),
        partial(_interceptors, settings, tuning, authentication),
    )


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


def _interceptors(
    settings: GatewaySettings, tuning: Tuning, authentication: Authentication, parts: Parts
) -> Sequence[grpc.aio.ServerInterceptor]:
    authentication.start()
    principals = PrincipalInterceptor(authentication)
    tracer = _tracer(settings, tuning, parts)
    return (principals,) if tracer is None else (TraceInterceptor(tracer), principals)


def _tracer(settings: GatewaySettings, tuning: Tuning, parts: Parts) -> RequestTracer | None:
    """Return None where traces are off."""
    scope = parts.telemetry.scope("galley.gateway", SCHEMA_URL)
    if scope is None:
        return None
    slow_ns = round(tuning.slow_round_ms * 1_000_000)
    return RequestTracer(scope, TraceOptions(settings.round_spans, slow_ns, settings.trace_content), _CLOCK)


async def _build(
    settings: GatewaySettings,
    tuning: Tuning,
    tls: Mapping[str, ChannelTls | None],
    open_store: StoreOpener,
    authentication: Authentication,
    server: grpc.aio.Server,
    parts: Parts,
) -> GatewayService:
    async with AsyncExitStack() as opened:
        bound = _bind_http(settings, opened)
        generation = await _generation(settings, tuning, tls, open_store, authentication, parts, opened)
        authentication.on_stream_unidentified = generation.observers.unidentified
        rpc.add_GenerationServicer_to_server(GenerationServicer(generation), server)
        if bound is not None:
            shared = Shared(generation, authentication, _tracer(settings, tuning, parts), parts.metrics)
            await _serve_http(settings, shared, bound, opened)
            parts.addresses["http"] = socket_address(bound)
        return GatewayService(
            generation.streams, opened.pop_all(), settings.drain_timeout_s, generation.auditor.stop
        )


async def _generation(
    settings: GatewaySettings,
    tuning: Tuning,
    tls: Mapping[str, ChannelTls | None],
    open_store: StoreOpener,
    authentication: Authentication,
    parts: Parts,
    opened: AsyncExitStack,
) -> Generation:
    parts.readiness.stage("loading the tokenizer")
    tokenizer = await asyncio.to_thread(
        Tokenizer.load, settings.model, control_tokens_in_messages=settings.control_tokens_in_messages
    )

    def opener(role: str) -> ChannelOpener:
        return lambda address: open_channel(
            address, tls[role], parts.telemetry.client_interceptors(), REPLICA_CHANNEL
        )

    targets = TargetPool(
        _source(settings, settings.target, TARGET_POOL),
        TargetRequirements(tokenizer.hash, _target_models(settings), MAX_DRAFT_TOKENS),
        opener("target"),
        _CLOCK,
        hedge_quantile=settings.hedge_quantile,
    )
    opened.push_async_callback(targets.close)
    parts.readiness.stage("waiting for a target")
    await targets.start(settings.startup_timeout_s)
    parts.readiness.stage("pairing with the drafts")
    drafts = DraftPool(
        _source(settings, settings.draft, DRAFT_POOL),
        tokenizer.hash,
        opener("draft"),
        _CLOCK,
        int(settings.draft_timeout_s * SECOND),
    )
    opened.push_async_callback(drafts.close)
    await _meet_drafts(settings, drafts)
    parts.readiness.stage("connecting to the session store")
    store = open_store(settings)
    opened.push_async_callback(store.close)
    until_ns = _CLOCK.now_ns() + int(settings.startup_timeout_s * SECOND)
    await retry("ping", store.ping, until_ns, _CLOCK)
    parts.readiness.stage("reading the vocabulary")
    grammars = await asyncio.to_thread(
        Grammars.of_tokenizer, tokenizer.to_json(), targets.info.vocab_size, targets.info.eos_token_ids
    )
    model = _served_model(settings, tuning, tokenizer, targets, drafts, grammars)
    keeper = await _version_keeper(settings, drafts, parts.metrics, opened)
    streams = _streams(settings, tuning, store, drafts, targets, tokenizer, keeper)
    threads = FairThreads()
    streams.own_sources = OwnSources(partial(grammars.compiled, threads))
    if keeper is not None:
        streams.draft_version_of = keeper.version_of
    streams.on_call = targets.turns.expect_calls
    streams.is_saturated = lambda: targets.turns.is_saturated(asyncio.get_running_loop().time())
    opened.push_async_callback(streams.close)
    opened.callback(asyncio.create_task(_follow_contention(streams.shared, drafts, targets)).cancel)
    opened.callback(asyncio.create_task(_collect_garbage(streams)).cancel)
    collector = _collector(settings, streams, authentication, opened)
    observers, audit_metrics = RequestObservers(_CLOCK), None
    if (registry := parts.metrics) is not None:
        peer_files = None if tls["target"] is None else tls["target"].files
        observe_expiry(registry, PEER_CERTIFICATE_EXPIRY, peer_files)
        grammars.on_compiled = GrammarMetrics(registry).count
        audit_metrics = AuditMetrics(registry)
        sessions = SessionMetrics(registry, model.name, names_principals=settings.usage_by_principal)
        collected = registry.count(catalogue.LEARNING_SESSIONS)  # also where nothing is: the series are at 0
        if collector is not None:
            collector.on_collected = partial(_count_collected, collected)
        observe_gateway(registry, streams, targets, None if settings.draft == NO_DRAFT else drafts)
        registry.observe(catalogue.SESSIONS_LIMIT, lambda: [((), model.max_sessions)])
        registry.observe(catalogue.SESSIONS, lambda: _by_progress(streams.held, sessions.running))
        observers = RequestObservers(_CLOCK, CallMetrics(registry), sessions)
    auditor = _auditor(settings, tuning, targets, store, audit_metrics)
    streams.on_finished.append(auditor.note_finished)
    opened.push_async_callback(auditor.close)
    secret = _id_secret(settings)
    return Generation(streams, model, _CLOCK, secret, observers, auditor, parts.address, threads, collector)


def _auditor(
    settings: GatewaySettings,
    tuning: Tuning,
    targets: TargetPool,
    store: SessionStore,
    metrics: AuditMetrics | None,
) -> Auditor:
    records = AuditRecords(settings.redis_url.get_secret_value(), settings.pool)
    verify_ns, kept_ns = int(tuning.verify_timeout_s * SECOND), int(settings.finished_ttl_s * SECOND)
    tools = AuditTools(targets, store, records, _CLOCK, verify_ns, kept_ns, metrics)
    return Auditor(tools, settings.audit_ratio)


def _collector(
    settings: GatewaySettings, streams: Streams, authentication: Authentication, opened: AsyncExitStack
) -> Collector | None:
    """Return what collects finished sessions to train drafts on; None unless the deployment does."""
    if not settings.learn_tokens:
        return None
    spool = LearningSpool(settings.redis_url.get_secret_value(), settings.pool)
    collector = Collector(spool, settings.learn_tokens, authentication.present)
    opened.push_async_callback(collector.close)
    streams.on_finished.append(collector.finished)
    return collector


def _count_collected(series: Series[Count], is_kept: bool) -> None:
    series.at("kept" if is_kept else "dropped").value += 1


async def _version_keeper(
    settings: GatewaySettings, drafts: DraftPool, registry: Registry | None, opened: AsyncExitStack
) -> VersionKeeper | None:
    """Return what splits sessions between versions of drafts; None without drafts."""
    metrics = None if registry is None else VersionMetrics(registry)
    if settings.draft == NO_DRAFT:
        return None
    store = DraftVersions(settings.redis_url.get_secret_value(), settings.pool)
    trial = split_setting(settings.draft_split) if settings.draft_split else None
    keeper = VersionKeeper(store, drafts, trial, metrics)
    if metrics is not None:
        metrics.observe_split(lambda: keeper.state.split)
    opened.push_async_callback(keeper.close)
    await keeper.start()
    return keeper


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


def _bind_http(settings: GatewaySettings, opened: AsyncExitStack) -> socket.socket | None:
    """Bind the HTTP port, so that one in use fails at once; return None without one. Raise CannotBind."""
    if settings.http_port == OFF:
        return None
    return opened.enter_context(bind_socket(settings.host, settings.http_port))


async def _serve_http(
    settings: GatewaySettings, shared: Shared, bound: socket.socket, opened: AsyncExitStack
) -> None:
    from services.gateway.http.port import open_port  # noqa: PLC0415  # imports FastAPI

    server = await open_port(settings, shared, bound)
    opened.push_async_callback(server.stop, _HTTP_GRACE_S)


def _streams(
    settings: GatewaySettings,
    tuning: Tuning,
    store: SessionStore,
    drafts: DraftPool,
    targets: TargetPool,
    tokenizer: Tokenizer,
    keeper: VersionKeeper | None,
) -> Streams:
    may_look_up = tuning.lookup_fallback and settings.draft != NO_DRAFT

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
            window=tuning.window,
            buffer=settings.buffer,
            credit=settings.credit,
            item_drafts=min(MAX_DRAFT_TOKENS, targets.info.max_draft_tokens),
            target_timeout_ns=int(settings.target_timeout_s * SECOND),
        ),
        Timeouts(
            store_ns=int(settings.store_timeout_s * SECOND),
            verify_ns=int(tuning.verify_timeout_s * SECOND),
            draft_ns=int(settings.draft_timeout_s * SECOND),
            renew_ns=int(min(settings.session_ttl_s, settings.finished_ttl_s) * SECOND / 3),
            client_ns=int(settings.client_timeout_s * SECOND),
        ),
        settings.max_sessions,
    )


def _target_models(settings: GatewaySettings) -> Sequence[str]:
    return comma_separated(settings.target_models) or [model_name(settings.model)]


def _id_secret(settings: GatewaySettings) -> bytes:
    given = settings.id_secret.get_secret_value().encode()
    if not given:
        _log.warning(
            "no id secret: idempotency keys and cached prefixes are this gateway's own, until it restarts"
        )
    return given or secrets.token_bytes(32)


def _source(settings: GatewaySettings, addresses: str, pool: LeasePool[Any]) -> AddressSource:
    if addresses == NO_DRAFT:
        return StaticAddresses([])
    if configured := comma_separated(addresses):
        return StaticAddresses(configured)
    return RegisteredAddresses(ReplicaRegistry(settings.redis_url.get_secret_value(), settings.pool), pool)


async def _meet_drafts(settings: GatewaySettings, drafts: DraftPool) -> None:
    """Start the pool. Raise TokenizerMismatch if all drafts configured by address have another tokenizer."""
    await drafts.start()
    if settings.draft and drafts.mismatch is not None:
        raise drafts.mismatch
    if settings.draft != NO_DRAFT and not drafts.strategies:
        _log.warning("no draft available", reason=drafts.problem)


def _served_model(
    settings: GatewaySettings,
    tuning: Tuning,
    tokenizer: Tokenizer,
    targets: TargetPool,
    drafts: DraftPool,
    grammars: Grammars,
) -> ServedModel:
    max_draft_tokens = min(MAX_DRAFT_TOKENS, targets.info.max_draft_tokens)
    recommended = tokenizer.recommended if settings.generation_config == "auto" else Recommended({}, None)
    return ServedModel(
        name=settings.model_name or targets.info.model,
        targets=targets,
        tokenizer=tokenizer,
        drafts=drafts,
        limits=Limits(recommended.max_tokens or DEFAULT_MAX_TOKENS, max_draft_tokens),
        max_sessions=settings.max_sessions,
        default_k=0 if settings.draft == NO_DRAFT else min(settings.k, max_draft_tokens),
        default_strategy=tuning.strategy,
        grammars=grammars,
        default_sampling=pb.SamplingParams(**recommended.sampling),
    )


def observe_gateway(
    registry: Registry, streams: Streams, targets: TargetPool, drafts: DraftPool | None
) -> None:
    pools: list[ReplicaPool[Any]] = [targets] if drafts is None else [targets, drafts]
    add = registry.observe
    add(catalogue.SESSIONS_OPEN, lambda: [((), streams.held)])
    add(catalogue.REPLICAS, lambda: _replicas(pools))
    add(catalogue.FAILOVERS, lambda: _failovers(pools))
    add(catalogue.BREAKER_STATE, lambda: _breakers(drafts))
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


def _replicas(pools: Sequence[ReplicaPool[Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    for pool in pools:
        up, down = pool.up_and_down()
        yield (pool.role, "up"), up
        yield (pool.role, "down"), down


def _failovers(pools: Sequence[ReplicaPool[Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    for pool in pools:
        for reason in MOVE_REASONS:
            yield (pool.role, reason), pool.move_counts[reason]


def _breakers(drafts: DraftPool | None) -> Iterator[tuple[tuple[str, str], float]]:
    for address, state in drafts.breakers() if drafts is not None else ():
        yield ("draft", address), _BREAKER[state]
