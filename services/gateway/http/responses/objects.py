"""The objects of the Responses API: a response, its output message and the text of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from galley.core.answer.answer import Answer, Ending, Reason
from galley.core.session.machine import Session
from services.gateway.generation import ServedModel
from services.gateway.http.api.logprobs import chat_logprobs
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.responses.record import Record

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

    def response(self, *, has_output: bool = True, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response, with its output as far as it goes unless that is left out."""
        answer, session = self.answer, self.session
        status = self.status if error is None else "failed"
        ending = self.ending
        return {
            "id": PREFIX + answer.spec.session_id,
            "object": "response",
            "created_at": answer.spec.arrival_ns // _SECOND,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": _CUT if ending is not None and ending.reason is Reason.LENGTH else None,
            "model": self.model.name,
            "output": [self.message()] if has_output else [],
            "parallel_tool_calls": False,
            "temperature": round(answer.spec.sampling.temperature, 6),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": round(answer.spec.sampling.top_p, 6),
            "truncation": "disabled",
            **self.record.parameters,
            "usage": self._usage() if has_output else None,
            "metrics": metrics([session]) if has_output and session is not None else None,
            "seed": answer.spec.sampling.seed,
            "stop_reason": None if ending is None else ending.matched,
            "system_fingerprint": answer.fingerprint or self.model.info.fingerprint,
        }

    def message(self, *, has_content: bool = True) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "status": self.status if self.status in {RUNNING, "completed"} else "incomplete",
            "role": "assistant",
            "content": [self.text()] if has_content else [],
        }

    def text(self) -> dict[str, Any]:
        text = "".join(self.answer.texts(0, self.answer.output_len))
        return {"type": "output_text", "annotations": [], "text": text, "logprobs": self.logprobs()}

    def logprobs(self) -> list[dict[str, Any]]:
        answer = self.answer
        if answer.spec.logprobs is None:
            return []
        entries = [record.logprobs for record in answer.records if record.logprobs is not None]
        return chat_logprobs(answer.output, entries, self.model.tokenizer.token_bytes)

    def _usage(self) -> dict[str, Any]:
        answer = self.answer
        prompt, output = len(answer.spec.prompt), answer.output_len
        known = {} if self.session is None else usage([self.session], 1)
        accepted = sum(record.from_draft for record in answer.records)
        predictions = known.get("completion_tokens_details", {"accepted_prediction_tokens": accepted})
        return {
            "input_tokens": prompt,
            "input_tokens_details": known.get("prompt_tokens_details", {"cached_tokens": None}),
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0, **predictions},
            "total_tokens": prompt + output,
        }
