"""The objects of the Responses API as JSON: a response, its output message and the text of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from galley.core.answer.answer import Answer, Ending, Reason
from galley.core.session.machine import Session
from services.gateway.generation import ServedModel
from services.gateway.http.api.format import Format
from services.gateway.http.api.logprobs import chat_logprobs_json
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.responses.items import PartsReader
from services.gateway.http.responses.record import Call, Record, Turn
from services.gateway.http.transport.encoding import to_json, tokens_json, with_json

PREFIX = "resp_"
_SECOND = 1_000_000_000
_STATUSES = {Reason.STOP: "completed", Reason.LENGTH: "incomplete", Reason.ABORTED: "cancelled"}
_CUT = {"reason": "max_output_tokens"}
RUNNING = "in_progress"
_NOT_PREDICTED = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
"""This API takes no prediction."""


@dataclass(frozen=True, slots=True)
class ResponseObjects:
    """Describe one response; `ending` is None until it has ended, `session` where only its log was read."""

    record: Record
    model: ServedModel
    form: Format
    answer: Answer
    ending: Ending | None = None
    session: Session | None = None
    reasoning_tokens: int = 0
    lists: Mapping[str, bytes] = field(default_factory=dict)
    """The JSON of the lists that `with_lists` adds."""

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

    async def with_lists(self) -> ResponseObjects:
        """Return the objects of a response with its output, whose token ids are encoded in slices."""
        if not self.form.token_ids:
            return self
        tokens, records = self.answer.output[: self.output_len], self.answer.records[: self.output_len]
        lists = await tokens_json(tokens, records, attrgetter("from_draft"), self.model.turn)
        return replace(self, lists=lists)

    async def whole(self) -> bytes:
        """Return the response, with its output as far as it goes."""
        objects = await self.with_lists()
        if not self.form.has_parts:
            return objects.response(self.message(self.part(await self.logprobs())))
        reader = await self._read()
        return replace(objects, reasoning_tokens=reader.reasoning_tokens).response(await reader.items_json())

    async def turn(self) -> Turn:
        """Return the answer as a turn of the conversation that goes on."""
        if not self.form.has_parts:
            return Turn("assistant", self.text)
        items = (await self._read()).items
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        calls = [item for item in items if item["type"] == "function_call"]
        return Turn(
            "assistant",
            "".join(texts),
            [Call(one["call_id"], one["name"], one["arguments"]) for one in calls],
        )

    async def _read(self) -> PartsReader:
        reader = PartsReader(self.form, self.model, self.answer)
        await reader.skip(self.output_len)
        if self.ending is not None:
            reader.finish()
        reader.close(self.item_status)
        return reader

    @property
    def item_status(self) -> str:
        return self.status if self.status in {RUNNING, "completed"} else "incomplete"

    def response(self, output: bytes | None = None, *, error: dict[str, Any] | None = None) -> bytes:
        """Return the response with the JSON of its items; without them, the usage is left out, too."""
        answer, session = self.answer, self.session
        status = self.status if error is None else "failed"
        ending = self.ending
        before = {
            "id": PREFIX + answer.spec.session_id,
            "object": "response",
            "created_at": answer.spec.arrival_ns // _SECOND,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": _CUT if ending is not None and ending.reason is Reason.LENGTH else None,
            "model": self.model.name_of(answer.spec),
            "temperature": round(answer.spec.sampling.temperature, 6),
            "top_p": round(answer.spec.sampling.top_p, 6),
            "truncation": "disabled",
        }
        fields: dict[str, Any] = {
            "usage": None if output is None else self._usage(),
            "metrics": metrics([session]) if output is not None and session is not None else None,
            "seed": answer.spec.sampling.seed,
            "stop_reason": None if ending is None else ending.matched,
            "system_fingerprint": answer.fingerprint or self.model.info.fingerprint,
        }
        after = with_json(fields, "output", b"[%b]" % (output or b""), {} if output is None else self.lists)
        return b",".join(filter(None, (to_json(before)[:-1], self.record.parameters, after[1:])))

    def message(self, part: bytes = b"") -> bytes:
        fields = {
            "id": self.item_id,
            "type": "message",
            "status": self.item_status,
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
        prompt, output = len(self.answer.spec.prompt), self.output_len
        known = {} if self.session is None else usage([self.session], 1)
        predictions = known.get("completion_tokens_details", _NOT_PREDICTED)
        return {
            "input_tokens": prompt,
            "input_tokens_details": known.get("prompt_tokens_details", {"cached_tokens": None}),
            "output_tokens": output,
            "output_tokens_details": {**predictions, "reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + output,
        }


def input_items(turns: Sequence[Turn], session_id: str) -> list[dict[str, Any]]:
    """Return the items that a response answers."""
    return [item for index, turn in enumerate(turns) for item in _items(turn, f"{session_id}_{index}")]


def _items(turn: Turn, name: str) -> Iterator[dict[str, Any]]:
    """Yield the message of a turn, its calls, or the output of a call."""
    if turn.call_id:
        output = {"call_id": turn.call_id, "output": turn.text}
        yield {"id": f"fco_{name}", "type": "function_call_output", "status": "completed", **output}
        return
    part: dict[str, Any] = {"type": "input_text", "text": turn.text}
    if turn.role == "assistant":
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
    if turn.text or not turn.calls:
        content = {"role": turn.role, "content": [part]}
        yield {"id": f"msg_{name}", "type": "message", "status": "completed", **content}
    for number, call in enumerate(turn.calls):
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"id": f"fc_{name}_{number}", "type": "function_call", "status": "completed", **fields}
