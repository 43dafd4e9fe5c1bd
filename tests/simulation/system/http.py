"""HTTP over the simulated network: the gateway's own handlers, with a check of each event that they send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Message

from services.gateway.auth.authentication import identify
from services.gateway.generation import Generation
from services.gateway.http.api.answers import Answers
from services.gateway.http.api.choices import ChoiceRunner
from services.gateway.http.api.schemas import CompletionRequest
from services.gateway.http.api.sessions import Sessions
from services.gateway.http.responses.handlers import Responses
from services.gateway.http.responses.schemas import ResponseRequest
from services.gateway.http.transport.front import CALL
from services.gateway.http.transport.http_call import HttpCall
from tests.fakes.truth import letters
from tests.simulation.ledger import Ledger
from tests.simulation.system.call import SimContext, current_call
from tests.simulation.system.loop import Process
from tests.simulation.system.watched import Keys, Sent, Watch

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request for a completion or a response, or else for the events of a session after `last_id`."""

    body: dict[str, Any] | None = None
    session_id: str = ""
    last_id: str = ""


class Letters:
    """The tokenizer of a model that does not reason: each token is a letter."""

    reasoning = None

    def token_bytes(self, token: int) -> bytes:
        return letters([token]).encode()

    def encode_output(self, text: str, _most_tokens: int) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], _most_tokens: int, _tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        return [ord(letter) - ord("A") for message in messages for letter in message["content"]]

    def tokens_of_reasoning(self, _prompt: Sequence[int], *, is_chat: bool) -> tuple[None, None]:
        return None, None


class SimHttp:
    """The handlers of one gateway, behind its authentication."""

    def __init__(self, world: World, process: Process, generation: Generation) -> None:
        runner = ChoiceRunner(generation)
        self._world = world
        self._process = process
        self._answers = Answers(runner, strict=True)
        self._responses = Responses(runner, strict=True)
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
            try:
                async with asyncio.timeout(self._world.schedule.client_s):
                    await respond(message)
            except TimeoutError:  # as `HttpConnection` ends one that its client does not read
                context.hang_up()
                raise asyncio.CancelledError from None

        try:
            await identify(self._keys, call, is_stream=True)
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
        if request.body is None:
            response = await self._sessions.events(request.session_id, Request(scope), "")
        elif "input" in request.body:
            asked = ResponseRequest.model_validate(request.body)
            response = await self._responses.create(asked, Request(scope))
        else:
            body = CompletionRequest.model_validate(request.body)
            response = await self._answers.complete(body, Request(scope))
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
            return
        for _, data in events_in(message["body"]):
            parts = data.get("choices", (data,))  # a response has but one
            tokens = [token for part in parts for token in part.get("token_ids", ())]
            if tokens:
                self.has_tokens = True
                index = self._next_index
                self._next_index += len(tokens)
                self._ledger.streamed(self.session_id, index, tokens, current_call())
                if "system_fingerprint" in data:
                    self._ledger.named(self.session_id, index, self._next_index, data["system_fingerprint"])
            for item in data.get("response", {}).get("output", ()):
                self._ledger.told(self.session_id, "".join(part["text"] for part in item["content"]))


def index_of(event_id: str) -> int:
    return int(event_id.partition(".")[0].rstrip("!")) if event_id not in {"", "~"} else 0


def session_id_of(message: Message) -> str:
    headers: dict[bytes, bytes] = dict(message["headers"])
    return headers[b"x-galley-session-id"].decode()


@lru_cache(maxsize=64)  # the gateway's check and the client read the same body
def events_in(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the id and the data of each event; the last one of a completion has no data."""
    found = []
    for event in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n") if line)
        if fields:
            data = fields["data"]
            found.append((fields.get("id", ""), {} if data == "[DONE]" else json.loads(data)))
    return found
