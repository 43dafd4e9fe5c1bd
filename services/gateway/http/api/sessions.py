"""Sessions by their id: their state, the rest of their events, and their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from galley.core.answer.answer import SessionSpec
from galley.core.audit import difference_fields
from galley.core.errors import InvalidField, UnknownSession
from galley.core.store import StoredSession
from services.gateway.auth.authentication import caller
from services.gateway.http.api.answers import StreamedAnswers
from services.gateway.http.api.choices import ChoiceRunner, Reader
from services.gateway.http.api.format import choice_id, stored_format
from services.gateway.http.api.identity import finish_reason
from services.gateway.http.api.positions import DONE, parse_event_id
from services.gateway.http.api.schemas import MAX_ANSWERS
from services.gateway.http.api.stream import EventStream, EventWriter
from services.gateway.http.responses.parts import response_stream
from services.gateway.http.responses.record import stored_record
from services.gateway.http.transport.front import CALL
from services.gateway.session.streams import LogStatistics


class Sessions:
    def __init__(self, runner: ChoiceRunner) -> None:
        self._runner = runner
        self._generation = runner.generation

    async def events(
        self,
        session_id: str,
        request: HttpRequest,
        last_event_id: str = Query("", description="As the header Last-Event-ID, which wins."),
    ) -> Response:
        """Continue a stream after the event that Last-Event-ID names; without one, from its start."""
        last = request.headers.get("last-event-id", last_event_id)
        if last == DONE:
            return Response(status_code=204)  # an EventSource then no longer reconnects
        call, since_ns = request.scope[CALL], self._generation.clock.now_ns()
        with self._generation.streams.admit_read(caller()):
            stored = await self._generation.read(session_id, call)
        form = stored_format(stored.fields)
        try:
            positions = parse_event_id(last, form.choices)
        except InvalidField:
            self._generation.streams.charge_read(stored, caller())
            raise

        async def run(reader: Reader) -> None:
            await self._runner.resume(session_id, form, positions, call, since_ns, reader)

        model, record = self._generation.model, stored_record(stored.fields)

        def writer(send: Send) -> EventWriter:
            if record is not None:
                return response_stream(send, record, form, model, positions[0], {})
            return EventStream(send, form, model, positions, {})

        return StreamedAnswers(run, writer)

    async def state(self, session_id: str, request: HttpRequest) -> Response:
        """Return the state and the statistics of a session, and of each choice."""
        call = request.scope[CALL]
        self._generation.admit_reading_call(call)
        stored = await self._generation.read(session_id, call)
        form = stored_format(stored.fields)
        choices = {0: stored}
        for index in range(1, form.choices):
            with suppress(UnknownSession):
                choices[index] = await self._generation.read(choice_id(session_id, index), call)
        spec, statistics = await self._generation.streams.statistics_of([*choices.values()], caller())
        return JSONResponse(self._describe(choices, form.n, spec, statistics))

    async def audit(
        self,
        session_id: str,
        request: HttpRequest,
        choice: int = Query(0, ge=0, lt=MAX_ANSWERS, description="Index of the choice to audit."),
    ) -> Response:
        """Have a target compute a finished choice again, and compare it with the token log."""
        report = await self._generation.audit(choice_id(session_id, choice), request.scope[CALL])
        return JSONResponse(
            {
                "id": report.session_id,
                "object": "galley.audit",
                "verdict": report.verdict.value,
                "output_tokens": report.output_tokens,
                "compared": report.compared,
                "differing": report.differing,
                "differences": [difference_fields(one) for one in report.differences],
                "system_fingerprint": report.fingerprint,
                "deterministic": report.deterministic,
            }
        )

    async def abort(self, session_id: str, request: HttpRequest) -> Response:
        """End a session permanently, with all of its choices."""
        call = request.scope[CALL]
        with self._generation.streams.admit_read(caller(), to_end=True):
            stored = await self._generation.read(session_id, call)
        for index in range(stored_format(stored.fields).choices):
            with suppress(UnknownSession):
                await self._generation.abort(choice_id(session_id, index), call)
        return JSONResponse({"id": session_id, "object": "galley.session", "aborted": True})

    def _describe(
        self,
        choices: Mapping[int, StoredSession],
        n: int,
        spec: SessionSpec,
        statistics: Sequence[LogStatistics],
    ) -> dict[str, Any]:
        """Return the state of the known choices, by their indexes; each prompt has `n`, and counts once."""
        first = choices[0]
        described = [*map(_choice, choices, choices.values(), statistics)]
        prompt = sum({index // n: one.prompt_len for index, one in choices.items()}.values())
        output = sum(one["completion_tokens"] for one in described)
        return {
            "id": first.ownership.session_id,
            "object": "galley.session",
            "created": first.created_ms // 1000,
            "model": self._generation.model.name_of(spec),
            "state": "finished" if all(one.state == "finished" for one in choices.values()) else "live",
            "seed": spec.sampling.seed,
            "choices": described,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": sum(one["accepted_prediction_tokens"] for one in described)
                },
            },
        }


def _choice(index: int, stored: StoredSession, statistics: LogStatistics) -> dict[str, Any]:
    ending = statistics.ending
    reason, matched = (None, None) if ending is None else finish_reason(ending)
    return {
        "index": index,
        "state": stored.state,
        "finish_reason": reason,
        "stop_reason": matched,
        "completion_tokens": len(stored.tokens) - stored.prompt_len,
        "accepted_draft_tokens": statistics.drafted,
        "accepted_prediction_tokens": statistics.predicted,
        "owner_epoch": stored.ownership.epoch,
    }
