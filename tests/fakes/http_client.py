"""A client of the HTTP API, by httpx: it reads bodies and events, and knows nothing of Galley's code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.fakes.truth import SEED
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": SEED, "ignore_eos": True}
"""A completion whose answer is known (`true_output`)."""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": MAX_TOKENS,
    "seed": SEED,
    "ignore_eos": True,
}


@dataclass
class Event:
    id: str = ""
    data: str = ""
    kind: str = ""

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.data)
        return parsed


@dataclass
class Events:
    """The events of a stream so far; `last_id` is what a browser would send to continue."""

    events: list[Event] = field(default_factory=list)
    last_id: str = ""
    session_id: str = ""
    _lines: tuple[httpx2.Response, AsyncIterator[str]] | None = None

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in self.choices(index)
        )

    def tokens(self, index: int = 0) -> list[int]:
        return [token for choice in self.choices(index) for token in choice.get("token_ids", ())]

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [reason for choice in self.choices(index) if (reason := choice["finish_reason"])]

    @property
    def is_done(self) -> bool:
        return bool(self.events) and self.events[-1].data == "[DONE]"

    @property
    def usage(self) -> dict[str, Any]:
        [usage] = [one.json["usage"] for one in self.events if '"usage"' in one.data]
        return dict(usage)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.events[-1].json["error"])

    def choices(self, index: int) -> list[dict[str, Any]]:
        read = [one.json for one in self.events if one.data != "[DONE]"]
        return [choice for body in read for choice in body.get("choices", ()) if choice["index"] == index]

    async def listen(self, response: httpx2.Response, until: int | None = None) -> None:
        """Read events, until there are `until` of them in all."""
        self.session_id = response.headers.get("x-galley-session-id", self.session_id)
        event = Event()
        async with asyncio.timeout(PATIENCE_S):
            if self._lines is None or self._lines[0] is not response:
                self._lines = response, response.aiter_lines()
            async for line in self._lines[1]:
                name, _, value = line.partition(": ")
                if name == "id":
                    event.id = value
                elif name == "data":
                    event.data = value
                elif name == "event":
                    event.kind = value
                elif not line and event.data:
                    self.events.append(event)
                    self.last_id = event.id or self.last_id
                    event = Event()
                    if len(self.events) == until:
                        return


class HttpClient:
    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.raw = client

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> httpx2.Response:
        return await self.raw.post(path, json=body, headers=_names(headers))

    async def complete(self, **given: Any) -> dict[str, Any]:
        return _body(await self.post("/v1/completions", BODY | given))

    async def chat(self, **given: Any) -> dict[str, Any]:
        return _body(await self.post("/v1/chat/completions", CHAT | given))

    @asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any], **headers: str
    ) -> AsyncIterator[httpx2.Response]:
        stream = self.raw.stream("POST", path, json={**body, "stream": True}, headers=_names(headers))
        async with stream as response:
            yield response

    async def stream(self, path: str, body: Mapping[str, Any]) -> Events:
        events = Events()
        async with self.open(path, body) as response:
            await events.listen(response)
        return events

    async def resume(self, events: Events) -> Events:
        """Continue `events` as a browser's EventSource does."""
        headers = {"last-event-id": events.last_id} if events.last_id else {}
        path = f"/v1/sessions/{events.session_id}/events"
        async with self.raw.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            await events.listen(response)
        return events


@asynccontextmanager
async def http_client(address: str, **headers: str) -> AsyncIterator[HttpClient]:
    async with httpx2.AsyncClient(
        base_url=f"http://{address}", headers=_names(headers), timeout=PATIENCE_S
    ) as client:
        yield HttpClient(client)


def _names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def _body(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body
