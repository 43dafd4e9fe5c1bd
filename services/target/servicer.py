"""Serve galley.v1.Target: one generator a request, for the unary call and the stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from galley.common.metrics.registry import Registry
from galley.common.server.requests import failure_status, respond_all, respond_stream
from galley.common.tracing.light_spans import SpanScope
from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError
from galley.core.kv.table import KvTable
from galley.core.scheduler.messages import VerifyRequest
from galley.core.scheduler.scheduler import MAX_ROWS, Scheduler
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import TargetEngine
from services.target.items import answer_of, read_extension, read_item
from services.target.loop import StepLoop, Ticket
from services.target.metrics import CountingStepMeter, StepMeter
from services.target.registration import Facts
from services.target.spans import VerifySpan

_Tickets: TypeAlias = dict[tuple[str, int], Ticket]

# Hashes of cached blocks in a lease: those of prefixes that many sessions share.
_MAX_CACHED_PREFIXES = 512
# A session without a request for this time has ended, or its gateway will find another replica.
_QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a replica: draft tokens a request, waiting requests, sessions, rows a step, linger."""

    max_draft_tokens: int = 16
    max_waiting: int = 1024
    max_sessions: int = 64
    max_rows: int = MAX_ROWS
    max_linger_ms: float = 0.0


class TargetService(rpc.TargetServicer):
    """Serve one engine; `incarnation` identifies this process, whose caches end with it."""

    grpc_services = ("galley.v1.Target",)

    def __init__(
        self,
        engine: TargetEngine,
        times: StepTimes,
        spans: SpanScope | None,
        limits: Limits,
        metrics: Registry | None = None,
    ) -> None:
        """Serve `engine`; `times` are its measured step times, `spans` is None if traces are off.

        Make it within the running event loop.
        """
        info = engine.info
        self._engine = engine
        self._times = times
        self._spans = spans
        self._max_draft_tokens = limits.max_draft_tokens
        self._incarnation = secrets.token_hex(8)
        self._table = KvTable(info.kv_blocks, info.kv_block_tokens, limits.max_sessions)
        self._scheduler = Scheduler(
            self._table,
            times,
            max_rows=limits.max_rows,
            max_waiting=limits.max_waiting,
            max_linger_ns=round(limits.max_linger_ms * 1e6),
        )
        meter = StepMeter()
        if metrics is not None:
            meter = CountingStepMeter(metrics, self._scheduler, self._table)
        self._loop = StepLoop(engine, self._scheduler, spans, meter)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:  # noqa: ARG002
        """Answer each item of one message once; credit is for streams."""
        return pb.VerifyResponse(answers=await respond_all(request.items, self._respond))

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        """Answer items as their results come; the items end with the stream."""
        tickets: _Tickets = {}
        respond = partial(self._respond, tickets=tickets)
        async with aclosing(
            respond_stream(request_iterator, respond, self._loop.draining, partial(self._extend, tickets))
        ) as batches:
            async for responses in batches:
                yield pb.VerifyStreamResponse(answers=responses)

    async def GetTargetInfo(
        self,
        request: pb.GetTargetInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetTargetInfoResponse:
        """Return what this target serves, its incarnation and its load."""
        return self._describe()

    def facts(self) -> Facts:
        """Return the facts for the lease of this replica."""
        return Facts(self._describe(), self._table.cached_prefixes(_MAX_CACHED_PREFIXES))

    async def quiet(self) -> None:
        """Return once the live sessions have ended on their own."""
        await self._loop.quiet(_QUIET_S)

    async def drain(self) -> None:
        """Refuse new requests; the open ones end with their next result."""
        await self._loop.drain()

    async def close(self) -> None:
        """End the loop and its thread."""
        await self._loop.close()

    async def _respond(
        self, item: pb.VerifyItem, tickets: _Tickets | None = None
    ) -> AsyncGenerator[pb.VerifyAnswer]:
        """Yield the responses to a request: validate, submit, await.

        `tickets` holds the running requests of a stream by id; without it there is no credit. Closing the
        generator gives the request up.
        """
        span, ticket = VerifySpan(self._spans, item), None
        request_key = (item.slice.session_id, item.slice.request_id)
        try:
            request = self._read(item)
            if tickets is None:
                request = replace(request, credit=0)
            ticket = self._loop.submit(request, span.span)
            if tickets is not None:
                tickets[request_key] = ticket
            while not ticket.ended:
                result = await ticket.next()
                span.answered(result)
                yield answer_of(item, result.outcome, self._engine.info.fingerprint)
        except Exception as error:  # noqa: BLE001  # one request must not fail the others
            status = failure_status(error, item.slice.session_id, span)
            yield pb.VerifyAnswer(session_id=request_key[0], request_id=request_key[1], status=status)
        finally:
            if ticket is not None:
                self._loop.cancel(ticket)
                if tickets is not None and tickets.get(request_key) is ticket:
                    del tickets[request_key]
            span.end()

    def _extend(self, tickets: _Tickets, message: pb.Extension) -> None:
        """Extend a running request, or end it with the status of an invalid extension."""
        ticket = tickets.get((message.session_id, message.request_id))
        if ticket is None:
            return
        try:
            extension = read_extension(message, self._engine.info)
        except GalleyError as error:
            self._loop.refuse(ticket, error)
        else:
            self._loop.extend(ticket, extension)

    def _read(self, item: pb.VerifyItem) -> VerifyRequest:
        return read_item(
            item,
            self._engine.info,
            self._max_draft_tokens,
            now_ns=time.monotonic_ns(),
            epoch_ns=time.time_ns(),
        )

    def _describe(self) -> pb.GetTargetInfoResponse:
        info = self._engine.info
        return pb.GetTargetInfoResponse(
            model=info.model,
            tokenizer_hash=info.tokenizer_hash,
            context_window=info.context_window,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            fingerprint=info.fingerprint,
            deterministic=info.deterministic,
            incarnation=self._incarnation,
            max_draft_tokens=self._max_draft_tokens,
            dtype=info.dtype,
            device=info.device,
            ranks=info.ranks,
            kv_block_tokens=info.kv_block_tokens,
            kv_blocks_total=self._table.total,
            kv_blocks_free=self._table.free,
            queue_depth=self._scheduler.queue_depth,
            row_costs=[pb.RowCost(rows=rows, ns=ns) for rows, ns in self._times.points],
        )
