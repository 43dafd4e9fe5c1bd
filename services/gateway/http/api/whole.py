"""The answers of a request in one response, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.records import PositionLogprobs
from services.gateway.generation import AnswerStream, ServedModel
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.format import Format, PromptText, no_prompt
from services.gateway.http.api.identity import Identity, finish_reason
from services.gateway.http.api.logprobs import chat_logprobs, completion_logprobs
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.transport.encoding import to_json


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
        self._ends: list[dict[str, Any]] = [{} for _ in range(form.choices)]

    @property
    def session_id(self) -> str:
        return self.choices[0].session.spec.session_id

    async def begin(self, choices: Sequence[Choice]) -> None:
        self.choices = choices

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        if isinstance(item, Chunk):
            self._texts[choice.index].append(item.text)
            self._tokens[choice.index] += item.tokens
            self._drafted[choice.index] += [item.from_draft] * len(item.tokens)
            self._logprobs[choice.index] += item.logprobs
            if choice.rounds is not None:
                self._rounds[choice.index] += choice.rounds.take(item.index + len(item.tokens))

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        if answer.ending is not None:
            reason, matched = finish_reason(answer.ending)
            self._ends[choice.index] = {"finish_reason": reason, "stop_reason": matched}

    @property
    def body(self) -> bytes:
        sessions = [choice.session for choice in self.choices]
        identity = Identity.of(sessions[0], self._form, self._model)
        end = {
            "usage": usage(sessions, self._form.n),
            "metrics": metrics(sessions),
        }
        choices = [self._choice(index) for index in range(len(sessions))]
        return to_json({**identity.fields, "choices": choices, **end})

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        content: dict[str, Any] = {"index": index}
        if self._form.kind == "chat":
            content["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            content["text"] = self._echo(index) + text
        details: dict[str, Any] = {"logprobs": self._logprobs_of(index), **self._ends[index]}
        if self._form.token_ids:
            details |= {"token_ids": self._tokens[index], "from_draft": self._drafted[index]}
        if self._form.rounds:
            details["rounds"] = self._rounds[index]
        return content | details

    def _echo(self, index: int) -> str:
        return self._prompt(index // self._form.n) if self._form.echo else ""

    def _logprobs_of(self, index: int) -> dict[str, Any] | None:
        if self.choices[index].session.spec.logprobs is None:
            return None
        tokens, logprobs = self._tokens[index], self._logprobs[index]
        token_bytes = self._model.tokenizer.token_bytes
        if self._form.kind == "chat":
            return {"content": chat_logprobs(tokens, logprobs, token_bytes), "refusal": None}
        return completion_logprobs(tokens, logprobs, token_bytes)
