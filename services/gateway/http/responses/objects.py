"""The objects of the Responses API as JSON: a response, its output message and the text of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from galley.core.answer.answer import Answer, Ending, Reason
from galley.core.lookup.prediction import count_predicted
from galley.core.session.machine import Session
from services.gateway.generation import ServedModel
from services.gateway.http.api.logprobs import chat_logprobs_json
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.responses.record import Record, Turn
from services.gateway.http.transport.encoding import with_json

PREFIX = "resp_"
_SECOND = 1_000_000_000
_STATUSES = {Reason.STOP: "completed", Reason.LENGTH: "incomplete", Reason.ABORTED: "cancelled"}
_CUT = {"reason": "max_output_tokens"}
RUNNING = "in_progress"


@dataclass(frozen=True, slots=True)
class ResponseObjects:
    """Describe one response; `ending` is None until it has ended, `session` where only its log was read."""

    record: Record
    model: ServedModel
    answer: Answer
    ending: Ending | None = None
    session: Session | None = None

    @property
    def status(self) -> str:
        return RUNNING if self.ending is None else _STATUSES[self.ending.reason]

    @property
    def item_id(self) -> str:
        return f"msg_{self.answer.spec.session_id}"

    @property
    def output_len(self) -> int:
        """Return the number of output tokens that the log holds: an aborted session may have more."""
        return self.answer.output_len if self.session is None else self.session.logged_output

    @property
    def text(self) -> str:
        return "".join(self.answer.texts(0, self.output_len))

    async def whole(self) -> bytes:
        """Return the response, with its output as far as it goes."""
        return self.response(self.message(self.part(await self.logprobs())))

    def response(self, message: bytes = b"", *, error: dict[str, Any] | None = None) -> bytes:
        """Return the response; without its message, the usage is left out, too."""
        answer, session = self.answer, self.session
        status = self.status if error is None else "failed"
        ending = self.ending
        fields = {
            "id": PREFIX + answer.spec.session_id,
            "object": "response",
            "created_at": answer.spec.arrival_ns // _SECOND,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": _CUT if ending is not None and ending.reason is Reason.LENGTH else None,
            "model": self.model.name_of(answer.spec),
            "parallel_tool_calls": False,
            "temperature": round(answer.spec.sampling.temperature, 6),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": round(answer.spec.sampling.top_p, 6),
            "truncation": "disabled",
            **self.record.parameters,
            "usage": self._usage() if message else None,
            "metrics": metrics([session]) if message and session is not None else None,
            "seed": answer.spec.sampling.seed,
            "stop_reason": None if ending is None else ending.matched,
            "system_fingerprint": answer.fingerprint or self.model.info.fingerprint,
        }
        return with_json(fields, "output", b"[%b]" % message)

    def message(self, part: bytes = b"") -> bytes:
        fields = {
            "id": self.item_id,
            "type": "message",
            "status": self.status if self.status in {RUNNING, "completed"} else "incomplete",
            "role": "assistant",
        }
        return with_json(fields, "content", b"[%b]" % part)

    def part(self, logprobs: bytes = b"[]", text: str | None = None) -> bytes:
        """Return the part of this text; by default, of all."""
        fields = {"type": "output_text", "annotations": [], "text": self.text if text is None else text}
        return with_json(fields, "logprobs", logprobs)

    async def logprobs(self) -> bytes:
        answer = self.answer
        if answer.spec.logprobs is None:
            return b"[]"
        records = answer.records[: self.output_len]
        entries = [record.logprobs for record in records if record.logprobs is not None]
        return await chat_logprobs_json(answer.output[: self.output_len], entries, self.model)

    def _usage(self) -> dict[str, Any]:
        answer = self.answer
        prompt, output = len(answer.spec.prompt), self.output_len
        known = {} if self.session is None else usage([self.session], 1)
        accepted, _ = count_predicted(answer.spec.prediction, answer.output[:output])
        predictions = known.get("completion_tokens_details", {"accepted_prediction_tokens": accepted})
        return {
            "input_tokens": prompt,
            "input_tokens_details": known.get("prompt_tokens_details", {"cached_tokens": None}),
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0, **predictions},
            "total_tokens": prompt + output,
        }


def input_items(turns: Sequence[Turn], session_id: str) -> list[dict[str, Any]]:
    """Return the messages that a response answers."""
    return [
        {
            "id": f"msg_{session_id}_{index}",
            "type": "message",
            "status": "completed",
            "role": turn.role,
            "content": [
                {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
                if turn.role == "assistant"
                else {"type": "input_text", "text": turn.text}
            ],
        }
        for index, turn in enumerate(turns)
    ]
