"""Serve galley.v1.Draft: one generator a request, for the unary call and the stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from galley.common.draft_loading import ACCEPTED
from galley.common.models.grammars import ReplicaGrammars
from galley.common.registry.leases import draft_lease
from galley.common.server.reading import LongReader
from galley.common.server.requests import answer_of, failure_status, respond_all, respond_stream
from galley.common.tracing.item_spans import ItemSpan
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.common.wire.codec import read_slice
from galley.core import names
from galley.core.content import Miss
from galley.core.errors import InvalidField, Unimplemented, check_length, check_range
from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, States, state_bytes
from galley.core.lru import RecentKeys
from galley.core.routing.choice import DraftLease
from galley.core.trees import MAX_WIDTH
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.answers.exchange import AnswerExchange
from services.draft.answers.log import ANY_VOCABULARY
from services.draft.loop import Done, DraftLoop, Proposed, ProposeJob
from services.draft.replacement import DraftReplacement
from services.draft.upload import first_message

# A draft without a model accepts every token id (`ANY_VOCABULARY`) and length of the wire.
_ANY_LENGTH = 2**32
MAX_WORKLOAD_BYTES = 256


class DraftService(rpc.DraftServicer):
    """Serve the proposals of one loop."""

    grpc_services = ("galley.v1.Draft",)

    def __init__(
        self,
        loop: DraftLoop,
        info: pb.GetDraftInfoResponse,
        spans: SpanScope | None,
        exchange: AnswerExchange | None = None,
        grammars: ReplicaGrammars | None = None,
        replacement: DraftReplacement | None = None,
    ) -> None:
        """Serve `loop`; `info` describes it, and gets an incarnation that identifies this process.

        `exchange`, if given, is closed with the service. Without `grammars`, proposals may have tokens that a
        session's grammar does not allow. Without a `replacement`, the weights stay.
        """
        info.incarnation = secrets.token_hex(8)
        self._info = info
        self._spans = spans
        self._grammars = grammars
        self._replacement = replacement
        self._recent = RecentKeys()
        self._reader = LongReader(info.vocab_size or ANY_VOCABULARY, _ANY_LENGTH)
        self._loop = loop
        self._exchange = exchange

    async def Propose(
        self,
        request: pb.ProposeRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.ProposeResponse:
        """Respond to all requests of one message."""
        return pb.ProposeResponse(answers=await respond_all(request.items, self._respond))

    async def ProposeStream(
        self,
        request_iterator: AsyncIterator[pb.ProposeStreamRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        """Respond to requests as they complete."""
        async with aclosing(respond_stream(request_iterator, self._respond, self._loop.draining)) as batches:
            async for responses in batches:
                yield pb.ProposeStreamResponse(answers=responses)

    async def GetDraftInfo(
        self,
        request: pb.GetDraftInfoRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetDraftInfoResponse:
        """Return what this draft offers, and its incarnation."""
        return self._info

    async def LoadDraft(
        self,
        request_iterator: AsyncIterator[pb.LoadDraftRequest],
        context: Any,
    ) -> pb.LoadDraftResponse:
        """Replace the weights by those that are sent. Send the initial metadata once they may be sent."""
        first = await first_message(request_iterator)
        if self._replacement is None:
            raise Unimplemented("LoadDraft")

        async def accept() -> None:
            await context.send_initial_metadata(((ACCEPTED, "1"),))

        return pb.LoadDraftResponse(version=await self._replacement.load(first, request_iterator, accept))

    def lease(self, address: str) -> DraftLease:
        sessions = self._recent.count(time.monotonic_ns())
        return draft_lease(address, self._info, sessions=sessions, queue_depth=self._loop.queue_depth)

    async def drain(self) -> None:
        await self._loop.drain()

    async def close(self) -> None:
        await self._loop.close()
        if self._exchange is not None:
            await self._exchange.close()

    async def _respond(self, item: pb.ProposeItem) -> AsyncGenerator[pb.ProposeAnswer]:
        span, outcome = ItemSpan(self._spans, names.PROPOSE, "draft", item.slice), "cancelled"
        began_ns = time.monotonic_ns()
        try:
            long = await self._reader.read(item.slice)
            job = read_item(item, self._info, long[0] if long is not None else None)
            if span.span is not None:
                span.span.attributes |= {names.K: job.k, names.STRATEGY: job.strategy}
            self._recent.add(job.slice.key, time.monotonic_ns())
            done = await self._propose(job, item.slice.remaining_ns, began_ns, span.span)
            _set_result(span.span, done)
            response = answer_of(pb.ProposeAnswer, item.slice, done.outcome, partial(_result_of, done=done))
            span.answered(done.outcome)
            outcome = response.WhichOneof("outcome") or "error"
        except Exception as error:  # noqa: BLE001  # one request must not fail the others
            outcome, session_id = "error", item.slice.session_id
            response = pb.ProposeAnswer(
                session_id=session_id,
                request_id=item.slice.request_id,
                status=failure_status(error, session_id, span),
            )
        finally:
            if self._loop.meter is not None:
                self._loop.meter.ended(item.strategy or self._info.default_strategy, outcome)
            span.end()
        yield response

    async def _propose(
        self, job: ProposeJob, remaining_ns: int, began_ns: int, span: LightSpan | None
    ) -> Done:
        """Return the outcome of `job`, of whose time `remaining_ns` were left at `began_ns`."""
        if job.slice.grammar_hash and self._grammars is not None:
            compiled = await self._grammars.compiled(job.slice, _remaining(remaining_ns, began_ns))
            if isinstance(compiled, Miss):
                return Done(compiled, queue_ns=0, compute_ns=0)
            job = replace(job, grammar=compiled)
        return await self._loop.submit(job, _remaining(remaining_ns, began_ns), span)


def _remaining(remaining_ns: int, began_ns: int) -> int:
    """Return what is left now of the time that was left at `began_ns`; 0 is no deadline."""
    return max(1, remaining_ns - (time.monotonic_ns() - began_ns)) if remaining_ns else 0


def read_item(
    item: pb.ProposeItem, info: pb.GetDraftInfoResponse, tokens: Sequence[int] | None = None
) -> ProposeJob:
    """Return the job of `item`, defaults applied. Raise InvalidField or Unimplemented, naming the field.

    `tokens` are those of a long slice, which were read before.
    """
    vocab_size = info.vocab_size or ANY_VOCABULARY
    read = read_slice(item.slice, vocab_size=vocab_size, context_window=_ANY_LENGTH, tokens=tokens)
    check_range("k", item.k, most=info.max_draft_tokens)
    check_range("width", item.width, most=MAX_WIDTH)
    check_length("workload", item.workload.encode(), MAX_WORKLOAD_BYTES, "bytes")
    strategy = item.strategy or info.default_strategy
    if strategy not in info.strategies:
        raise InvalidField("strategy", f"must be one of {', '.join(info.strategies)}, got {strategy!r}")
    if item.ahead >= read.position:
        raise InvalidField("ahead", f"must be < {read.position} (all tokens), got {item.ahead}")
    states = _states_of(item, info, read.position - item.ahead)
    return ProposeJob(read, item.k, strategy, item.ahead, item.workload, width=item.width, states=states)


def _states_of(item: pb.ProposeItem, info: pb.GetDraftInfoResponse, confirmed: int) -> States:
    """Return the target's states of the first `confirmed` tokens that came with `item`."""
    if not item.features:
        return NO_STATES
    token_bytes = state_bytes(len(info.feature_layers), info.feature_size)
    if not token_bytes:
        raise Unimplemented("features")
    tokens, rest = divmod(len(item.features), token_bytes)
    if rest or tokens > MAX_FEATURE_TOKENS:
        bound = f"must be {token_bytes} bytes a token, of at most {MAX_FEATURE_TOKENS} tokens"
        raise InvalidField("features", f"{bound}, got {len(item.features)}")
    if item.features_position + tokens > confirmed:
        bound = f"must be of tokens before {confirmed} (confirmed ones)"
        raise InvalidField("features", f"{bound}, got {tokens} from {item.features_position} on")
    return States(item.features_position, tokens, item.features)


def _set_result(span: LightSpan | None, done: Done) -> None:
    """Set the times of a finished request on its `span`, and the size of its proposal."""
    if span is None:
        return
    span.attributes |= {
        names.QUEUE_NS: done.queue_ns,
        names.COMPUTE_NS: done.compute_ns,
        names.BATCH_SESSIONS: done.sessions,
    }
    if isinstance(done.outcome, Proposed):
        span.attributes |= {
            names.DRAFTED: len(done.outcome.draft_tokens),
            names.KV_LEN: done.outcome.kv_len,
        }


def _result_of(proposed: Proposed, done: Done) -> pb.ProposeResult:
    return pb.ProposeResult(
        position=proposed.position,
        prefix_hash=proposed.prefix_hash,
        draft_tokens=proposed.draft_tokens,
        parents=proposed.parents,
        survival=proposed.survival,
        kv_len=proposed.kv_len,
        timing=pb.Timing(queue_ns=done.queue_ns, compute_ns=done.compute_ns),
        batch_sessions=done.sessions,
        used_features=proposed.used_features,
        sources=[pb.SourceRun(name=name, tokens=len(list(run))) for name, run in groupby(proposed.sources)],
    )
