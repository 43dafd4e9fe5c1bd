"""The items of a response whose answer has parts: reasoning, messages and calls, as typed events build them.

The events that a token causes depend on the tokens up to it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from galley.core.answer.answer import Answer
from services.gateway.generation import ServedModel
from services.gateway.http.api.format import Format
from services.gateway.http.api.logprobs import chat_logprobs
from services.gateway.http.tools.deltas import CallArguments, CallBegins, Content, Delta, Reasoning
from services.gateway.http.tools.output import OutputReader
from services.gateway.http.transport.encoding import to_json

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""Its type, and its fields without a sequence number."""
_PIECE_TOKENS = 64
_TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass(slots=True)
class ItemBuilder:
    """Build the items of one response; `call_id` names its calls. An item is complete once it was closed."""

    session_id: str
    call_id: Callable[[int], str]
    items: list[Item] = field(default_factory=list)
    _kind: str = ""
    """The type of the last item, if it is open."""
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)

    def push(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Add a delta, with the logprobs of its tokens; yield its events."""
        match delta:
            case Content():
                yield from self._open_text("message")
            case Reasoning():
                yield from self._open_text("reasoning")
            case CallBegins(index, name):
                yield from self.close()
                call = {"call_id": self.call_id(index), "name": name, "arguments": ""}
                yield self._open({"id": f"fc_{self.session_id}_{index}", "type": "function_call", **call})
        if not isinstance(delta, CallBegins):
            self._texts.append(delta.text)
            yield self._delta(delta, logprobs)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if not self._kind:
            return
        item, text = self.items[-1], "".join(self._texts)
        if self._kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", {**self._place, **done}
        else:
            part = self._part(self._kind, text)
            item["content"] = [part]
            yield f"{_TEXTS[self._kind]}.done", {**self._part_place, **_unless_fixed(part)}
            yield "response.content_part.done", {**self._part_place, "part": part}
        item["status"] = status
        self._kind, self._texts, self._logprobs = "", [], []
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _delta(self, delta: Content | Reasoning | CallArguments, logprobs: Sequence[Any]) -> Event:
        if isinstance(delta, CallArguments):
            return "response.function_call_arguments.delta", {**self._place, "delta": delta.text}
        fields: dict[str, Any] = {**self._part_place, "delta": delta.text}
        if isinstance(delta, Content):
            self._logprobs += logprobs
            fields["logprobs"] = list(logprobs)
        return f"{_TEXTS[self._kind]}.delta", fields

    def _open_text(self, kind: str) -> Iterator[Event]:
        if self._kind == kind:
            return
        yield from self.close()
        number = sum(item["type"] == kind for item in self.items)
        name = ("rs_" if kind == "reasoning" else "msg_") + self.session_id + (f"_{number}" if number else "")
        more: Item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        yield self._open({"id": name, "type": kind, **more, "content": []})
        yield "response.content_part.added", {**self._part_place, "part": self._part(kind, "")}

    def _open(self, item: Item) -> Event:
        item["status"] = "in_progress"
        self.items.append(item)
        self._kind = str(item["type"])
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _part(self, kind: str, text: str) -> Item:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}


def _unless_fixed(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name in {"text", "logprobs"}}


class PartsReader:
    """Read an answer token by token into items."""

    def __init__(self, form: Format, model: ServedModel, answer: Answer) -> None:
        self._reader = OutputReader(form, model.tokenizer, answer)
        self._builder = ItemBuilder(answer.spec.session_id, self._reader.call_id)
        self._token_bytes = model.tokenizer.token_bytes
        self._answer = answer

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    @property
    def items(self) -> list[Item]:
        return self._builder.items

    @property
    def items_json(self) -> bytes:
        return b",".join(map(to_json, self._builder.items))

    def push(self, index: int, token: int) -> list[Event]:
        """Read output token `index`; return its events."""
        logprobs = self._answer.records[index].logprobs
        entries = [] if logprobs is None else chat_logprobs([token], [logprobs], self._token_bytes)
        deltas = self._reader.push([token], self._answer.texts(index, index + 1))
        return [event for delta in deltas for event in self._builder.push(delta, entries)]

    def finish(self) -> list[Event]:
        """Read what was held back, once the answer has ended."""
        return [event for delta in self._reader.finish() for event in self._builder.push(delta)]

    def close(self, status: str) -> list[Event]:
        """End the open item."""
        return list(self._builder.close(status))

    async def skip(self, end: int) -> None:
        """Read the first `end` tokens. Others get a turn between pieces of them."""
        for index, token in enumerate(self._answer.output[:end]):
            self.push(index, token)
            if index % _PIECE_TOKENS == 0:
                await asyncio.sleep(0)
