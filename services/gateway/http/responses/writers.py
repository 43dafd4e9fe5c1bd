"""Choose how the events of a response are written."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Send

from services.gateway.generation import ServedModel
from services.gateway.http.api.format import Format
from services.gateway.http.api.positions import Position
from services.gateway.http.api.stream import AnswerEvents
from services.gateway.http.responses.parts import PartsStream
from services.gateway.http.responses.record import Record
from services.gateway.http.responses.stream import ResponseStream


def response_stream(
    send: Send,
    record: Record,
    form: Format,
    model: ServedModel,
    former: Position,
    headers: Mapping[str, str],
) -> AnswerEvents:
    """Return what writes the events of a response, from the place `former` that the client had reached."""
    stream = PartsStream if form.has_parts else ResponseStream
    return stream(send, record, form, model, former, headers)
