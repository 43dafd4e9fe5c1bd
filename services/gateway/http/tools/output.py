"""Read the output of a session as reasoning, content and calls.

What is read depends on the tokens alone, one at a time: a stream that another gateway continues is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

from galley.common.models.tokenizer import Tokenizer
from galley.core.answer.answer import Answer, Reason
from services.gateway.http.api.format import Format
from services.gateway.http.tools.deltas import (
    CallArguments,
    CallBegins,
    Content,
    Delta,
    Parser,
    PlainText,
    Reasoning,
    joined,
)
from services.gateway.http.tools.formats import tool_format
from services.gateway.http.tools.json_calls import is_open
from services.gateway.http.tools.marks import Marks
from services.gateway.http.tools.reasoning import ReasoningSplit

_PIECE_TOKENS = 256


class OutputReader:
    """Read one answer; `reasoning_tokens` counts the tokens of its reasoning so far."""

    def __init__(
        self, form: Format, tokenizer: Tokenizer, answer: Answer, end_tokens: Collection[int] = ()
    ) -> None:
        """`end_tokens` are those by which the model ends its answers."""
        self.reasoning_tokens = 0
        self._end_tokens = end_tokens
        self._has_calls = False
        self._arguments: list[str] = []
        """Of the call that the text so far ends with, in pieces."""
        self._answer = answer
        self._end = 0
        self._format = tool_format(tokenizer) if form.tools else None
        trigger, others = ("", ()) if self._format is None else (self._format.trigger, self._format.marks)
        reasoning = tokenizer.reasoning if form.reasoning else None
        around = () if reasoning is None else (reasoning.opening, reasoning.closing)
        self._marks = Marks(tokenizer, (trigger, *around), others)
        sign = self._marks.sign
        self._parser: Parser = PlainText() if self._format is None else self._format.parser(sign(trigger))
        self._split: ReasoningSplit | None = None
        self._closing = ""
        if reasoning is not None:
            opening, self._closing = sign(reasoning.opening), sign(reasoning.closing)
            is_open = reasoning.is_open(answer.spec.prompt, tokenizer.decode)
            self._split = self._parser = ReasoningSplit(self._parser, opening, self._closing, is_open=is_open)

    @property
    def has_calls(self) -> bool:
        """Return True if the answer has calls, the last of which is whole."""
        return self._has_calls and not self.is_call_cut

    @property
    def is_call_cut(self) -> bool:
        """Return True if a stop of the request has ended the answer within the arguments of a call."""
        ending = self._answer.ending
        if ending is None or ending.reason is not Reason.STOP or ending.matched in self._end_tokens:
            return False
        return is_open("".join(self._arguments))

    def push(self, end: int) -> list[Delta]:
        """Read further tokens, up to the first `end` of the answer."""
        answer, start, deltas = self._answer, self._end, list[Delta]()
        offset = len(answer.spec.prompt)
        tokens = answer.tokens[offset + start : offset + end]
        for index, (token, text) in enumerate(zip(tokens, answer.texts(start, end), strict=True), start):
            deltas += self._parser.push(self._marks.read(token, text, answer.held_length(index)))
            if self._split is not None and self._split.is_open and not self._marks.is_due(self._closing):
                self.reasoning_tokens += 1
        self._end = end
        return self._noted(deltas)

    def text_of(self, index: int) -> str:
        """Return the text that output token `index` adds, marks that are control tokens included."""
        [text] = self._answer.texts(index, index + 1)
        return text + self._marks.hidden_text(self._answer.tokens[len(self._answer.spec.prompt) + index])

    def finish(self) -> list[Delta]:
        """Return what was held back, once the answer has ended."""
        return self._noted([*self._parser.push(self._marks.finish()), *self._parser.finish()])

    async def read(self, end: int) -> list[Delta]:
        """Read the first `end` tokens of the answer. Others get a turn between pieces of it."""
        deltas: list[Delta] = []
        for at in range(0, end, _PIECE_TOKENS):
            deltas += self.push(min(end, at + _PIECE_TOKENS))
            await asyncio.sleep(0)
        return deltas

    def delta(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """Return deltas as OpenAI's delta of one event."""
        parts = _Parts(deltas)
        fields = parts.texts
        if parts.calls:
            fields["tool_calls"] = [
                {"index": index, **self._head(index, call), "function": call}
                for index, call in parts.calls.items()
            ]
        return fields

    def message(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """Return the deltas of a whole answer as OpenAI's message."""
        parts = _Parts(deltas)
        content = parts.texts.pop("content", None)
        fields = {"role": "assistant", "content": content, "refusal": None, **parts.texts}
        if parts.calls:
            fields["tool_calls"] = [
                {**self._head(index, call), "function": call} for index, call in parts.calls.items()
            ]
        elif content is None:
            fields["content"] = ""
        return fields

    def call_id(self, index: int) -> str:
        """Return the id of a call, the same at each gateway."""
        if self._format is None:
            raise ValueError("an answer without tools has no calls")
        return self._format.call_id(self._answer.spec.session_id, index)

    def _head(self, index: int, call: dict[str, str]) -> dict[str, str]:
        return {"id": self.call_id(index), "type": "function"} if "name" in call else {}

    def _noted(self, deltas: Iterable[Delta]) -> list[Delta]:
        whole = list(map(self._marks.restore, joined(deltas)))
        for delta in whole:
            if isinstance(delta, CallArguments):
                self._arguments.append(delta.text)
                continue
            self._arguments = []
            self._has_calls = self._has_calls or isinstance(delta, CallBegins)
        return whole


class _Parts:
    """Deltas by where OpenAI's objects have them."""

    def __init__(self, deltas: Iterable[Delta]) -> None:
        self.texts: dict[str, Any] = {}
        self.calls: dict[int, dict[str, str]] = {}
        for delta in deltas:
            match delta:
                case Content(text):
                    self.texts["content"] = self.texts.get("content", "") + text
                case Reasoning(text):
                    self.texts["reasoning_content"] = self.texts.get("reasoning_content", "") + text
                case CallBegins(index, name):
                    self.calls[index] = {"name": name, "arguments": ""}
                case CallArguments(index, text):
                    call = self.calls.setdefault(index, {"arguments": ""})
                    call["arguments"] += text
