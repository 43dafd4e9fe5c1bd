"""Server-sent events of a request's answers, in OpenAI's form.

Each event has an id by which any gateway continues (`positions`). The constant parts of an event are encoded
once, as an event is written for every chunk of tokens.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from galley.common.logs import log_internal
from galley.core.answer.answer import Chunk, NumericsChanged
from services.gateway.generation import ServedModel
from services.gateway.http.api.choices import Choice, Reader
from services.gateway.http.api.format import Format, PromptText
from services.gateway.http.api.identity import Identity, finish_reason
from services.gateway.http.api.logprobs import chat_logprobs, completion_logprobs
from services.gateway.http.api.positions import DONE, Position, event_id
from services.gateway.http.api.usage import metrics, usage
from services.gateway.http.tools.output import OutputReader
from services.gateway.http.transport.encoding import to_json, to_text
from services.gateway.http.transport.errors import error_reply
from services.gateway.session.streams import AnswerStream

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}

_PIECE_TOKENS = 1024
_NOTHING = {"logprobs": None, "finish_reason": None}
_PLAIN = to_text(_NOTHING)[1:]
_OPENING = {"role": "assistant", "content": ""}


class EventWriter(Reader):
    """Write answers as events; `has_begun` is True once the status was sent."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self.has_begun = False
        self._send = send
        self._headers = headers

    async def open(self, session_id: str) -> None:
        fields = {**_HEADERS, "x-galley-session-id": session_id, **self._headers}
        headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Send an error after the response has begun, and end the response."""


class EventStream(EventWriter):
    """Write the answers as events; `former` are the places that the client had reached.

    Without `prompt`, the stored prompt of a choice is echoed.
    """

    def __init__(
        self,
        send: Send,
        form: Format,
        model: ServedModel,
        former: Sequence[Position],
        headers: Mapping[str, str],
        prompt: PromptText | None = None,
    ) -> None:
        super().__init__(send, headers)
        self._form = form
        self._model = model
        self._former = former
        self._prompt = prompt
        self._choices: Sequence[Choice] = ()
        self._ended = 0
        """How many of them have ended in this response; the client may know some as ended."""
        self._head = b""
        self._build: str | None = None
        """The build that `_head` names."""
        self._offsets = [0] * form.choices
        """Lengths of the texts of tokens, for `text_offset` of completions."""
        self._readers: Sequence[OutputReader] = ()
        """One a choice, if answers have parts."""

    async def begin(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        if self._form.has_parts:
            tokenizer, ends = self._model.tokenizer, self._model.info.eos_token_ids
            self._readers = [OutputReader(self._form, tokenizer, one.session.answer, ends) for one in choices]
        self._name_build(choices[0].session.answer.fingerprint)
        await self.open(choices[0].session.spec.session_id)
        for choice in choices:
            if not self._former[choice.index].has_begun and (first := await self._first(choice)):
                await self.write(first)

    async def item(self, choice: Choice, item: Chunk | NumericsChanged) -> None:
        if isinstance(item, NumericsChanged):
            return  # each event names the build of its tokens
        if not choice.has_advanced:
            await self._read_seen(choice)
        choice.advance(item)
        delta = self._delta(choice, item)
        if not (delta or item.logprobs or self._form.token_ids or self._form.rounds):
            return
        build = choice.session.answer.build_of(item.index)
        if build != self._build:
            self._name_build(build)
        await self.write(self._event(choice, delta, self._details(choice, item)))

    async def end(self, choice: Choice, answer: AnswerStream) -> None:
        if not choice.has_advanced:
            await self._read_seen(choice)
        choice.end()
        if not self._former[choice.index].has_ended and answer.ending is not None:
            delta: Mapping[str, Any] = {}
            has_calls = False
            if self._readers:
                reader = self._readers[choice.index]
                delta = reader.delta(reader.finish())
                has_calls = reader.has_calls
            reason, matched = finish_reason(answer.ending, has_calls=has_calls)
            end = {"finish_reason": reason, "stop_reason": matched}
            await self.write(self._event(choice, delta, end))
        self._ended += 1
        if self._ended == len(self._choices):
            await self._finish()

    async def fail(self, error: BaseException) -> None:
        """Send an error after the response has begun, and end the response."""
        log_internal(error)
        data = to_json({"error": error_reply(error).object})
        await self.write(b"data: " + data + b"\n\n", more=False)

    async def _finish(self) -> None:
        sessions = [choice.session for choice in self._choices]
        end = b""
        if self._form.usage:
            reasoning = sum(reader.reasoning_tokens for reader in self._readers)
            used = {"usage": usage(sessions, self._form.n, reasoning), "metrics": metrics(sessions)}
            end = b"data: " + self._head + b"[]," + to_json(used)[1:] + b"\n\n"
        await self.write(end + b"id: " + DONE.encode() + b"\ndata: [DONE]\n\n", more=False)

    def _name_build(self, build: str | None) -> None:
        identity = Identity.of(self._choices[0].session, self._form, self._model, build)
        self._build, self._head = build, identity.head(stream=True)

    async def _read_seen(self, choice: Choice) -> None:
        """Read the tokens that the client has, once the answer has them, too."""
        if self._readers:
            await self._readers[choice.index].read(choice.position.index)
        elif self._form.kind == "completion" and choice.session.spec.logprobs is not None:
            self._offsets[choice.index] = await self._length_seen(choice)

    async def _length_seen(self, choice: Choice) -> int:
        """Return the length of the texts of the tokens that the client has."""
        token_bytes, length = self._model.tokenizer.token_bytes, 0
        for index, token in enumerate(choice.session.answer.output[: choice.position.index]):
            length += len(token_bytes(token).decode(errors="replace"))
            if index % _PIECE_TOKENS == 0:
                await asyncio.sleep(0)
        return length

    async def _first(self, choice: Choice) -> bytes:
        """Begin a choice, and return the event for it; empty if there is nothing to say."""
        choice.begin()
        if self._form.kind == "chat":
            return self._event(choice, _OPENING, {})
        if not self._form.echo:
            return b""
        # In a thread: long prompts of token ids take longer to decode than other streams should wait.
        if self._prompt is None:
            text = await asyncio.to_thread(self._model.tokenizer.decode, choice.session.spec.prompt)
        else:
            text = await asyncio.to_thread(self._prompt, choice.index // self._form.n)
        return self._event(choice, text, {})

    def _details(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if chunk.logprobs:
            token_bytes = self._model.tokenizer.token_bytes
            if self._form.kind == "chat":
                entries = chat_logprobs(chunk.tokens, chunk.logprobs, token_bytes)
                details["logprobs"] = {"content": entries, "refusal": None}
            else:
                offset = self._offsets[choice.index]
                entries_of = completion_logprobs(chunk.tokens, chunk.logprobs, token_bytes, offset)
                details["logprobs"] = entries_of
                self._offsets[choice.index] += sum(map(len, entries_of["tokens"]))
        if self._form.token_ids:
            details["token_ids"] = chunk.tokens
            details["from_draft"] = chunk.from_draft
        if choice.rounds is not None:
            details["rounds"] = choice.rounds.take(chunk.index + len(chunk.tokens))
        return details

    def _delta(self, choice: Choice, chunk: Chunk) -> str | Mapping[str, Any]:
        """Return what a chunk adds: text, or parts of OpenAI's delta."""
        if not self._readers:
            return chunk.text
        reader = self._readers[choice.index]
        return reader.delta(reader.push(chunk.index + len(chunk.tokens)))

    def _event(self, choice: Choice, delta: str | Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
        """Return an event of one choice."""
        if self._form.kind == "completion":
            content = f'"text":{to_text(delta or "")}'
        elif isinstance(delta, str):
            content = f'"delta":{{"content":{to_text(delta)}}}'
        else:
            content = f'"delta":{to_text(delta)}'
        tail = to_text({**_NOTHING, **more})[1:] if more else _PLAIN
        data = f'{{"index":{choice.index},{content},{tail}'.encode()
        at = event_id([one.position for one in self._choices]).encode()
        return b"id: " + at + b"\ndata: " + self._head + b"[" + data + b"]}\n\n"
