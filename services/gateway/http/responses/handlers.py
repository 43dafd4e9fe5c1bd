"""The handlers of the Responses API. A response is the session of its id, with a record of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from fastapi import Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from galley.core import names
from galley.core.answer.answer import Answer, Chunk, Ending, NumericsChanged
from galley.core.errors import InvalidField, LogLost, UnknownSession
from galley.core.store import StoredSession
from services.gateway.auth.authentication import caller
from services.gateway.generation import ServedModel
from services.gateway.http.api.answers import CollectedAnswers, StreamedAnswers, idempotency_key
from services.gateway.http.api.choices import Choice, ChoiceRunner, Reader
from services.gateway.http.api.format import Format, stored_format
from services.gateway.http.api.positions import START, Position
from services.gateway.http.api.schemas import check_parameters
from services.gateway.http.responses.objects import PREFIX, ResponseObjects, input_items
from services.gateway.http.responses.parts import place_after, response_stream
from services.gateway.http.responses.record import Record, Turn, stored_record
from services.gateway.http.responses.requests import Translation, named_as_here
from services.gateway.http.responses.schemas import ResponseRequest
from services.gateway.http.responses.stream import position_after
from services.gateway.http.transport.encoding import json_text
from services.gateway.http.transport.errors import Refused
from services.gateway.http.transport.front import CALL
from services.gateway.http.transport.http_call import HttpCall
from services.gateway.session.streams import AnswerStream

ROUTE = "/v1/responses/{response_id}"


class Responses:
    """Refuse unknown parameters if `strict`, else ignore them."""

    def __init__(self, runner: ChoiceRunner, *, strict: bool) -> None:
        self._runner = runner
        self._generation = runner.generation
        self._strict = strict

    async def create(self, body: ResponseRequest, request: HttpRequest) -> Response:
        """Answer a text or a conversation."""
        call = request.scope[CALL]
        headers = check_parameters(body, strict=self._strict)
        former = await self._former(body.previous_response_id, call) if body.previous_response_id else ()
        await asyncio.sleep(0)  # a thousand turns take some ms to translate, as to check and to read
        model = self._generation.model
        translation = Translation(body, former, idempotency_key(request))
        await asyncio.sleep(0)
        record = translation.record
        form = Format(
            "response",
            token_ids=bool(body.return_token_ids),
            tools=translation.has_tools,
            reasoning=model.tokenizer.reasoning is not None,
        )
        complete = partial(translation.complete, model.tokenizer, model.turn)

        async def run(reader: Reader) -> None:
            with named_as_here(translation):
                await self._runner.generate([translation.request], form, call, reader, complete)

        if body.stream:
            return StreamedAnswers(
                run, lambda send: response_stream(send, record, form, model, START, headers)
            )
        return CollectedAnswers(run, _WholeResponse(record, model, form), headers)

    async def retrieve(
        self,
        response_id: str,
        request: HttpRequest,
        stream: bool = Query(False, description="Send the events of the response."),
        starting_after: int | None = Query(
            None, ge=0, lt=1 << 31, description="Sequence number of the last event that is not sent."
        ),
    ) -> Response:
        """Return a stored response, or its events."""
        call, since_ns = request.scope[CALL], self._generation.clock.now_ns()
        if not stream:
            self._generation.admit_reading_call(call)
            return await self._response(*await self._read(response_id, call))
        with self._generation.streams.admit_read(caller()):
            stored, record = await self._read(response_id, call)
        form, session_id = stored_format(stored.fields), stored.ownership.session_id
        position = START
        if starting_after is not None:
            after = await self._position_after(starting_after, stored, has_parts=form.has_parts)
            if after is None:
                return Response(status_code=204)
            position = after
        call.span_attributes = {names.HTTP_METHOD: request.method, names.HTTP_ROUTE: ROUTE}

        async def run(reader: Reader) -> None:
            async with self._runner.traced(call):
                await self._runner.resume(session_id, form, [position], call, since_ns, reader)

        model = self._generation.model
        return StreamedAnswers(run, lambda send: response_stream(send, record, form, model, position, {}))

    async def cancel(self, response_id: str, request: HttpRequest) -> Response:
        """End a response permanently; one that has ended stays as it is."""
        call = request.scope[CALL]
        self._generation.admit_reading_call(call, to_end=True)
        stored, _ = await self._read(response_id, call)
        await self._generation.abort(stored.ownership.session_id, call)
        return await self._response(*await self._read(response_id, call), in_debt=True)

    async def delete(self, response_id: str, request: HttpRequest) -> Response:
        """Remove a stored response; one that is in progress ends."""
        call = request.scope[CALL]
        with self._generation.streams.admit_read(caller(), to_end=True):
            try:
                stored, _ = await self._read(response_id, call)
            except (Refused, LogLost) as error:  # it may have expired; a damaged one is the caller's
                session_id, is_damaged = response_id.removeprefix(PREFIX), isinstance(error, LogLost)
                await self._generation.unlearn(session_id, is_recent=is_damaged)
                raise
        await self._generation.delete(stored.ownership.session_id, call)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self,
        response_id: str,
        request: HttpRequest,
        limit: int = Query(20, ge=1, le=100, description="Most messages to return."),
        order: Literal["asc", "desc"] = Query("desc", description="`desc`: the last message first."),
        after: str | None = Query(None, description="Id of the message before the first one."),
    ) -> Response:
        """Return the messages that a stored response answers, without its instructions."""
        call = request.scope[CALL]
        self._generation.admit_reading_call(call)
        stored, record = await self._read(response_id, call)
        self._generation.streams.charge_read(stored, caller())
        await asyncio.sleep(0)
        turns = record.read_turns()
        await asyncio.sleep(0)
        items = input_items(turns, stored.ownership.session_id)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise InvalidField("after", "must be the id of a message of this response")
        first = 0 if after is None else ids.index(after) + 1
        page, has_more = items[first : first + limit], len(items) > first + limit
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        await asyncio.sleep(0)
        listed = {"object": "list", "data": page, **ends, "has_more": has_more}
        content = await json_text(listed, self._generation.model.turn)
        return Response(content, media_type="application/json")

    async def _position_after(
        self, number: int, stored: StoredSession, *, has_parts: bool
    ) -> Position | None:
        """Return the place after the event of a sequence number; None after the last one.

        Charge the output that is read for it. Raise InvalidField or LogLost.
        """
        streams, length = self._generation.streams, len(stored.tokens) - stored.prompt_len
        streams.charge_read(stored, caller())
        find = place_after if has_parts else position_after
        most = (await streams.spec_of(stored)).max_position - stored.prompt_len
        position = find(number, length, most, has_ended=stored.state == "finished")
        if position is None or not 0 < position.index <= length:
            return position
        return replace(position, seen_hash=await streams.output_hash(stored, position.index))

    async def _former(self, response_id: str, call: HttpCall) -> Sequence[Turn]:
        """Return the turns of a stored response with its answer. Raise Refused or InvalidField."""
        name = "previous_response_id"
        with self._generation.streams.admit_read(caller()):
            try:
                stored, record = await self._read(response_id, call)
            except Refused:
                raise Refused(
                    400,
                    "previous_response_not_found",
                    f"{name}: must be a stored response of this caller",
                    name,
                ) from None
            if stored.state != "finished":
                self._generation.streams.charge_read(stored, caller())
                raise InvalidField(name, "must be a response that has ended")
            answer, ending = await self._generation.streams.answer_of(stored, caller())
            objects = self._objects(record, stored, answer, ending)
            turn = await objects.turn()
            await asyncio.sleep(0)
            return [*record.read_turns(), turn]

    async def _read(self, response_id: str, call: HttpCall) -> tuple[StoredSession, Record]:
        """Return the session of a response that is kept. Raise Refused."""
        missing = Refused(404, "not_found", f"response_id: no response {response_id[:64]!r}", "response_id")
        if not response_id.startswith(PREFIX):
            raise missing
        try:
            stored = await self._generation.read(response_id.removeprefix(PREFIX), call)
        except (UnknownSession, InvalidField):  # that name the session
            raise missing from None
        record = stored_record(stored.fields)
        if record is None or record.turns is None:
            self._generation.streams.charge_read(stored, caller())
            raise missing
        return stored, record

    async def _response(self, stored: StoredSession, record: Record, *, in_debt: bool = False) -> Response:
        answer, ending = await self._generation.streams.answer_of(stored, caller(), in_debt=in_debt)
        objects = self._objects(record, stored, answer, ending)
        return Response(await objects.whole(), media_type="application/json")

    def _objects(
        self, record: Record, stored: StoredSession, answer: Answer, ending: Ending | None
    ) -> ResponseObjects:
        form = stored_format(stored.fields)
        return ResponseObjects(record, self._generation.model, form, answer, ending)


class _WholeResponse:
    """Collect an answer, then return it as a response."""

    def __init__(self, record: Record, model: ServedModel, form: Format) -> None:
        self._record = record
        self._model = model
        self._form = form
        self._choices: Sequence[Choice] = ()
        self._ending: Ending | None = None

    @property
    def session_id(self) -> str:
        return self._choices[0].session.spec.session_id

    async def begin(self, choices: Sequence[Choice]) -> None:
        self._choices = choices

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        """Leave the item: the session keeps the whole answer."""

    async def end(self, choice: Choice, answer: AnswerStream) -> None:  # noqa: ARG002  # a Reader
        self._ending = answer.ending

    async def body(self) -> bytes:
        session = self._choices[0].session
        objects = ResponseObjects(
            self._record, self._model, self._form, session.answer, self._ending, session
        )
        return await objects.whole()
