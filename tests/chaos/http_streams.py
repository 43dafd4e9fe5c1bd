"""Streams over HTTP that go on at the next gateway by `Last-Event-ID`, as a browser's EventSource does."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeAlias

import grpc
import httpx2

from galley.client.options import Speculation
from tests.chaos.streams import Stream, WrongToken

_SILENT_S = 5.0
"""The longest time that a client waits for bytes before it takes its connection for broken."""
_PAUSE_S = 0.2
_Request: TypeAlias = AbstractAsyncContextManager[httpx2.Response]


class HttpError(Exception):
    """An error object, in a response or in a stream."""

    def __init__(self, error: dict[str, Any], *, refuses_call: bool = False) -> None:
        """`refuses_call`: it is the whole response."""
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = grpc.StatusCode[error["code"].upper()]
        is_busy = self.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        self.is_forgiven = refuses_call if is_busy else self.code is grpc.StatusCode.UNAVAILABLE


@dataclass
class _Answer:
    """What has arrived of one answer."""

    body: dict[str, Any]
    session_id: str = ""
    last_id: str = ""
    text: str = ""
    tokens: int = 0
    is_finished: bool = False

    def request(self, client: httpx2.AsyncClient, address: str) -> _Request:
        if not self.session_id:
            return client.stream("POST", f"http://{address}/v1/completions", json=self.body)
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        return client.stream("GET", f"http://{address}/v1/sessions/{self.session_id}/events", headers=headers)


@dataclass
class HttpStream(Stream):
    """A stream by the gateways' HTTP addresses `http`, whose reference was read by gRPC.

    `resumed` counts the requests by which it went on with an answer that had broken off.
    """

    http: tuple[str, ...] = ()
    resumed: int = 0

    async def _answer(self) -> None:
        answer = _Answer(self._body())
        async with httpx2.AsyncClient(timeout=_SILENT_S) as client:
            for address in cycle(self.http):
                try:
                    await self._read(client, address, answer)
                except httpx2.TransportError:
                    await asyncio.sleep(_PAUSE_S)
                except HttpError as error:
                    if error.code in self._ends:
                        self.ended[error.code.name] += 1
                        return
                    if not error.is_forgiven:
                        raise
                    self.refused += error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    await asyncio.sleep(_PAUSE_S)
                else:
                    break
        self._check_end(answer)
        self.answers += 1

    def _body(self) -> dict[str, Any]:
        options = self.options
        speculation = options["speculation"]
        assert isinstance(speculation, Speculation)
        given = {"mode": "auto", "k": speculation.k, "strategy": speculation.strategy}
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return {
            "prompt": self.prompt,
            "stream": True,
            "return_token_ids": True,
            "idempotency_key": secrets.token_hex(8),
            "speculation": {"mode": "off"} if speculation.off else given,
            **{name: value for name, value in options.items() if name in names},
        }

    async def _read(self, client: httpx2.AsyncClient, address: str, answer: _Answer) -> None:
        """Read events until the answer is complete. Raise HttpError or httpx2.TransportError."""
        self.resumed += bool(answer.last_id)
        async with answer.request(client, address) as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                raise HttpError(response.json()["error"], refuses_call=True)
            answer.session_id = response.headers["x-galley-session-id"]
            async for event_id, data in _events(response):
                answer.last_id = event_id or answer.last_id
                if data == "[DONE]":
                    return
                self._take(answer, json.loads(data))
        raise httpx2.ReadError("the stream ended without [DONE]")

    def _take(self, answer: _Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            raise HttpError(event["error"])
        [choice] = event["choices"]
        tokens = choice.get("token_ids", [])
        start, answer.tokens = answer.tokens, answer.tokens + len(tokens)
        if tokens != self.reference[start : answer.tokens]:
            raise WrongToken(f"{answer.session_id}: other tokens at {start} over HTTP")
        answer.text += choice["text"]
        answer.is_finished |= choice["finish_reason"] is not None
        if tokens:
            self.tokens += len(tokens)
            self.heard_s.append(time.monotonic())
            self.watch.changed()

    def _check_end(self, answer: _Answer) -> None:
        is_whole = answer.is_finished and answer.tokens == len(self.reference)
        if not is_whole or answer.text != self.reference_text:
            raise WrongToken(f"{answer.session_id}: ended after {answer.tokens} tokens over HTTP")


async def _events(response: httpx2.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the id and the data of each whole event."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", ""), fields["data"]
            fields = {}
