"""The typed events of a response whose answer has parts. Their numbers depend on tokens alone.

Two events open a response. A token, counted from 1, has 32 numbers for the events that it causes; the events
that close the response have those of one token more. Deltas of one item are one event, with the number of the
last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Send

from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.content import RunningHash
from galley.core.errors import InvalidField
from services.gateway.generation import ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format
from services.gateway.http.api.positions import DONE, Position
from services.gateway.http.api.stream import EventWriter
from services.gateway.http.responses.items import Event, PartsReader
from services.gateway.http.responses.record import Record
from services.gateway.http.responses.stream import ResponseEvents, ResponseStream, typed_event
from services.gateway.http.transport.encoding import with_json
from services.gateway.session.streams import AnswerStream

_OPENING = 2
_SLOTS = 32
_LARGE_BYTES = 64 * 1024


@dataclass(slots=True)
class _Written:
    """An event of the token after `at`; number `step` of that token's."""

    kind: str
    fields: dict[str, Any]
    at: Position

    def joins(self, kind: str, fields: Mapping[str, Any]) -> bool:
        return (
            self.kind == kind
            and kind.endswith(".delta")
            and self.fields["output_index"] == fields["output_index"]
        )

    def join(self, fields: Mapping[str, Any], at: Position) -> None:
        self.fields["delta"] += fields["delta"]
        for name in ("logprobs", "token_ids", "from_draft"):
            if name in fields:
                self.fields.setdefault(name, []).extend(fields[name])
        self.at = at

    @property
    def number(self) -> int:
        return _number_of(self.at)


class PartsStream(ResponseEvents):
    """Write an answer of several parts: reasoning, messages and calls."""

    async def begin(self, choices: Sequence[Choice]) -> None:
        session = self.describe(choices)
        self._parts = PartsReader(self._form, self._model, session.answer)
        self._tokens: list[tuple[int, bool]] = []
        """Those since the last one that caused an event, each with whether it was drafted."""
        self._hash: RunningHash | None = None
        self._place = Position(self._former.index, self._former.seen_hash, has_begun=True)
        self._number = _number_of(self._former if self._former.has_begun else self._place)
        await self.open(session.spec.session_id)
        if not self._former.has_begun:
            response = self._objects.response()
            for number in range(self._former.step, _OPENING):
                kind = ("response.created", "response.in_progress")[number]
                place = Position(step=1) if number == 0 else Position(has_begun=True)
                fields = {"type": kind, "sequence_number": number}
                await self.write(typed_event(kind, str(place), with_json(fields, "response", response)))

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        if isinstance(item, NumericsChanged):
            return
        written: list[_Written] = []
        seen = self._hash or await self._read_seen(choice)
        for index, (token, drafted) in enumerate(zip(item.tokens, item.from_draft, strict=True), item.index):
            if self._form.token_ids:
                self._tokens.append((token, drafted))
            self._add(written, self._parts.push(index))
            seen.add([token])
            self._place = Position(index + 1, seen.digest(), has_begun=True)
        await self._write(written)

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        if answer.ending is None:
            return
        if self._hash is None:
            await self._read_seen(choice)
        objects = replace(self._objects, ending=answer.ending)
        written: list[_Written] = []
        self._add(written, [*self._parts.finish(), *self._parts.close(objects.item_status)])
        await self._write(written)
        objects = await replace(objects, reasoning_tokens=self._parts.reasoning_tokens).with_lists()
        last = "response.completed" if objects.status == "completed" else "response.incomplete"
        number = _OPENING + (self._place.index + 1) * _SLOTS
        fields = {"type": last, "sequence_number": number, **self._take_tokens()}
        response = objects.response(await self._parts.items_json())
        await self.write(typed_event(last, DONE, with_json(fields, "response", response)), more=False)

    async def _read_seen(self, choice: Choice) -> RunningHash:
        """Read the tokens that the client has; not before the answer has them (`Choice.has_advanced`)."""
        end = self._former.index
        await self._parts.skip(end)
        self._hash = RunningHash(choice.session.answer.output[:end])
        self._place = Position(end, self._hash.digest(), has_begun=True)
        return self._hash

    async def _write(self, written: Sequence[_Written]) -> None:
        """Send events together, but large ones each once the transport has room."""
        ready, number = b"", self._number
        for one in written:
            data = await self._parts.event_json(one.kind, one.number, one.fields)
            if ready and len(ready) + len(data) > _LARGE_BYTES:
                await self.write(ready)
                ready, self._number = b"", number
            ready, number = ready + typed_event(one.kind, str(one.at), data), one.number
        if ready:
            await self.write(ready)
            self._number = number

    def _add(self, written: list[_Written], events: Sequence[Event]) -> None:
        """Add the events of the next token, but for those that the client has.

        The first event of a token has the tokens since the one that caused an event before it.
        """
        if not events:
            return
        seen = self._former.step if self._former.has_begun and self._place.index == self._former.index else 0
        kind, fields = events[0]
        events = [(kind, {**fields, **self._take_tokens()}), *events[1:]]
        for step, (kind, fields) in enumerate(events, 1):
            if step <= seen:
                continue
            at = replace(self._place, step=step)
            if step == 1 and written and written[-1].joins(kind, fields):
                written[-1].join(fields, at)
            else:
                written.append(_Written(kind, fields, at))

    def _take_tokens(self) -> dict[str, Any]:
        """Return the tokens for the next event; the client has those before."""
        taken, self._tokens = self._tokens, []
        if not taken:
            return {}
        return {
            "token_ids": [token for token, _ in taken],
            "from_draft": [drafted for _, drafted in taken],
        }


def _number_of(at: Position) -> int:
    """Return the number of the event before this place."""
    return _OPENING + at.index * _SLOTS + min(at.step, _SLOTS) - 1


def place_after(number: int, length: int, most: int, *, has_ended: bool) -> Position | None:
    """Return the place after the event of a sequence number; None after the last one. Raise InvalidField.

    It has no hash. The answer has `length` tokens, and can have `most` unless it has ended.
    """
    if number < _OPENING:
        return Position(step=1) if number == 0 else Position(has_begun=True)
    index, step = divmod(number - _OPENING, _SLOTS)
    if has_ended and index == length + 1:
        return None
    if index > (length if has_ended else most):
        raise InvalidField("starting_after", f"must be the number of an event of this response, got {number}")
    return Position(index, has_begun=True, step=step + 1)


def response_stream(
    send: Send,
    record: Record,
    form: Format,
    model: ServedModel,
    former: Position,
    headers: Mapping[str, str],
) -> EventWriter:
    """Return what writes the events of a response, from the place `former` that the client had reached."""
    stream = PartsStream if form.has_parts else ResponseStream
    return stream(send, record, form, model, former, headers)
