"""The items of a response whose answer has parts: reasoning, messages and calls, as typed events build them.

The events that a token causes depend on the tokens up to it alone. Logprobs are numbers of tokens until they
are written: as objects they are many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from galley.core.answer.answer import Answer
from services.gateway.generation import ServedModel
from services.gateway.http.api.format import Format
from services.gateway.http.api.logprobs import chat_logprobs_json
from services.gateway.http.tools.deltas import CallArguments, CallBegins, Content, Delta, Reasoning
from services.gateway.http.tools.output import OutputReader
from services.gateway.http.transport.encoding import to_json, with_json

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
    _tokens: list[int] = field(default_factory=list)

    @property
    def is_message(self) -> bool:
        """Return True while a message is open."""
        return self._kind == "message"

    def push(self, delta: Delta, tokens: Sequence[int] = ()) -> Iterator[Event]:
        """Add a delta, with the tokens whose logprobs it has; yield its events."""
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
            yield self._delta(delta, tokens)

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
        self._kind, self._texts, self._tokens = "", [], []
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _delta(self, delta: Content | Reasoning | CallArguments, tokens: Sequence[int]) -> Event:
        if isinstance(delta, CallArguments):
            return "response.function_call_arguments.delta", {**self._place, "delta": delta.text}
        fields: dict[str, Any] = {**self._part_place, "delta": delta.text}
        if isinstance(delta, Content):
            self._tokens += tokens
            fields["logprobs"] = list(tokens)
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
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._tokens)}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}


def _unless_fixed(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name in {"text", "logprobs"}}


class ContentTokens:
    """The tokens that were read and have no delta yet: some text is held back until later tokens decide."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[int | None, str]]()
        """Each with the rest of its text; one that had a delta for the beginning of it has no index."""

    def read(self, index: int, text: str) -> None:
        """Take up output token `index`, which adds `text`."""
        self._waiting.append((index, text))

    def drop(self, keep: int = 0) -> None:
        """Forget all tokens but the last `keep`: their text is no content."""
        while len(self._waiting) > keep:
            self._waiting.popleft()

    def take(self, text: str, *, is_first: bool) -> list[int]:
        """Return the tokens that a delta of content brings; before the first of an item, others may wait."""
        if is_first:
            self._skip(max("".join(rest for _, rest in self._waiting).rfind(text), 0))
        taken: list[int] = []
        left = len(text)
        while left > 0 and self._waiting:
            index, rest = self._waiting.popleft()
            if index is not None:
                taken.append(index)
            if len(rest) > left:
                self._waiting.appendleft((None, rest[left:]))
            left -= len(rest)
        return taken

    def _skip(self, length: int) -> None:
        while length > 0:
            index, rest = self._waiting.popleft()
            if len(rest) > length:
                self._waiting.appendleft((index, rest[length:]))
            length -= len(rest)


class PartsReader:
    """Read an answer token by token into items."""

    def __init__(self, form: Format, model: ServedModel, answer: Answer) -> None:
        self._reader = OutputReader(form, model.tokenizer, answer, model.info.eos_token_ids)
        self._builder = ItemBuilder(answer.spec.session_id, self._reader.call_id)
        self._model = model
        self._answer = answer
        self._content = ContentTokens()
        self._logprobs: dict[int, bytes] = {}
        """The JSON of those of complete messages, by the number of the item."""

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    @property
    def items(self) -> list[Item]:
        return self._builder.items

    async def items_json(self) -> bytes:
        """Return the JSON of all items. Others get a turn between pieces of their logprobs."""
        return b",".join([await self._item_json(index, item) for index, item in enumerate(self.items)])

    async def event_json(self, kind: str, number: int, fields: dict[str, Any]) -> bytes:
        """Return the JSON of an event. Others get a turn between pieces of its logprobs."""
        fields = {"type": kind, "sequence_number": number, **fields}
        output_index = fields["output_index"]
        if kind == "response.output_item.done":
            return with_json(fields, "item", await self._item_json(output_index, fields.pop("item")))
        if kind == "response.content_part.done":
            return with_json(fields, "part", await self._part_json(output_index, fields.pop("part")))
        if kind == "response.output_text.delta":
            return with_json(fields, "logprobs", await self._logprobs_json(fields.pop("logprobs")))
        if kind == "response.output_text.done":
            return await self._part_json(output_index, fields)
        return to_json(fields)

    def push(self, index: int) -> list[Event]:
        """Read output token `index`; return its events."""
        before = self.reasoning_tokens
        deltas = self._reader.push(index + 1)
        if self._answer.spec.logprobs is not None:
            self._content.read(index, self._reader.text_of(index))
            if self.reasoning_tokens > before:
                self._content.drop()
        return self._events(deltas)

    def finish(self) -> list[Event]:
        """Read what was held back, once the answer has ended."""
        return self._events(self._reader.finish())

    def close(self, status: str) -> list[Event]:
        """End the open item, which is incomplete if it is a call that a stop string or token cut."""
        return list(self._builder.close("incomplete" if self._reader.is_call_cut else status))

    async def skip(self, end: int) -> None:
        """Read the first `end` tokens. Others get a turn between pieces of them."""
        for index in range(end):
            self.push(index)
            if index % _PIECE_TOKENS == 0:
                await asyncio.sleep(0)

    def _events(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            tokens: list[int] = []
            if isinstance(delta, Content):
                tokens = self._content.take(delta.text, is_first=not self._builder.is_message)
            else:
                self._content.drop(keep=1)  # the last token may bring content, too
            events += self._builder.push(delta, tokens)
        return events

    async def _item_json(self, output_index: int, item: Item) -> bytes:
        if item["type"] != "message" or not item["content"]:
            return to_json(item)
        [part] = item["content"]
        fields = {name: value for name, value in item.items() if name != "content"}
        return with_json(fields, "content", b"[%b]" % await self._part_json(output_index, part))

    async def _part_json(self, output_index: int, part: dict[str, Any]) -> bytes:
        """Return the JSON of a part of a complete item, or of another object with its logprobs."""
        if "logprobs" not in part:
            return to_json(part)
        if output_index not in self._logprobs:
            self._logprobs[output_index] = await self._logprobs_json(part["logprobs"])
        fields = {name: value for name, value in part.items() if name != "logprobs"}
        return with_json(fields, "logprobs", self._logprobs[output_index])

    async def _logprobs_json(self, indices: Sequence[int]) -> bytes:
        if not indices:
            return b"[]"
        output, records = self._answer.output, self._answer.records
        kept = [(output[at], logprobs) for at in indices if (logprobs := records[at].logprobs) is not None]
        tokens, logprobs_of = [token for token, _ in kept], [logprobs for _, logprobs in kept]
        return await chat_logprobs_json(tokens, logprobs_of, self._model)
