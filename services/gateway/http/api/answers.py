"""The handlers of chats and completions: a response that runs its sessions while it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.api.choices import ChoiceRunner, Reader
from services.gateway.http.api.format import Format, PromptText, no_prompt
from services.gateway.http.api.positions import START
from services.gateway.http.api.requests import chat_request, completion_requests, set_output
from services.gateway.http.api.schemas import (
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    check_parameters,
)
from services.gateway.http.api.stream import EventStream, EventWriter
from services.gateway.http.api.whole import WholeAnswers
from services.gateway.http.parameters.structured import renamed
from services.gateway.http.tools.requests import ToolUse
from services.gateway.http.transport.front import CALL, SESSION_ID

Run = Callable[[Reader], Awaitable[None]]


class Collector(Reader, Protocol):
    """Collect answers for a response in one piece."""

    @property
    def session_id(self) -> str:
        """Return the id of the first session. Raise IndexError if none has begun."""

    async def body(self) -> bytes: ...


class Answers:
    """Answer chats and completions; refuse unknown parameters if `strict`, else ignore them."""

    def __init__(self, runner: ChoiceRunner, *, strict: bool) -> None:
        self._runner = runner
        self._model = runner.generation.model
        self._strict = strict

    async def chat(self, body: ChatRequest, request: HttpRequest) -> Response:
        """Answer a conversation."""
        headers = check_parameters(body, strict=self._strict)
        await asyncio.sleep(0)  # a thousand messages take some ms to check, and again to translate
        wire, tools = chat_request(body, idempotency_key(request))
        await asyncio.sleep(0)
        form = replace(
            _format("chat", body, 1),
            tools=tools is not None,
            reasoning=self._model.tokenizer.reasoning is not None,
        )
        return self._response(body, [wire], form, request, headers, tools=tools)

    async def complete(self, body: CompletionRequest, request: HttpRequest) -> Response:
        """Continue one or more prompts."""
        headers = check_parameters(body, strict=self._strict)
        wire = await completion_requests(body, idempotency_key(request))
        await asyncio.sleep(0)
        form = _format("completion", body, len(wire), echo=bool(body.echo))

        def prompt(index: int) -> str:
            return wire[index].text or self._model.tokenizer.decode(wire[index].token_ids.ids)

        return self._response(body, wire, form, request, headers, prompt=prompt)

    def _response(
        self,
        body: ChatRequest | CompletionRequest,
        wire: Sequence[pb.GenerateRequest],
        form: Format,
        request: HttpRequest,
        headers: Mapping[str, str],
        *,
        tools: ToolUse | None = None,
        prompt: PromptText = no_prompt,
    ) -> Response:
        call = request.scope[CALL]
        has_new_name = isinstance(body, ChatRequest) and body.max_completion_tokens is not None

        async def run(reader: Reader) -> None:
            language = ""

            async def complete() -> Mapping[str, bytes]:
                nonlocal language
                language = await set_output(wire, body, tools, self._model.tokenizer, self._model.turn)
                return {}

            try:
                await self._runner.generate(wire, form, call, reader, complete)
            except InvalidField as error:
                if has_new_name and error.field == "max_tokens":
                    raise InvalidField("max_completion_tokens", error.problem) from error
                located = error if tools is None else tools.located(error, language)
                raise renamed(located, language) from error

        if body.stream:
            former = [START] * form.choices
            return StreamedAnswers(
                run, lambda send: EventStream(send, form, self._model, former, headers, prompt)
            )
        return CollectedAnswers(run, WholeAnswers(form, self._model, prompt), headers)


class StreamedAnswers(Response):
    """A response of events, written while `run` runs the sessions."""

    def __init__(self, run: Run, writer: Callable[[Send], EventWriter]) -> None:
        super().__init__()
        self._run = run
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        events = self._writer(send)
        try:
            await self._run(events)
        except Exception as error:
            if not events.has_begun:
                raise
            await events.fail(error)


class CollectedAnswers(Response):
    """A response that is sent once `run` has collected the answers."""

    def __init__(self, run: Run, answers: Collector, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._run = run
        self._answers = answers
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(self._answers)
        finally:
            with suppress(IndexError):  # no session has begun
                scope[SESSION_ID] = self._answers.session_id
        body = await self._answers.body()
        headers = {"x-galley-session-id": self._answers.session_id, **self._more_headers}
        await Response(body, media_type="application/json", headers=headers)(scope, receive, send)


def _format(kind: str, body: ChoicesRequest, prompts: int, *, echo: bool = False) -> Format:
    n = body.n or 1
    return Format(
        "chat" if kind == "chat" else "completion",
        choices=prompts * n,
        n=n,
        usage=bool(body.stream_options is not None and body.stream_options.include_usage),
        echo=echo,
        token_ids=bool(body.return_token_ids),
        rounds=bool(body.return_rounds),
    )


def idempotency_key(request: HttpRequest) -> str:
    return request.headers.get("idempotency-key", "")
