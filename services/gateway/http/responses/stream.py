"""The typed events of a response. Their sequence numbers depend on tokens alone, so any gateway continues.

Four events open a response, with numbers 0 to 3. An event of text has the number 3 plus the count of output
tokens up to its end. Four more close the response, with the numbers after that of the last token.
`response.failed` has the number of the event before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Send

from galley.common.logs import log_internal
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import InvalidField
from galley.core.session.machine import Session
from services.gateway.generation import ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format
from services.gateway.http.api.logprobs import chat_logprobs
from services.gateway.http.api.positions import DONE, Position
from services.gateway.http.api.stream import EventWriter
from services.gateway.http.responses.objects import ResponseObjects
from services.gateway.http.responses.record import Record
from services.gateway.http.transport.encoding import to_json, with_json
from services.gateway.http.transport.errors import error_reply
from services.gateway.session.streams import AnswerStream

_LAST_OPENING = 3
_DELTA = "response.output_text.delta"
_PLACE = {"output_index": 0, "content_index": 0}

Event = tuple[str, Mapping[str, Any], str, Callable[[bytes], bytes]]
"""Its type, its fields, the name of one more, and what makes the JSON of that of the event's before."""


class ResponseEvents(EventWriter):
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
        """The number after which the client can continue: that of the last event, or of a later token."""

    def describe(self, choices: Sequence[Choice]) -> Session:
        """Take the response's only choice; return its session."""
        [choice] = choices
        session = choice.session
        self._objects = ResponseObjects(
            self._record, self._model, self._form, session.answer, session=session
        )
        return session

    async def fail(self, error: BaseException) -> None:
        """Send an error after the response has begun, and end the response.

        The event has the number of the one before it: a client that continues after it has missed nothing.
        """
        log_internal(error)
        reply = error_reply(error)
        # Without output: the session may have more tokens than the log.
        response = self._objects.response(error={"code": reply.code, "message": reply.message})
        fields = {"type": "response.failed", "sequence_number": self._number}
        await self.write(
            typed_event("response.failed", "", with_json(fields, "response", response)), more=False
        )


class ResponseStream(ResponseEvents):
    """Write an answer that is one text."""

    async def begin(self, choices: Sequence[Choice]) -> None:
        session = self.describe(choices)
        self._delta_head = b'{"type":"%b","item_id":"%b","output_index":0,"content_index":0,' % (
            _DELTA.encode(),
            self._objects.item_id.encode(),
        )
        self._number = _LAST_OPENING + self._former.index
        if self._former.has_ended:
            self._number += self._former.step
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
            body |= {"token_ids": item.tokens, "from_draft": item.from_draft}
        data = self._delta_head + to_json(body)[1:]
        await self.write(typed_event(_DELTA, str(choice.position), data))

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        choice.end()
        if answer.ending is not None:
            self._objects = await replace(self._objects, ending=answer.ending).with_lists()
            await self._close(choice.position, await self._objects.logprobs())

    def _opening(self) -> Iterator[bytes]:
        objects = self._objects
        of = {"item_id": objects.item_id, **_PLACE}
        events: list[Event] = [
            ("response.created", {}, "response", lambda _: objects.response()),
            ("response.in_progress", {}, "response", lambda response: response),
            ("response.output_item.added", {"output_index": 0}, "item", lambda _: objects.message()),
            ("response.content_part.added", of, "part", lambda _: objects.part(text="")),
        ]
        ids = [*(str(Position(step=step)) for step in (1, 2, 3)), str(Position(has_begun=True))]
        return _written(events, ids, 0, self._former.step)

    async def _close(self, at: Position, logprobs: bytes) -> None:
        """Send the last events, each once the transport has room: with many logprobs they are large."""
        objects = self._objects
        of = {"item_id": objects.item_id, **_PLACE}
        last = "response.completed" if objects.status == "completed" else "response.incomplete"
        events: list[Event] = [
            ("response.output_text.done", {**of, "text": objects.text}, "logprobs", lambda value: value),
            ("response.content_part.done", of, "part", objects.part),
            ("response.output_item.done", {"output_index": 0}, "item", objects.message),
            (last, {}, "response", objects.response),
        ]
        ids = [*(str(replace(at, step=step)) for step in (1, 2, 3)), DONE]
        sent = self._former.step if self._former.has_ended else 0
        first = _LAST_OPENING + at.index + 1
        for count, event in enumerate(_written(events, ids, first, sent, logprobs), sent + 1):
            await self.write(event, more=count < len(events))


def position_after(number: int, length: int, most: int, *, has_ended: bool) -> Position | None:
    """Return the place after the event of a sequence number; None after the last one. Raise InvalidField.

    It has no hash. The answer has `length` tokens, and can have `most` unless it has ended.
    """
    if number < _LAST_OPENING:
        return Position(step=number + 1)
    index = number - _LAST_OPENING
    step = max(index - length, 0) if has_ended else 0
    if step > 4 or index - step > most:
        raise InvalidField("starting_after", f"must be the number of an event of this response, got {number}")
    if step == 4:
        return None
    return Position(index - step, has_begun=True, has_ended=step > 0, step=step)


def _written(
    events: Sequence[Event], ids: Sequence[str], first: int, sent: int, value: bytes = b""
) -> Iterator[bytes]:
    """Yield the events beyond the first `sent`, which are numbered from `first`. Keep one value at a time."""
    for index, ((kind, fields, name, value_of), event_id) in enumerate(zip(events, ids, strict=True)):
        value = value_of(value)
        if index >= sent:
            of = {"type": kind, "sequence_number": first + index, **fields}
            yield typed_event(kind, event_id, with_json(of, name, value))


def typed_event(kind: str, name: str, data: bytes) -> bytes:
    head = f"event: {kind}\nid: {name}\n" if name else f"event: {kind}\n"
    return b"%bdata: %b\n\n" % (head.encode(), data)
