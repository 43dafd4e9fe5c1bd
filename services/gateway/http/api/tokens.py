"""Text to token ids and back, by the served model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from itertools import count

from pydantic import Field
from starlette.responses import Response, StreamingResponse

from galley.common.wire.codec import check_token_ids
from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.auth.authentication import caller
from services.gateway.generation import Generation
from services.gateway.http.api.requests import chat_message
from services.gateway.http.api.schemas import ChatTurn, Ids, check_parameters
from services.gateway.http.parameters.parts import Few, Open
from services.gateway.http.parameters.tools import Tools
from services.gateway.http.tools.requests import ToolUse, tool_use
from services.gateway.http.transport.encoding import list_json, to_json
from services.gateway.request.validate import adapter_of, parse_prompt

_PIECE_IDS = 8192
_PIECE_CHARS = 64 * 1024
"""Characters of a text that are encoded in a slice: in 0.5 ms or less."""


class TokenizeRequest(Open):
    model: str | None = None
    prompt: str | None = Field(None, description="Text to complete.")
    messages: Few[ChatTurn] | None = Field(None, description="Or a conversation.")
    tools: Tools | None = Field(None, description="Tools of the conversation.")
    return_token_strs: bool | None = Field(None, description="Return the text of each token, too.")


class DetokenizeRequest(Open):
    model: str | None = None
    tokens: Ids


class Tokens:
    """Each call takes a slot while it runs, and is charged for its tokens as a prompt is.

    Unknown parameters are refused if `strict`, else ignored.
    """

    def __init__(self, generation: Generation, *, strict: bool) -> None:
        self._generation = generation
        self._strict = strict

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        headers = check_parameters(body, strict=self._strict)
        await asyncio.sleep(0)
        request, tools = _prompt_of(body)
        model = self._generation.model
        adapter_of(request.model, model.request_model())
        with self._generation.streams.admit(caller()) as slot:
            if tools is not None:
                await tools.add_to(request, model.turn)
            parse = partial(parse_prompt, request, model.limits, model.tokenizer, model.request_model())
            ids = await self._generation.tokenize(parse, len, slot, in_thread=True)
            self._generation.streams.charge(slot, len(ids))
        head = to_json({"count": len(ids), "max_model_len": model.info.context_window})[:-1]
        texts = await list_json(ids, self._text, model.turn) if body.return_token_strs else b"null"
        content = b'%b,"tokens":%b,"token_strs":%b}' % (head, await list_json(ids, int, model.turn), texts)
        return Response(content, headers=headers, media_type="application/json")

    def _text(self, token: int) -> str:
        return self._generation.model.tokenizer.token_bytes(token).decode(errors="replace")

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        headers = check_parameters(body, strict=self._strict)
        model = self._generation.model
        served = model.request_model()
        adapter_of(body.model or "", served)
        if len(body.tokens) > served.context_window:
            raise InvalidField(
                "tokens", f"must have at most {served.context_window} entries, got {len(body.tokens)}"
            )
        for at in range(0, len(body.tokens), _PIECE_IDS):
            check_token_ids("tokens", body.tokens[at : at + _PIECE_IDS], served.vocab_size, at)
            await asyncio.sleep(0)
        with self._generation.streams.admit(caller()) as slot:
            self._generation.streams.charge(slot, len(body.tokens))
            text = await self._generation.prompt_threads.run(
                slot.principal.name, partial(model.tokenizer.decode, body.tokens)
            )
        content = _prompt_json(text, model.turn)
        return StreamingResponse(content, headers=headers, media_type="application/json")


async def _prompt_json(text: str, turn: asyncio.Lock) -> AsyncIterator[bytes]:
    """Yield the JSON of a response with the text, a slice at a time: all of a long text takes too long."""
    yield b'{"prompt":"'
    for at in range(0, len(text), _PIECE_CHARS):
        async with turn:
            piece = to_json(text[at : at + _PIECE_CHARS])[1:-1]
            await asyncio.sleep(0)
        yield piece
    yield b'"}'


def _prompt_of(body: TokenizeRequest) -> tuple[pb.GenerateRequest, ToolUse | None]:
    """Return a request with the prompt, and the tools that it still lacks. Raise InvalidField."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt", "must be given, or messages, and not both")
    request = pb.GenerateRequest(model=body.model or "")
    if body.messages is None:
        if body.tools:
            raise InvalidField("tools", "must come with messages")
        request.text = body.prompt or ""
        return request, None
    request.messages.messages.extend(map(chat_message, body.messages, count()))
    functions = [tool.function for tool in body.tools or ()]
    return request, tool_use(functions, None, parallel=None, place=".function")
