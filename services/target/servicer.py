"""Serve galley.v1.Target: one generator a request, for the unary call and the stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

import grpc

from galley.common.host import this_host
from galley.common.logs import get_logger
from galley.common.metrics.registry import Registry
from galley.common.models.grammars import ReplicaGrammars, load_grammars
from galley.common.registry.leases import MAX_CACHED_PREFIXES, TARGET_POOL, target_lease
from galley.common.registry.registration import registered
from galley.common.server.process import in_passing_thread
from galley.common.server.reading import LongRead, LongReader
from galley.common.server.requests import answer_of, failure_status, respond_all, respond_stream
from galley.common.server.server import Parts, Service
from galley.common.tracing.light_spans import SpanScope
from galley.common.wire.codec import (
    check_lora,
    check_token_ids,
    logprobs_message,
    read_slice,
)
from galley.core.content import HASH_BYTES, BlockChain, Miss, cache_salt
from galley.core.errors import GalleyError, InvalidField, Unimplemented, check_length, check_range
from galley.core.features import MAX_FEATURE_LAYERS
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.grammar.spec import KINDS
from galley.core.hints import MAX_HINT_TOKENS, Hint
from galley.core.routing.choice import TargetLease
from galley.core.scheduler.messages import Confirmed, Extend, VerifyRequest
from galley.core.trees import MAX_WIDTH, ROOT, simplified
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import EngineInfo, Limits, LoadedEngine, TargetEngine
from services.target.loop import OpenRequest, StepLoop, StepMeter
from services.target.settings import TargetSettings, memory_reported
from services.target.spans import VerifySpan

_LOG = get_logger(__name__)

_OpenRequests: TypeAlias = dict[tuple[str, int], OpenRequest]

# Likeliest tokens listed a position; each takes 12 bytes on the wire and 8 in the log.
MAX_TOP_LOGPROBS = 128
# A session without a request for this time has ended, or its gateway will find another replica.
_QUIET_S = 0.5
# Longest time that a step waits for a draft that is due; it waits only where that pays.
_MAX_LINGER_MS = 50.0
# Share of the drain timeout in which live sessions may end here before they move to another replica.
_LEAVE_SHARE = 0.6


class TargetService(rpc.TargetServicer):
    """Serve one engine; `incarnation` identifies this process, whose caches end with it."""

    grpc_services = ("galley.v1.Target",)

    def __init__(
        self,
        engine: TargetEngine,
        spans: SpanScope | None,
        metrics: Registry | None = None,
        host: pb.Host | None = None,
        grammars: ReplicaGrammars | None = None,
    ) -> None:
        """Make it within the running event loop; `spans` is None if traces are off.

        Without `grammars`, sessions with a grammar are refused.
        """
        info = engine.info
        self._engine = engine
        self._spans = spans
        self._grammars = grammars
        facts = asdict(info)
        del facts["directory"]
        self._reader = LongReader(info.vocab_size, info.context_window)
        self._about = pb.GetTargetInfoResponse(
            kv_blocks_total=facts.pop("kv_blocks"),
            **facts,
            incarnation=secrets.token_hex(8),
            max_draft_tokens=engine.limits.max_draft_tokens,
            row_costs=[pb.RowCost(rows=rows, ns=ns) for rows, ns in engine.times.points],
            grammar_kinds=KINDS if grammars is not None else (),
            host=host,
        )
        self._loop = StepLoop(engine, spans, None if metrics is None else StepMeter(metrics, engine))

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:  # noqa: ARG002
        """Respond once to each request of the message; credit is for streams."""
        return pb.VerifyResponse(answers=await respond_all(request.items, self._respond))

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        """Respond to requests as their results come; the requests end with the stream."""
        running: _OpenRequests = {}
        respond = partial(self._respond, running=running)
        async with aclosing(
            respond_stream(request_iterator, respond, self._loop.draining, partial(self._extend, running))
        ) as batches:
            async for responses in batches:
                yield pb.VerifyStreamResponse(answers=responses)

    async def GetTargetInfo(
        self,
        request: pb.GetTargetInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetTargetInfoResponse:
        return self.describe()

    def lease(self, address: str) -> TargetLease:
        return target_lease(address, self.describe(), self._engine.kv.cached_prefixes(MAX_CACHED_PREFIXES))

    def call_on_loss(self, on_loss: Callable[[], None]) -> None:
        """Have `on_loss` called when the engine is lost or a step hangs; it may be called again."""
        self._loop.on_loss = on_loss

    async def quiet(self) -> None:
        await self._loop.quiet(_QUIET_S)

    async def drain(self) -> None:
        """Refuse new requests; the open ones end with their next result."""
        await self._loop.drain()

    async def close(self) -> None:
        await self._loop.close()

    async def _respond(
        self, item: pb.VerifyItem, running: _OpenRequests | None = None
    ) -> AsyncGenerator[pb.VerifyAnswer]:
        """Yield the responses to a request; cancel it if the generator is closed.

        `running` has a stream's requests by (session id, request id); without it there is no credit.
        """
        span, ticket = VerifySpan(self._spans, item), None
        request_key, opened = (item.slice.session_id, item.slice.request_id), OpenRequest(self._loop)
        if running is not None:
            running[request_key] = opened
        result_of = partial(_result_of, fingerprint=self._engine.info.fingerprint)
        try:
            request = await self._read(item)
            if running is None:
                request = replace(request, credit=0)
            if request.grammar_hash:
                compiled = await self._compiled(request, item.slice.remaining_ns)
                if isinstance(compiled, Miss):
                    span.answered(compiled)
                    yield answer_of(pb.VerifyAnswer, item.slice, compiled, result_of)
                    return
                request = replace(request, compiled=compiled)
            ticket = self._loop.submit(request, span.span)
            opened.begin(ticket)
            while not ticket.ended:
                result = await ticket.next()
                span.responded(result)
                yield answer_of(pb.VerifyAnswer, item.slice, result.outcome, result_of)
        except Exception as error:  # noqa: BLE001  # one request must not fail the others
            status = failure_status(error, item.slice.session_id, span)
            yield pb.VerifyAnswer(session_id=request_key[0], request_id=request_key[1], status=status)
        finally:
            if ticket is not None:
                self._loop.cancel(ticket)
            if running is not None and running.get(request_key) is opened:
                del running[request_key]
            span.end()

    async def _read(self, item: pb.VerifyItem) -> VerifyRequest:
        """Return the request of an item, with hashes if it is long. Raise InvalidField or Unimplemented.

        Requests of a session return in the order of these calls.
        """
        now_ns, epoch_ns, part = time.monotonic_ns(), time.time_ns(), item.slice

        def chain_of() -> BlockChain | None:
            key = (cache_salt(part.tenant_salt, item.lora), part.session_id)
            return self._engine.block_chain(key, part.start, part.prefix_hash)

        long = await self._reader.read(part, chain_of)
        most = self._engine.limits.max_draft_tokens
        return read_item(item, self._engine.info, most, now_ns=now_ns, epoch_ns=epoch_ns, long=long)

    async def _compiled(self, request: VerifyRequest, remaining_ns: int) -> CompiledGrammar | Miss | None:
        if self._grammars is None:
            raise Unimplemented("slice.structured_output")
        return await self._grammars.compiled(request, remaining_ns)

    def _extend(self, running: _OpenRequests, message: pb.Extension) -> None:
        """Extend a running request, or end it with the status of an invalid extension."""
        request = running.get((message.session_id, message.request_id))
        if request is None:
            return
        try:
            request.extend(read_extension(message, self._engine.info))
        except GalleyError as error:
            request.extend(error)

    def describe(self) -> pb.GetTargetInfoResponse:
        about = pb.GetTargetInfoResponse()
        about.CopyFrom(self._about)
        about.kv_blocks_free = self._engine.kv.free
        about.queue_depth = self._engine.queue_depth
        return about


def read_item(
    item: pb.VerifyItem,
    info: EngineInfo,
    max_draft_tokens: int,
    *,
    now_ns: int,
    epoch_ns: int,
    long: LongRead | None = None,
) -> VerifyRequest:
    """Return the request of an item. Raise InvalidField or Unimplemented, naming the field, before any work.

    `now_ns` is the scheduler's time; `epoch_ns` the time of day, used for a session without arrival time.
    `long` is what was read of a long slice before.
    """
    feature_layers = _feature_layers(item, info)
    tokens, block_hashes = long or (None, ())
    read = read_slice(
        item.slice, vocab_size=info.vocab_size, context_window=info.context_window, tokens=tokens
    )
    _check_draft("", item.draft_tokens, item.survival, info.vocab_size, max_draft_tokens)
    check_tree(item.draft_tokens, item.parents)
    check_range("logprobs", item.logprobs, most=MAX_TOP_LOGPROBS)
    check_lora(item.lora, info.lora_adapters)
    tenant_salt, session_id = read.key
    return VerifyRequest(
        key=(cache_salt(tenant_salt, item.lora), session_id),
        start=read.start,
        tokens=read.tokens,
        prefix_hash=read.prefix_hash,
        prompt_len=read.prompt_len,
        max_position=read.max_position,
        sampling=read.sampling,
        stop_token_ids=read.stop_token_ids,
        min_tokens=read.min_tokens,
        draft_tokens=tuple(item.draft_tokens),
        survival=tuple(item.survival),
        parents=simplified(item.parents),
        credit=item.credit,
        hint_due=item.hint_due,
        max_verified=item.max_verified,
        logprobs=item.logprobs if item.HasField("logprobs") else None,
        arrival_ns=item.slice.arrival_ns or epoch_ns,
        priority=item.slice.priority,
        deadline_ns=now_ns + item.slice.remaining_ns if item.slice.remaining_ns else None,
        lora=item.lora,
        grammar=read.grammar,
        grammar_hash=read.grammar_hash,
        feature_layers=feature_layers,
        block_hashes=block_hashes,
    )


def _feature_layers(item: pb.VerifyItem, info: EngineInfo) -> tuple[int, ...]:
    """Return after which layers states are wanted; none unless `want_features`."""
    if not item.want_features:
        return ()
    if not info.feature_size:
        raise Unimplemented("want_features")
    if not 1 <= (count := len(item.feature_layers)) <= MAX_FEATURE_LAYERS:
        raise InvalidField("feature_layers", f"must have 1 to {MAX_FEATURE_LAYERS} entries, got {count}")
    layers, least = tuple(item.feature_layers), 1
    for index, layer in enumerate(layers):
        check_range(f"feature_layers[{index}]", layer, least=least, most=info.feature_layers)
        least = layer + 1
    return layers


def read_extension(message: pb.Extension, info: EngineInfo) -> Extend:
    """Return the extension of a message. Raise InvalidField, naming the field.

    A hint whose parents are no tree is left out.
    """
    hint = None
    if message.HasField("hint"):
        sent = message.hint
        _check_draft("hint.", sent.draft_tokens, sent.survival, info.vocab_size, MAX_HINT_TOKENS)
        if len(sent.prefix_hash) != HASH_BYTES:
            raise InvalidField(
                "hint.prefix_hash", f"must be {HASH_BYTES} bytes, got {len(sent.prefix_hash)} bytes"
            )
        tokens, survival, parents = tuple(sent.draft_tokens), tuple(sent.survival), simplified(sent.parents)
        with suppress(InvalidField):
            check_tree(tokens, sent.parents)
            hint = Hint(sent.position, sent.prefix_hash, tokens, survival, parents=parents)
    return Extend(limit=message.limit, hint=hint, hint_due=message.hint_due)


def _check_draft(
    prefix: str, draft_tokens: Sequence[int], survival: Sequence[float], vocab_size: int, max_tokens: int
) -> None:
    check_length(f"{prefix}draft_tokens", draft_tokens, max_tokens)
    check_token_ids(f"{prefix}draft_tokens", draft_tokens, vocab_size)
    if survival and len(survival) != len(draft_tokens):
        raise InvalidField(
            f"{prefix}survival", f"must have 0 or {len(draft_tokens)} entries, got {len(survival)}"
        )
    for index, chance in enumerate(survival):
        if not 0.0 <= chance <= 1.0:
            raise InvalidField(f"{prefix}survival[{index}]", f"must be in [0, 1], got {chance:g}")


def check_tree(draft_tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Raise InvalidField, naming the field, unless the draft tokens are a tree (`trees.py`), or a chain."""
    count = len(draft_tokens)
    if parents and len(parents) != count:
        raise InvalidField("parents", f"must have 0 or {count} entries, got {len(parents)}")
    found: dict[int, set[int]] = {}
    for node, parent in enumerate(parents):
        siblings = found.setdefault(parent, set())
        if not ROOT <= parent < node:
            problem = f"must be in [{ROOT}, {node - 1}], got {parent}"
        elif draft_tokens[node] in siblings:
            problem = f"must not be {parent}, which has a child of the same token"
        elif len(siblings) == MAX_WIDTH:
            problem = f"must not be {parent}, which has {MAX_WIDTH} children already"
        else:
            siblings.add(draft_tokens[node])
            continue
        raise InvalidField(f"parents[{node}]", problem)


