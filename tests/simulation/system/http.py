"""HTTP over the simulated network: the gateway's own handlers, and a client that reads their events.

The client is a stub for the product's Python client, which retries as over gRPC. It continues streams by the
ids of their events alone (`Last-Event-ID`), and takes the index of a token from its place in the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import grpc
from starlette.requests import Request
from starlette.types import Message

from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.auth.authentication import identify
from services.gateway.generation import Generation
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.choices import ChoiceRunner
from services.gateway.http.api.schemas import CompletionRequest
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.transport.front import CALL
from services.gateway.http.transport.http_call import HttpCall
from tests.fakes.truth import letters
from tests.simulation.ledger import Ledger
from tests.simulation.system.call import Call, SimContext, error_of
from tests.simulation.system.loop import Process
from tests.simulation.system.watched import Keys, Sent, Watch
from tests.simulation.system.wire import SimChannel

if TYPE_CHECKING:
    from tests.simulation.world import World

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


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request for a completion, or else for the events of a session after `last_id`."""

    body: dict[str, Any] | None = None
    session_id: str = ""
    last_id: str = ""


class _Letters:
    def token_bytes(self, token: int) -> bytes:
        return letters([token]).encode()


class SimHttp:
    """The handlers of one gateway, behind its authentication."""

    def __init__(self, world: World, process: Process, generation: Generation) -> None:
        tokenizer: Any = _Letters()
        model = replace(generation.model, tokenizer=tokenizer)
        runner = ChoiceRunner(replace(generation, model=model))
        self._world = world
        self._process = process
        self._answers = Answers(runner, strict=True)
        self._sessions = Sessions(runner)
        self._keys = Keys(world)
        self._watch = Watch(world, process)

    async def serve(
        self, request: SimRequest, context: SimContext, respond: Callable[[object], Awaitable[None]]
    ) -> None:
        remaining_s = context.time_remaining()
        until_s = None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
        call = HttpCall(context.invocation_metadata(), context.hang_up, until_s)
        sent = SentEvents(self._world.ledger, request.last_id)

        async def send(message: Message) -> None:
            if self._process.alive:
                sent.check_message(message)
            await respond(message)

        try:
            await identify(self._keys, call)
            await self._answer(request, call, send)
        except Exception as error:
            self._watch.raised(error)
            self._watch.refused(error, sent)
            raise
        finally:
            call.ended()

    async def _answer(self, request: SimRequest, call: HttpCall, send: Any) -> None:
        headers = [(b"last-event-id", request.last_id.encode())] if request.last_id else []
        scope: dict[str, Any] = {"type": "http", "headers": headers, CALL: call}
        if request.body is not None:
            body = CompletionRequest.model_validate(request.body)
            response = await self._answers.complete(body, Request(scope))
        else:
            response = await self._sessions.events(request.session_id, Request(scope), "")
        unused: Any = None
        await response(scope, unused, send)


class SentEvents(Sent):
    """Check the tokens of events against the log."""

    def __init__(self, ledger: Ledger, last_id: str) -> None:
        super().__init__(ledger)
        self._next_index = index_of(last_id)

    def check_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.session_id = session_id_of(message)
            self.began_s = asyncio.get_running_loop().time()
            return
        for _, data in events_in(message["body"]):
            tokens = [token for choice in data.get("choices", ()) for token in choice.get("token_ids", ())]
            if tokens:
                self.has_tokens = True
                index = self._next_index
                self._next_index += len(tokens)
                self._ledger.streamed(self.session_id, index, tokens)
                self._ledger.named(self.session_id, index, self._next_index, data["system_fingerprint"])


def index_of(event_id: str) -> int:
    return int(event_id.partition(".")[0].rstrip("!")) if event_id not in {"", "~"} else 0


def session_id_of(message: Message) -> str:
    headers: dict[bytes, bytes] = dict(message["headers"])
    return headers[b"x-galley-session-id"].decode()


@lru_cache(maxsize=64)  # the gateway's check and the client read the same body
def events_in(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the id and the data of each event; the last one has no data."""
    found = []
    for event in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n") if line)
        if fields:
            data = fields["data"]
            found.append((fields.get("id", ""), {} if data == "[DONE]" else json.loads(data)))
    return found


class HttpStub:
    """What `AsyncClient` needs of a stub. `ids` has the id of the last event before each index."""

    def __init__(self, channel: SimChannel, abort: Any, ids: dict[int, str], ledger: Ledger) -> None:
        self.Abort = abort
        self._open = channel.http("/Http")
        self._ids = ids
        self._ledger = ledger

    def Generate(self, request: pb.GenerateRequest, **options: Any) -> _EventCall:  # as gRPC's
        return _EventCall(self._open(SimRequest(_body(request)), **options), 0, self._ids, self._ledger)

    def Resume(self, request: pb.ResumeRequest, **options: Any) -> _EventCall:
        at = request.next_index
        self._ledger.met["resumed by Last-Event-ID"] += bool(at)
        asked = SimRequest(session_id=request.session_id, last_id=self._ids[at] if at else "")
        return _EventCall(self._open(asked, **options), at, self._ids, self._ledger)


def _body(request: pb.GenerateRequest) -> dict[str, Any]:
    speculation = request.speculation
    return {
        "prompt": list(request.token_ids.ids),
        "stream": True,
        "return_token_ids": True,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "seed": request.sampling.seed,
        "logprobs": request.logprobs if request.HasField("logprobs") else None,
        "idempotency_key": request.idempotency_key,
        "continue_without_client": request.continue_without_client,
        "speculation": {
            "mode": _MODES[speculation.mode],
            "k": speculation.k if speculation.HasField("k") else None,
        },
    }


class _EventCall:
    """The events of one response, as those of gRPC."""

    def __init__(self, call: Call, index: int, ids: dict[int, str], ledger: Ledger) -> None:
        self._call = call
        self._index = index
        self._ids = ids
        self._ledger = ledger
        self._pending: deque[pb.GenerateResponse] = deque()
        self._has_finished = self._is_done = False

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
                    self._ledger.violate("an event follows [DONE]")
                self._pending.extend(self._events(event_id, data))
        return self._pending.popleft()

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
            usage = pb.Usage(output_tokens=index_of(event_id))
            return [_response(finished=pb.Finished(reason=_REASONS[choice["finish_reason"]], usage=usage))]
        tokens = choice["token_ids"]
        values = (choice["logprobs"] or {}).get("token_logprobs", ())
        chunk = pb.Chunk(
            index=self._index,
            token_ids=tokens,
            text=choice["text"],
            from_draft=choice["from_draft"],
            logprobs=[pb.PositionLogprobs(logprob=value) for value in values],
        )
        self._index += len(tokens)
        self._ids[self._index] = event_id
        return [_response(chunk=chunk)]


def _response(**event: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(event=pb.StreamEvent(**event))
