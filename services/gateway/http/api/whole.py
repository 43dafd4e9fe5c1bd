"""The answers of a request in one response, in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from galley.core.answer.answer import Chunk, Ending, NumericsChanged
from galley.core.records import PositionLogprobs
from services.gateway.generation import ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format, PromptText, no_prompt
from services.gateway.http.api.identity import Identity, finish_reason
from services.gateway.http.api.logprobs import chat_logprobs_json, completion_logprobs_json
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.tools.output import OutputReader
from services.gateway.http.transport.encoding import list_json, to_json, tokens_json, with_json
from services.gateway.session.streams import AnswerStream

_PIECE_ROUNDS = 64


class WholeAnswers:
    """Collect the answers, then return them as one body."""

    def __init__(self, form: Format, model: ServedModel, prompt: PromptText = no_prompt) -> None:
        self._form = form
        self._model = model
        self._prompt = prompt
        self.choices: Sequence[Choice] = ()
        self._texts: list[list[str]] = [[] for _ in range(form.choices)]
        self._tokens: list[list[int]] = [[] for _ in range(form.choices)]
        self._drafted: list[list[bool]] = [[] for _ in range(form.choices)]
        self._logprobs: list[list[PositionLogprobs]] = [[] for _ in range(form.choices)]
        self._rounds: list[list[dict[str, Any]]] = [[] for _ in range(form.choices)]
        self._endings: list[Ending | None] = [None] * form.choices
        self._reasoning_tokens = 0

    @property
    def session_id(self) -> str:
        return self.choices[0].session.spec.session_id

    async def begin(self, choices: Sequence[Choice]) -> None:
        self.choices = choices

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        if isinstance(item, Chunk):
            self._texts[choice.index].append(item.text)
            self._tokens[choice.index] += item.tokens
            self._drafted[choice.index] += item.from_draft
            self._logprobs[choice.index] += item.logprobs
            if choice.rounds is not None:
                self._rounds[choice.index] += choice.rounds.take(item.index + len(item.tokens))

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        self._endings[choice.index] = answer.ending

    async def body(self) -> bytes:
        sessions = [choice.session for choice in self.choices]
        head = Identity.of(sessions[0], self._form, self._model).head(stream=False)
        choices = b",".join([await self._choice(index) for index in range(len(sessions))])
        used = usage(sessions, self._form.n, self._reasoning_tokens)
        end = {"usage": used, "metrics": metrics(sessions)}
        return b"%b[%b],%b" % (head, choices, to_json(end)[1:])

    async def _choice(self, index: int) -> bytes:
        fields: dict[str, Any] = {"index": index}
        has_calls = False
        if self._form.has_parts:
            model, answer = self._model, self.choices[index].session.answer
            reader = OutputReader(self._form, model.tokenizer, answer, model.info.eos_token_ids)
            deltas = [*await reader.read(len(self._tokens[index])), *reader.finish()]
            fields["message"] = reader.message(deltas)
            has_calls = reader.has_calls
            self._reasoning_tokens += reader.reasoning_tokens
        elif self._form.kind == "chat":
            fields["message"] = {"role": "assistant", "content": self._text(index), "refusal": None}
        else:
            fields["text"] = await self._echo(index) + self._text(index)
        if (ending := self._endings[index]) is not None:
            reason, matched = finish_reason(ending, has_calls=has_calls)
            fields |= {"finish_reason": reason, "stop_reason": matched}
        lists: dict[str, bytes] = {}
        if self._form.token_ids:
            lists |= await tokens_json(self._tokens[index], self._drafted[index], bool, self._model.turn)
        if self._form.rounds:
            lists["rounds"] = await list_json(self._rounds[index], dict, self._model.turn, _PIECE_ROUNDS)
        return with_json(fields, "logprobs", await self._logprobs_of(index), lists)

    def _text(self, index: int) -> str:
        return "".join(self._texts[index])

    async def _echo(self, index: int) -> str:
        if not self._form.echo:
            return ""
        # In a thread: long prompts of token ids take longer to decode than other streams should wait.
        return await asyncio.to_thread(self._prompt, index // self._form.n)

    async def _logprobs_of(self, index: int) -> bytes:
        if self.choices[index].session.spec.logprobs is None:
            return b"null"
        tokens, logprobs = self._tokens[index], self._logprobs[index]
        if self._form.kind == "chat":
            return b'{"content":%b,"refusal":null}' % await chat_logprobs_json(tokens, logprobs, self._model)
        return await completion_logprobs_json(tokens, logprobs, self._model)