def _result_of(outcome: Confirmed, fingerprint: str) -> pb.VerifyResult:
    result = pb.VerifyResult(
        position=outcome.position,
        tokens=outcome.tokens,
        accepted=outcome.accepted,
        verified=outcome.verified,
        logprobs=[logprobs_message(entry) for entry in outcome.logprobs],
        kv_len=outcome.kv_len,
        fingerprint=fingerprint,
        timing=pb.Timing(
            queue_ns=outcome.queue_ns, compute_ns=outcome.compute_ns, linger_ns=outcome.linger_ns
        ),
        batch_sessions=outcome.batch_sessions,
        more=outcome.more,
        row_ns=outcome.row_ns,
        prefill_ns=outcome.prefill_ns,
        plain_ns=outcome.plain_ns,
        batch_rows=outcome.batch_rows,
        kv_reused=outcome.kv_reused,
        batch_span=outcome.batch_span,
    )
    if outcome.states.tokens:
        result.features, result.features_position = outcome.states.data, outcome.states.position
    return result


async def add_target(
    server: grpc.aio.Server, parts: Parts, engine: LoadedEngine, settings: TargetSettings
) -> TargetService:
    parts.readiness.stage("measuring steps")
    with memory_reported(settings):  # its steps are the largest
        times = await in_passing_thread(engine.measure)
    # The names are those of the file that `galley plan --capacity` reads.
    _LOG.info(
        "model loaded",
        model=engine.info.model,
        weights_digest=engine.info.weights_digest,
        fingerprint=engine.info.fingerprint,
    )
    _LOG.info(
        "steps measured",
        step_ms=round(times.one_row_ns / 1e6, 3),
        row_costs=str(times.curve),
        threads=settings.thread_count,
        kv_tokens=engine.info.kv_blocks * engine.info.kv_block_tokens,
        block_tokens=engine.info.kv_block_tokens,
    )
    limits = Limits(
        max_draft_tokens=settings.max_draft_tokens,
        max_sessions=settings.max_sessions,
        max_rows=settings.max_rows,
        max_linger_ms=_MAX_LINGER_MS,
        max_itl_ms=settings.max_itl_ms,
    )
    host = this_host(settings.thread_count, settings.device)
    spans = parts.telemetry.scope(__name__)
    info = engine.info
    grammars = await in_passing_thread(load_grammars, info.directory, info.vocab_size, info.eos_token_ids)
    service = TargetService(engine.serve(times, limits), spans, parts.metrics, host, grammars)
    rpc.add_TargetServicer_to_server(service, server)
    return service


def registered_target(service: TargetService, settings: TargetSettings, bound: str) -> Service:
    """Return the service, registered from now on if there is a registry; it will listen at `bound`."""
    address = settings.advertise or bound

    async def last_sessions() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s * _LEAVE_SHARE):
                await service.quiet()

    return registered(service, settings, TARGET_POOL, lambda: service.lease(address), last_sessions)
