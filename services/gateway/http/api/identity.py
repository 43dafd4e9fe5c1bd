"""The fields that all parts of a response have: its id, time, model and build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from galley.core.answer.answer import Ending, Reason
from galley.core.session.machine import Session
from services.gateway.generation import ServedModel
from services.gateway.http.api.format import Format
from services.gateway.http.transport.encoding import to_json

_SECOND = 1_000_000_000
_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-"}
_OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
_REASONS = {Reason.STOP: "stop", Reason.LENGTH: "length", Reason.ABORTED: "abort"}


@dataclass(frozen=True, slots=True)
class Identity:
    fields: dict[str, Any]
    stream_object: str

    @classmethod
    def of(cls, session: Session, form: Format, model: ServedModel, build: str | None = None) -> Identity:
        """Return the identity of the request whose first choice is `session`; a resumed one has the same.

        Without a `build`, it names that of the last token, or else the model's.
        """
        spec = session.spec
        name = _OBJECTS[form.kind]
        fields = {
            "id": _PREFIXES[form.kind] + spec.session_id,
            "object": name,
            "created": spec.arrival_ns // _SECOND,
            "model": model.name_of(spec),
            "system_fingerprint": build or session.answer.fingerprint or model.info.fingerprint,
            "seed": spec.sampling.seed,
        }
        return cls(fields, f"{name}.chunk" if form.kind == "chat" else name)

    def head(self, *, stream: bool) -> bytes:
        """Return the JSON of the response up to its choices."""
        fields = {**self.fields, "object": self.stream_object} if stream else self.fields
        return to_json(fields)[:-1] + b',"choices":'


def finish_reason(ending: Ending, *, has_calls: bool = False) -> tuple[str, str | int | None]:
    """Return OpenAI's reason of an end, and the stop string or token that caused it."""
    if has_calls and ending.reason is Reason.STOP:
        return "tool_calls", ending.matched
    return _REASONS[ending.reason], ending.matched
