"""Attributes of a request's span, by the GenAI semantic conventions and our own.

Prompts and answers are attributes only with `content`. A stored session keeps the operation and the trace of
the request that created it, so that a resumed stream has the same operation and links to that trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AnyValue

from galley.common.sockets import host_and_port
from galley.common.tracing.telemetry import context_from
from galley.core import names
from galley.core.answer.answer import Ending, SessionSpec
from galley.core.names import CHAT, TEXT_COMPLETION
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.spans import RoundSpans, describe_counts, describe_sources

_LARGEST_INT = 2**63 - 1
_MAX_MODEL_NAME = 128
_MAX_CONTENT = 65_536
"""Most characters of one message. A collector drops the whole batch of a span that is too large."""

OPERATION_FIELD = "operation"
"""Field of a stored session: the GenAI operation; absent for a text completion."""
TRACE_FIELD = "trace"
"""Field of a stored session: the traceparent of the request that created it; absent if not traced."""


@dataclass(slots=True)
class Sums:
    ttft_ns: int | None = None
    moves: int = 0
    stalled_ns: int = 0


def describe_request(
    request: pb.GenerateRequest | pb.ResumeRequest, model: str, address: str, *, content: bool
) -> tuple[str, dict[str, AnyValue]]:
    """Return name and attributes of the span of a request to the server of `model` at `address` (host:port).

    The request is not validated yet. The span is named after `model` only: callers may request any name.
    """
    requested, operation = model, operation_of(request)
    attributes: dict[str, AnyValue] = {}
    if isinstance(request, pb.GenerateRequest):
        requested = (request.lora or request.model)[:_MAX_MODEL_NAME] or model
        if content:
            attributes[names.INPUT_MESSAGES] = _input(request)
    attributes |= {names.OPERATION: operation, names.REQUEST_MODEL: requested}
    host, port = host_and_port(address)
    attributes |= {names.SERVER_ADDRESS: host, names.SERVER_PORT: port}
    return span_name(operation, model if requested == model else ""), attributes


def span_name(operation: str, model: str) -> str:
    return f"{operation} {model}" if model else operation


def session_attributes(spec: SessionSpec, *, content: bool) -> dict[str, AnyValue]:
    """Return the parameters of a session, with defaults applied."""
    sampling = spec.sampling
    attributes: dict[str, AnyValue] = {
        names.SESSION_ID: spec.session_id,
        names.RESPONSE_ID: spec.session_id,
        names.WORKLOAD: spec.workload,
        names.PRIORITY: spec.priority,
        names.SPECULATION_MODE: "off" if spec.k == 0 else "auto" if spec.auto else "fixed",
        names.MAX_TOKENS: spec.max_position - len(spec.prompt),
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.PRESENCE_PENALTY: sampling.presence_penalty,
        names.SEED: str(sampling.seed),
        names.STOP_COUNT: len(spec.stop_strings),
        names.INPUT_TOKENS: len(spec.prompt),
    }
    if spec.grammar is not None:
        attributes[names.GRAMMAR_KIND] = spec.grammar.kind
    if sampling.top_k:
        attributes[names.TOP_K] = float(sampling.top_k)
    if sampling.seed <= _LARGEST_INT:
        attributes[names.REQUEST_SEED] = sampling.seed
    if content and spec.stop_strings:
        attributes[names.STOP_SEQUENCES] = spec.stop_strings
    return attributes


def result_attributes(
    session: Session, ending: Ending | None, rounds: RoundSpans, sums: Sums, *, content: bool
) -> dict[str, AnyValue]:
    stats, answer = session.stats, session.answer
    attributes: dict[str, AnyValue] = {
        names.OUTPUT_TOKENS: session.logged_output,
        names.CACHED_TOKENS: min(stats.cached_tokens, len(session.spec.prompt)),
        names.ROUNDS: stats.rounds,
        names.DRAFTED: stats.drafted,
        names.VERIFIED: stats.verified,
        names.ACCEPTED: stats.accepted,
        names.SOURCES: describe_sources(stats.sources.values()),
        names.POSITIONS: describe_counts(stats.accepted_at, stats.verified_at),
        names.RANKS: describe_counts(stats.accepted_by_rank, stats.verified_by_rank),
        names.PROPOSALS: stats.proposals,
        names.PROPOSALS_WITH_FEATURES: stats.proposals_with_features,
        names.SLOWEST_ROUND_NS: rounds.slowest_ns,
        names.SLOWEST_ROUND_POSITION: rounds.slowest_position,
        names.SLOWEST_COMMIT_NS: rounds.slowest_commit_ns,
        names.FINGERPRINT: answer.fingerprint or "",
        names.MOVES: sums.moves,
        names.CLIENT_STALLED_NS: sums.stalled_ns,
    }
    if sums.ttft_ns is not None:
        attributes |= {names.TTFT_NS: sums.ttft_ns, names.TIME_TO_FIRST_CHUNK: sums.ttft_ns / 1e9}
    if ending is not None:
        attributes[names.FINISH_REASONS] = (ending.reason.value,)
    if content:
        text = "".join(answer.texts(0, session.logged_output))
        reason = {} if ending is None else {"finish_reason": ending.reason.value}
        attributes[names.OUTPUT_MESSAGES] = json.dumps([_message("assistant", text) | reason])
    return attributes


def _input(request: pb.GenerateRequest) -> str:
    match request.WhichOneof("input"):
        case "messages":
            turns = [_message(turn.role, turn.content) for turn in request.messages.messages]
        case "token_ids":
            ids = {"type": "token_ids", "content": list(request.token_ids.ids)}
            turns = [{"role": "user", "parts": [ids]}]
        case _:
            turns = [_message("user", request.text)]
    return json.dumps(turns)


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text[:_MAX_CONTENT]}]}


def operation_of(request: pb.GenerateRequest | pb.ResumeRequest) -> str:
    """Return the operation of a request; that of a resumed stream is known only once its session is read."""
    is_chat = isinstance(request, pb.GenerateRequest) and request.HasField("messages")
    return CHAT if is_chat else TEXT_COMPLETION


def stored_operation(fields: Mapping[str, bytes]) -> str:
    return CHAT if fields.get(OPERATION_FIELD) == CHAT.encode() else TEXT_COMPLETION


def stored_trace(fields: Mapping[str, bytes]) -> SpanContext:
    """Return the span of the request that created a session; an invalid one if it was not traced."""
    traceparent = fields.get(TRACE_FIELD, b"").decode(errors="replace")
    return trace.get_current_span(context_from(traceparent)).get_span_context()
