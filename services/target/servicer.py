"""The Target service: takes items by call and by stream, gives them to the loop, answers each."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from galley.common.metrics.registry import Registry
from galley.common.server.requests import answer_all, answer_or_status, answers_stream
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
from services.target.metrics import CountingPassMeter, PassMeter
from services.target.registration import Facts
from services.target.spans import VerifySpan

# Of the hashes of cached blocks that a lease names: those of the prompts that many sessions begin with.
_TOLD_PREFIXES = 512
# A session without an item for so long has ended, or waits for a client that will find another replica.
_QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica takes: draft tokens in an item, items that wait, sessions, rows of a pass, lingering."""

    max_draft_tokens: int = 16
    max_waiting: int = 1024
    max_sessions: int = 64
    max_rows: int = MAX_ROWS
    max_linger_ms: float = 0.0


class TargetService(rpc.TargetServicer):
    """Serves one engine; `incarnation` names this life of the process, whose caches end with it."""

    grpc_services = ("galley.v1.Target",)

    def __init__(
        self,
        engine: TargetEngine,
        times: StepTimes,
        spans: SpanScope | None,
        limits: Limits,
        metrics: Registry | None = None,
    ) -> None:
        """`times` is what a pass of the engine costs, and `spans` is None where traces are off.

        To be made within the running event loop.
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
        meter = PassMeter()
        if metrics is not None:
            meter = CountingPassMeter(metrics, self._scheduler, self._table)
        self._loop = StepLoop(engine, self._scheduler, spans, meter)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:  # noqa: ARG002
        """Answer all items of one request, each once: credit is for streams."""
        return pb.VerifyResponse(answers=await answer_all(request.items, self._answer))

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        """Answer items as their results come; the items end with the stream."""
        stream = _VerifyStream(self)
        async with aclosing(
            answers_stream(request_iterator, stream.answers, self._loop.draining, stream.extend)
        ) as batches:
            async for answers in batches:
                yield pb.VerifyStreamResponse(answers=answers)

    async def GetTargetInfo(
        self,
        request: pb.GetTargetInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetTargetInfoResponse:
        """Say what is served here, by which life of this process, and how it is doing."""
        return self._describe()

    def facts(self) -> Facts:
        """What a lease says of this replica now."""
        return Facts(self._describe(), self._table.cached_prefixes(_TOLD_PREFIXES))

    async def quiet(self) -> None:
        """Return once the live sessions have ended by themselves."""
        await self._loop.quiet(_QUIET_S)

    async def drain(self) -> None:
        """Refuse new items; those that are here end with their next result."""
        await self._loop.drain()

    async def close(self) -> None:
        """End the loop and its thread."""
        await self._loop.close()

    def asked(self, item: pb.VerifyItem) -> Asked:
        """An item that has come; to be given to `end`."""
        return Asked(item, VerifySpan(self._spans, item))

    async def first_or_status(self, asked: Asked, *, credit: bool) -> pb.VerifyAnswer:
        """Validate the item, give it to the loop, and say its first answer."""

        async def first() -> pb.VerifyAnswer:
            request = self._read(asked.item)
            if not credit:
                request = replace(request, credit=0)
            asked.ticket = self._loop.submit(request, asked.span.span)
            return await self._next_of(asked, asked.ticket)

        return await asked.or_status(first())

    async def next_or_status(self, asked: Asked, ticket: Ticket) -> pb.VerifyAnswer:
        """The next answer of an item under way."""
        return await asked.or_status(self._next_of(asked, ticket))

    async def _next_of(self, asked: Asked, ticket: Ticket) -> pb.VerifyAnswer:
        """Raises the outcome if it is an error."""
        answer = await ticket.next()
        asked.span.answered(answer)
        return answer_of(asked.item, answer.outcome, self._engine.info.fingerprint)

    def extend(self, ticket: Ticket, message: pb.Extension) -> None:
        """Tell an item under way more; one that is told nonsense is closed with the status of that."""
        try:
            told = read_extension(message, self._engine.info)
        except GalleyError as error:
            self._loop.refuse(ticket, error)
        else:
            self._loop.extend(ticket, told)

    def end(self, asked: Asked) -> None:
        """Nothing more is wanted of it: give it up if it has begun and not ended."""
        if asked.ticket is not None:
            self._loop.cancel(asked.ticket)
        asked.span.end()

    async def _answer(self, item: pb.VerifyItem) -> pb.VerifyAnswer:
        asked = self.asked(item)
        try:
            return await self.first_or_status(asked, credit=False)
        finally:
            self.end(asked)

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


class Asked:
    """An item that was asked for, its span, and its ticket once the loop has it."""

    def __init__(self, item: pb.VerifyItem, span: VerifySpan) -> None:
        self.item = item
        self.span = span
        self.ticket: Ticket | None = None

    async def or_status(self, answer: Coroutine[Any, Any, pb.VerifyAnswer]) -> pb.VerifyAnswer:
        """The answer, or the status of what it raises."""
        return await answer_or_status(answer, self._refusal, self.item.slice.session_id, self.span)

    def _refusal(self, status: pb.ItemStatus) -> pb.VerifyAnswer:
        named = self.item.slice
        return pb.VerifyAnswer(session_id=named.session_id, request_id=named.request_id, status=status)


class _VerifyStream:
    """The items of one VerifyStream by name, so that they can be told more."""

    def __init__(self, service: TargetService) -> None:
        self._service = service
        self._asked: dict[tuple[str, int], Asked] = {}

    async def answers(self, item: pb.VerifyItem) -> AsyncGenerator[pb.VerifyAnswer]:
        """All answers of an item, as they come; given up when this is closed."""
        name = (item.slice.session_id, item.slice.request_id)
        asked = self._asked[name] = self._service.asked(item)
        try:
            yield await self._service.first_or_status(asked, credit=True)
            while asked.ticket is not None and not asked.ticket.ended:
                yield await self._service.next_or_status(asked, asked.ticket)
        finally:
            self._service.end(asked)
            if self._asked.get(name) is asked:
                del self._asked[name]

    def extend(self, message: pb.Extension) -> None:
        """Tell an item more; ignored if it has ended."""
        asked = self._asked.get((message.session_id, message.request_id))
        if asked is not None and asked.ticket is not None:
            self._service.extend(asked.ticket, message)
