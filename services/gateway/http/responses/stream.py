"""The typed events of a response. Their sequence numbers depend on tokens alone, so any gateway continues.

Four events open a response, with numbers 0 to 3. An event of text has the number 3 plus the count of output
tokens up to its end. Four more close the response, with the numbers after that of the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Send

from galley.common.logs import log_internal
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.content import prefix_hash
from galley.core.errors import InvalidField
from services.gateway.generation import AnswerStream, ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format
from services.gateway.http.api.logprobs import chat_logprobs
from services.gateway.http.api.positions import DONE, Position
from services.gateway.http.api.stream import EventWriter
from services.gateway.http.responses.objects import ResponseObjects
from services.gateway.http.responses.record import Record
from services.gateway.http.transport.encoding import to_json, with_json
from services.gateway.http.transport.errors import error_reply

_LAST_OPENING = 3
_DELTA = "response.output_text.delta"
_PLACE = {"output_index": 0, "content_index": 0}

Event = tuple[str, Mapping[str, Any], str, bytes]
"""Its type, its fields, and the name and the JSON of one more."""


class ResponseStream(EventWriter):
    """Write one answer as the events of a response, from the place `former` that the client had reached."""

    def __init__(
        self,
        send: Send,
        record: Record,
        form: Format,
        model: ServedModel,
        former: Position,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(send, headers)
        self._record = record
        self._form = form
        self._model = model
        self._former = former
        self._number = 0

    async def begin(self, choices: Sequence[Choice]) -> None:
        [self._choice] = choices
        session = self._choice.session
        self._objects = ResponseObjects(self._record, self._model, session.answer, session=session)
        self._delta_head = b'{"type":"%b","item_id":"%b","output_index":0,"content_index":0,' % (
            _DELTA.encode(),
            self._objects.item_id.encode(),
        )
        self._number = _LAST_OPENING + self._former.index
        await self.open(session.spec.session_id)
        if not self._former.has_begun:
            await self.write(b"".join(self._opening()))

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        if isinstance(item, NumericsChanged):
            return
        choice.advance(item)
        self._number = _LAST_OPENING + choice.position.index
        if not (item.text or item.logprobs or self._form.token_ids):
            return
        token_bytes = self._model.tokenizer.token_bytes
        body: dict[str, Any] = {
            "sequence_number": self._number,
            "delta": item.text,
            "logprobs": chat_logprobs(item.tokens, item.logprobs, token_bytes) if item.logprobs else [],
        }
        if self._form.token_ids:
            body |= {"token_ids": item.tokens, "from_draft": [item.from_draft] * len(item.tokens)}
        data = self._delta_head + to_json(body)[1:]
        await self.write(_event(_DELTA, str(choice.position), data))

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        choice.end()
        if answer.ending is not None:
            self._objects = replace(self._objects, ending=answer.ending)
            await self._close(self._closing(choice.position, await self._objects.logprobs()))

    async def fail(self, error: BaseException) -> None:
        """Send an error after the response has begun, and end the response."""
        log_internal(error)
        reply = error_reply(error)
        response = await self._objects.whole(error={"code": reply.code, "message": reply.message})
        fields = {"type": "response.failed", "sequence_number": self._number + 1}
        await self._close(iter([_event("response.failed", "", with_json(fields, "response", response))]))

    async def _close(self, events: Iterator[bytes]) -> None:
        """Send the last events, each once the transport has room: with many logprobs they are large."""
        last = next(events)
        for event in events:
            await self.write(last)
            last = event
        await self.write(last, more=False)

    def _opening(self) -> Iterator[bytes]:
        running = self._objects.response()
        of = {"item_id": self._objects.item_id, **_PLACE}
        events: list[Event] = [
            ("response.created", {}, "response", running),
            ("response.in_progress", {}, "response", running),
            ("response.output_item.added", {"output_index": 0}, "item", self._objects.message()),
            ("response.content_part.added", of, "part", self._objects.part(text="")),
        ]
        ids = [*(str(Position(step=step)) for step in (1, 2, 3)), str(Position(has_begun=True))]
        return _written(events, ids, 0, self._former.step)

    def _closing(self, at: Position, logprobs: bytes) -> Iterator[bytes]:
        objects = self._objects
        of = {"item_id": objects.item_id, **_PLACE}
        part = objects.part(logprobs)
        message = objects.message(part)
        last = "response.completed" if objects.status == "completed" else "response.incomplete"
        events: list[Event] = [
            ("response.output_text.done", {**of, "text": objects.text}, "logprobs", logprobs),
            ("response.content_part.done", of, "part", part),
            ("response.output_item.done", {"output_index": 0}, "item", message),
            (last, {}, "response", objects.response(message)),
        ]
        ids = [*(str(replace(at, step=step)) for step in (1, 2, 3)), DONE]
        sent = self._former.step if self._former.has_ended else 0
        return _written(events, ids, self._number + 1, sent)


def position_after(number: int, output: Sequence[int], *, has_ended: bool) -> Position | None:
    """Return the place after the event of a sequence number; None after the last one. Raise InvalidField."""
    if number < _LAST_OPENING:
        return Position(step=number + 1)
    index = number - _LAST_OPENING
    step = index - len(output)
    if (step > 0 and not has_ended) or step > 4:
        raise InvalidField("starting_after", f"must be the number of an event of this response, got {number}")
    if step == 4:
        return None
    index = min(index, len(output))
    seen = prefix_hash(output[:index]) if index else b""
    return Position(index, seen, has_begun=True, has_ended=step > 0, step=max(step, 0))


def _written(events: Sequence[Event], ids: Sequence[str], first: int, sent: int) -> Iterator[bytes]:
    """Yield the events beyond the first `sent`, which are numbered from `first`."""
    numbered = enumerate(zip(events, ids, strict=True), first)
    for number, ((kind, fields, name, value), event_id) in list(numbered)[sent:]:
        data = with_json({"type": kind, "sequence_number": number, **fields}, name, value)
        yield _event(kind, event_id, data)


def _event(kind: str, name: str, data: bytes) -> bytes:
    head = f"event: {kind}\nid: {name}\n" if name else f"event: {kind}\n"
    return head.encode() + b"data: " + data + b"\n\n"
