"""A client of HTTP in the simulation: it reads the events of completions and responses.

It is a stub for the product's Python client, which retries as over gRPC. It continues streams by the ids of
their events alone (`Last-Event-ID`), and takes the index of a token from its place in the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import grpc

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import letters
from tests.simulation.ledger import Ledger
from tests.simulation.system.call import Call, error_of
from tests.simulation.system.http import SimRequest, events_in, index_of, session_id_of
from tests.simulation.system.wire import SimChannel

_MODES = {
    pb.Speculation.MODE_AUTO: "auto",
    pb.Speculation.MODE_OFF: "off",
    pb.Speculation.MODE_FIXED: "fixed",
}
_REASONS = {
    "stop": pb.Finished.REASON_STOP,
    "length": pb.Finished.REASON_LENGTH,
    "abort": pb.Finished.REASON_ABORTED,
}
_STATUSES = {
    "completed": pb.Finished.REASON_STOP,
    "incomplete": pb.Finished.REASON_LENGTH,
    "cancelled": pb.Finished.REASON_ABORTED,
}


class HttpStub:
    """What `AsyncClient` needs of a stub. `ids` has the id of the last event before each index."""

    def __init__(
        self, channel: SimChannel, abort: Any, ids: dict[int, str], ledger: Ledger, *, as_response: bool
    ) -> None:
        self.Abort = abort
        self._open = channel.http("/Http")
        self._ids = ids
        self._ledger = ledger
        self._body = _response_body if as_response else _completion_body
        self._kind = _ResponseCall if as_response else _CompletionCall

    def Generate(self, request: pb.GenerateRequest, **options: Any) -> _EventCall:  # as gRPC's
        return self._kind(self._open(SimRequest(self._body(request)), **options), 0, self._ids, self._ledger)

    def Resume(self, request: pb.ResumeRequest, **options: Any) -> _EventCall:
        at = request.next_index
        self._ledger.met["resumed by Last-Event-ID"] += bool(at)
        asked = SimRequest(session_id=request.session_id, last_id=self._ids[at] if at else "")
        return self._kind(self._open(asked, **options), at, self._ids, self._ledger)


def _completion_body(request: pb.GenerateRequest) -> dict[str, Any]:
    return {
        "prompt": list(request.token_ids.ids),
        "max_tokens": request.max_tokens,
        "logprobs": request.logprobs if request.HasField("logprobs") else None,
        "structured_outputs": _form(request.structured_output),
        "prediction": _prediction(request.prediction.token_ids.ids),
        **_common_body(request),
    }


def _form(form: pb.StructuredOutput) -> dict[str, Any] | None:
    kind = form.WhichOneof("kind")
    if kind is None:
        return None
    return {kind: list(form.choice.choices) if kind == "choice" else getattr(form, kind)}


def _prediction(tokens: Sequence[int]) -> dict[str, str] | None:
    return {"type": "content", "content": letters(tokens)} if tokens else None


def _response_body(request: pb.GenerateRequest) -> dict[str, Any]:
    return {
        "input": letters(request.token_ids.ids),
        "max_output_tokens": request.max_tokens,
        "top_logprobs": request.logprobs if request.HasField("logprobs") else None,
        **_common_body(request),
    }


def _common_body(request: pb.GenerateRequest) -> dict[str, Any]:
    speculation = request.speculation
    return {
        "stream": True,
        "return_token_ids": True,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "seed": request.sampling.seed,
        "idempotency_key": request.idempotency_key,
        "continue_without_client": request.continue_without_client,
        "speculation": {
            "mode": _MODES[speculation.mode],
            "k": speculation.k if speculation.HasField("k") else None,
            "width": speculation.width if speculation.HasField("width") else None,
        },
    }


class _EventCall(ABC):
    """The events of one HTTP response, as those of gRPC."""

    def __init__(self, call: Call, index: int, ids: dict[int, str], ledger: Ledger) -> None:
        self._call = call
        self._index = index
        self._ids = ids
        self._ledger = ledger
        self._pending: deque[pb.GenerateResponse] = deque()
        self._is_done = False

    def cancel(self) -> bool:
        return self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        while not self._pending:
            message = await anext(self._call)
            if message["type"] == "http.response.start":
                return _response(started=pb.Started(session_id=session_id_of(message)))
            for event_id, data in events_in(message["body"]):
                if self._is_done:
                    self._ledger.violate("an event follows the last one")
                self._pending.extend(self._events(event_id, data))
        return self._pending.popleft()

    @abstractmethod
    def _events(self, event_id: str, data: dict[str, Any]) -> list[pb.GenerateResponse]: ...

    def _chunk(
        self, event_id: str, part: dict[str, Any], text: str, values: Sequence[float]
    ) -> pb.GenerateResponse:
        chunk = pb.Chunk(
            index=self._index,
            token_ids=part["token_ids"],
            text=text,
            from_draft=part["from_draft"],
            logprobs=[pb.PositionLogprobs(logprob=value) for value in values],
        )
        self._index += len(chunk.token_ids)
        self._ids[self._index] = event_id
        return _response(chunk=chunk)


class _CompletionCall(_EventCall):
    _has_finished = False

    def _events(self, event_id: str, data: dict[str, Any]) -> list[pb.GenerateResponse]:
        if "error" in data:
            raise error_of(grpc.StatusCode[data["error"]["code"].upper()], data["error"]["message"])
        if not data:
            self._is_done = True
            if not self._has_finished:
                self._ledger.violate("[DONE] comes before the end of its answer")
            return []
        [choice] = data["choices"]
        if choice["finish_reason"] is not None:
            self._has_finished = True
            return [_finished(_REASONS[choice["finish_reason"]], index_of(event_id))]
        values = (choice["logprobs"] or {}).get("token_logprobs", ())
        return [self._chunk(event_id, choice, choice["text"], values)]


class _ResponseCall(_EventCall):
    def _events(self, event_id: str, data: dict[str, Any]) -> list[pb.GenerateResponse]:
        match data["type"]:
            case "response.output_text.delta":
                values = [entry["logprob"] for entry in data["logprobs"]]
                return [self._chunk(event_id, data, data["delta"], values)]
            case "response.completed" | "response.incomplete":
                self._is_done = True
                response = data["response"]
                return [_finished(_STATUSES[response["status"]], response["usage"]["output_tokens"])]
            case "response.failed":
                error = data["response"]["error"]
                raise error_of(grpc.StatusCode[error["code"].upper()], error["message"])
            case _:
                return []


def _finished(reason: pb.Finished.Reason.ValueType, tokens: int) -> pb.GenerateResponse:
    return _response(finished=pb.Finished(reason=reason, usage=pb.Usage(output_tokens=tokens)))


def _response(**event: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(event=pb.StreamEvent(**event))
