"""What the span of a request says of it, by the GenAI conventions and beyond.

What was asked and answered stands in it only where that is switched on: `content`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.util.types import AnyValue

from galley.core import names
from galley.core.answer.answer import Ending, SessionSpec
from galley.core.session.machine import Session
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.origin import operation_of
from services.gateway.telemetry.round_spans import Rounds

_LARGEST_INT = 2**63 - 1
"""OTLP has no larger one."""
_LONGEST_NAME = 128
"""Of a model that somebody asks for and nobody serves."""
_MOST_CONTENT = 65_536
"""Characters of a prompt or an answer: a collector refuses all that comes with a span that is too large."""


@dataclass(slots=True)
class Sums:
    """What a stream adds up while it goes on."""

    ttft_ns: int | None = None
    moves: int = 0
    stalled_ns: int = 0

    def attributes(self) -> dict[str, AnyValue]:
        """As they stand."""
        told: dict[str, AnyValue] = {names.MOVES: self.moves, names.CLIENT_STALLED_NS: self.stalled_ns}
        if self.ttft_ns is not None:
            told |= {names.TTFT_NS: self.ttft_ns, names.TIME_TO_FIRST_CHUNK: self.ttft_ns / 1e9}
        return told


class Asked(NamedTuple):
    """A request as far as it can be told before it is read any further."""

    name: str
    attributes: dict[str, AnyValue]


def asked_of(
    request: pb.GenerateRequest | pb.ResumeRequest, served: str, address: str, *, content: bool
) -> Asked:
    """`served` is the model that is; a span is named by no other, for anybody may ask for anything."""
    model, operation = served, operation_of(request)
    attributes: dict[str, AnyValue] = {}
    if isinstance(request, pb.GenerateRequest):
        model = request.model[:_LONGEST_NAME] or served
        if content:
            attributes[names.INPUT_MESSAGES] = _input(request)
    attributes |= {names.OPERATION: operation, names.REQUEST_MODEL: model}
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        attributes |= {names.SERVER_ADDRESS: host.strip("[]"), names.SERVER_PORT: int(port)}
    return Asked(span_name(operation, model if model == served else ""), attributes)


def span_name(operation: str, model: str) -> str:
    """As the conventions have it."""
    return f"{operation} {model}" if model else operation


def session_of(spec: SessionSpec, *, content: bool) -> dict[str, AnyValue]:
    """What was asked for, checked and with its defaults."""
    sampling = spec.sampling
    attributes: dict[str, AnyValue] = {
        names.SESSION_ID: spec.session_id,
        names.RESPONSE_ID: spec.session_id,
        names.WORKLOAD: spec.workload,
        names.PRIORITY: spec.priority,
        names.SPECULATION_MODE: _mode(spec),
        names.MAX_TOKENS: spec.max_position - len(spec.prompt),
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.PRESENCE_PENALTY: sampling.presence_penalty,
        names.SEED: str(sampling.seed),
        names.STOP_COUNT: len(spec.stop_strings),
        names.INPUT_TOKENS: len(spec.prompt),
    }
    if sampling.top_k:
        attributes[names.TOP_K] = float(sampling.top_k)
    if sampling.seed <= _LARGEST_INT:
        attributes[names.REQUEST_SEED] = sampling.seed
    if content and spec.stop_strings:
        attributes[names.STOP_SEQUENCES] = spec.stop_strings
    return attributes


def end_of(session: Session, ending: Ending | None, rounds: Rounds, *, content: bool) -> dict[str, AnyValue]:
    """What came of it: sums and extremes, by which a collector may choose what to keep."""
    stats, answer = session.stats, session.answer
    attributes: dict[str, AnyValue] = {
        names.OUTPUT_TOKENS: session.logged_output,
        names.CACHED_TOKENS: rounds.cached_tokens,
        names.ROUNDS: stats.rounds,
        names.DRAFTED: stats.drafted,
        names.VERIFIED: stats.verified,
        names.ACCEPTED: stats.accepted,
        names.SLOWEST_ROUND_NS: rounds.slowest_ns,
        names.SLOWEST_ROUND_POSITION: rounds.slowest_position,
        names.SLOWEST_COMMIT_NS: rounds.slowest_commit_ns,
        names.FINGERPRINT: answer.fingerprint or "",
    }
    if ending is not None:
        attributes[names.FINISH_REASONS] = (ending.reason.value,)
    if content:
        text = "".join(answer.texts(0, session.logged_output))
        reason = {} if ending is None else {"finish_reason": ending.reason.value}
        attributes[names.OUTPUT_MESSAGES] = json.dumps([_message("assistant", text) | reason])
    return attributes


def _mode(spec: SessionSpec) -> str:
    if spec.k == 0:
        return "off"
    return "auto" if spec.auto else "fixed"


def _input(request: pb.GenerateRequest) -> str:
    """The prompt as the conventions write it."""
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
    return {"role": role, "parts": [{"type": "text", "content": text[:_MOST_CONTENT]}]}
