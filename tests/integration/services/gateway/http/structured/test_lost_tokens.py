"""Streams that go on after the store has lost tokens that the client has: they are computed again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.http_client import Event, Events, HttpClient, http_client
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.http.structured.test_responses_parts import (
    ANSWER,
    BODY,
    assembled,
    tokens_of,
)
from tests.integration.services.gateway.http.structured.test_tools import BODY as CHAT
from tests.integration.services.gateway.http.structured.test_tools import merged

KEPT = 3


def read_response(events: Events) -> Any:
    return assembled(events), tokens_of(events), events.events[-1].json["response"]["output"]


def read_chat(events: Events) -> Any:
    return merged(events), events.usage["completion_tokens_details"]


def read_completion(events: Events) -> Any:
    logprobs = [choice["logprobs"] for choice in events.choices(0) if choice["logprobs"]]
    return events.text(), [at for one in logprobs for at in one["text_offset"]]


FORMS: dict[str, tuple[str, dict[str, Any], Callable[[Events], Any]]] = {
    "response": ("/v1/responses", {**BODY, "top_logprobs": 1, "return_token_ids": True}, read_response),
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, read_chat),
    "completion": (
        "/v1/completions",
        {"prompt": "Weather?", "seed": 0, "max_tokens": 400, "logprobs": 1},
        read_completion,
    ),
}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session be continued at once by a client that has more tokens than its log."""
    monkeypatch.setattr("services.gateway.session.streams._OWNER_PAUSE_MS", 0)


async def left_session(
    world: World, gateway: Gateway, client: HttpClient, path: str, body: Mapping[str, Any]
) -> str:
    """Return the id of a session whose log has KEPT tokens at most, and that no call writes any more."""
    world.target.gate.close_after(KEPT)
    async with client.open(path, body) as response:
        await world.target.waits_after(KEPT)
        session_id = response.headers["x-galley-session-id"]
    await gateway.idle()
    world.target.gate.open()
    return session_id


def unnamed(events: Sequence[Event], session_id: str) -> list[Event]:
    """Return these events without the ids of their session and its calls."""
    names = re.compile(f"{session_id}|call_[0-9a-f]{{24}}")
    return [replace(event, data=names.sub("name", event.data)) for event in events]


@pytest.mark.parametrize("form", FORMS)
async def test_a_stream_goes_on_as_if_the_store_had_lost_nothing(
    world: World, answers: Answers, form: str
) -> None:
    """The client has a part of an equal answer, and goes on with a session that has fewer tokens."""
    path, body, read = FORMS[form]
    gateway = await world.gateway(draft="none", http_port=0)
    answers.write(ANSWER)
    async with http_client(gateway.http) as client:
        stream = await client.stream(path, body)
        whole = unnamed(stream.events, stream.session_id)
        for seen in range(len(whole) // 3, len(whole) - 1, len(whole) // 4):
            session_id = await left_session(world, gateway, client, path, body)
            again = await client.resume(Events(whole[:seen], whole[seen - 1].id, session_id))
            assert read(Events(unnamed(again.events, session_id))) == read(Events(whole)), seen


@pytest.mark.parametrize("form", ["response", "text"])
async def test_a_response_goes_on_after_a_number_that_the_store_has_lost(
    world: World, answers: Answers, form: str
) -> None:
    path, body, read = FORMS["response"]
    body = body if form == "response" else {"input": "Weather?", "seed": 0, "max_output_tokens": 400}
    gateway = await world.gateway(draft="none", http_port=0)
    answers.write(ANSWER)
    async with http_client(gateway.http) as client:
        stream = await client.stream(path, body)
        whole = unnamed(stream.events, stream.session_id)
        seen = len(whole) // 2
        session_id = await left_session(world, gateway, client, path, body)
        wrong = await client.raw.get(f"{path}/resp_{session_id}?stream=true&starting_after=1000000")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
        rest = Events()
        number = whole[seen - 1].json["sequence_number"]
        query = {"stream": "true", "starting_after": str(number)}
        async with client.raw.stream("GET", f"{path}/resp_{session_id}", params=query) as response:
            await rest.listen(response, until=2)
        again = await client.resume(Events(rest.events, rest.last_id, session_id))
        assert read(Events([*whole[:seen], *unnamed(again.events, session_id)])) == read(Events(whole))
