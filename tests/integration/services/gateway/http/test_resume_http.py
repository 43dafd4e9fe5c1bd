"""Streams that break and continue, at any gateway and to the very token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from galley.core.admission.attempts import ATTEMPT_KEY, Attempt
from galley.core.store import StoredSession
from services.gateway.session import streams
from services.gateway.store.redis import RedisStore
from tests.fakes.http_client import BODY, CHAT, Events, HttpClient, http_client
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, Gateway, World, must_be_true, receive


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
async def test_a_stream_goes_on_at_another_gateway(world: World, count: int, n: int) -> None:
    """Break a stream after the openings of its choices, or after `count` tokens a choice."""
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    body = CHAT | {"n": n, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = await client.stream("/v1/chat/completions", body)
        events = Events()
        # The target waits: tokens that come while the store is slow share an event, up to the whole answer.
        world.target.gate.close_after(count * n)
        async with client.open("/v1/chat/completions", body) as response:
            await events.listen(response, until=n)
            while sum(len(events.tokens(index)) for index in range(n)) < count * n:
                await events.listen(response, until=len(events.events) + 1)
        world.target.gate.open()
        await other.resume(events)
        assert events.is_done
        for index in range(n):
            assert events.text(index) == whole.text(index)
            assert events.tokens(index) == whole.tokens(index)
            assert events.finish_reasons(index) == ["length"]
        assert events.usage["completion_tokens"] == n * MAX_TOKENS
        heads = [one.json for one in events.events[:-1]]
        assert len({(head["id"], head["created"], head["object"]) for head in heads}) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_each_event_names_the_build_of_its_tokens(world: World, n: int) -> None:
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    world.target.gate.close_after(3 * n)
    events = Events()
    async with http_client(first.http) as client, http_client(second.http) as other:
        async with client.open("/v1/completions", BODY | {"n": n, "return_token_ids": True}) as response:
            await world.target.waits_after(3 * n)
            before = [*world.target.confirmed.values(), 0][:n]
            world.target.fingerprint = "build-2"
            world.target.gate.open()
            await events.listen(response)
        again = await other.resume(Events(session_id=events.session_id))
    true = [["build-1"] * count + ["build-2"] * (MAX_TOKENS - count) for count in before]
    assert sum(before) == 3 * n
    for read in (events, again):
        assert [_builds(read, index) for index in range(n)] == true
        assert len({one.json["id"] for one in read.events[:-1]}) == 1


def _builds(events: Events, index: int) -> list[str]:
    """Return the build that the events of a choice name for each of its tokens."""
    return [
        body["system_fingerprint"]
        for body in (one.json for one in events.events[:-1])
        for choice in body["choices"]
        if choice["index"] == index
        for _ in choice.get("token_ids", ())
    ]


async def test_a_closed_gateway_hands_its_streams_over(world: World) -> None:
    first, second = await world.gateway(http_port=0, drain_timeout_s=1), await world.gateway(http_port=0)
    whole = await receive(second.generate(max_tokens=400))
    world.target.gate.close_after(3)
    events = Events()
    async with http_client(first.http) as client, http_client(second.http) as other:
        async with client.open("/v1/completions", BODY | {"max_tokens": 400}) as response:
            await events.listen(response, until=2)
            await first.running.stop()
            await events.listen(response)
        assert events.error["code"] == "unavailable"
        assert not events.is_done
        events.events.pop()
        world.target.gate.open()
        await other.resume(events)
    assert events.text() == whole.text
    assert events.is_done


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_comes_late_takes_nothing_from_a_later_one_of_its_stream(
    world: World, n: int
) -> None:
    """A cut link may hold it back until its client has gone to another gateway."""
    left, other = await world.gateway(http_port=0), await world.gateway(http_port=0)
    late, later = ({ATTEMPT_KEY: str(Attempt(b"stream", number))} for number in (1, 2))
    world.target.gate.close_after(3 * n)
    events = Events()
    async with http_client(left.http) as client, http_client(other.http) as elsewhere:
        async with client.open("/v1/completions", BODY | {"n": n}, **late) as response:
            await events.listen(response, until=n)
        await left.idle()
        path = f"/v1/sessions/{events.session_id}/events"
        async with elsewhere.raw.stream("GET", path, headers=later) as response:
            again = Events()
            await again.listen(response, until=1)  # the choices may share an event
            refused = await client.raw.get(path, headers=late)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            world.target.gate.open()
            await again.listen(response)
    assert again.is_done


async def test_a_request_that_waited_for_the_store_is_as_old_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may have gone to the owner that claimed the session meanwhile."""
    monkeypatch.setattr(streams, "_LEEWAY_MS", 0)
    first, second, third = [await world.gateway(http_port=0) for _ in range(3)]
    stream, received = await world.held(first, passes=2)
    began, may_read, read = asyncio.Event(), asyncio.Event(), RedisStore.read

    async def read_late(self: RedisStore, session_id: str, principal: str) -> StoredSession:
        began.set()
        await may_read.wait()
        return await read(self, session_id, principal)

    async with http_client(second.http) as client:
        path = f"/v1/sessions/{stream.session_id}/events"
        with monkeypatch.context() as late:
            late.setattr(RedisStore, "read", read_late)
            asking = asyncio.create_task(client.raw.get(path))
            await asyncio.wait_for(began.wait(), PATIENCE_S)
        world.target.gate.permit(2)  # the former owner may use one
        rival = third.client.resume_stream(stream)
        await received.listen(rival, until=len(received.tokens) + 1)
        may_read.set()
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        world.target.gate.open()
        must_be_true(await received.listen(rival))


async def test_a_request_with_a_malformed_attempt_is_refused(client: HttpClient) -> None:
    refused = await client.post("/v1/completions", BODY, x_galley_attempt="first")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, ATTEMPT_KEY)


async def test_each_choice_is_echoed_with_its_own_prompt(client: HttpClient) -> None:
    body = BODY | {"prompt": [PROMPT, "Go on."], "n": 2, "echo": True}
    whole = await client.stream("/v1/completions", body)
    again = await client.resume(Events(session_id=whole.session_id))
    for index, prompt in enumerate([PROMPT, PROMPT, "Go on.", "Go on."]):
        assert whole.text(index).startswith(prompt)
        assert again.text(index) == whole.text(index)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", BODY | {"echo": True})],
    ids=["chat", "echo"],
)
@pytest.mark.parametrize("read", [1, 2, 3])
async def test_a_stream_that_broke_between_its_openings_goes_on(
    client: HttpClient, path: str, body: dict[str, Any], read: int
) -> None:
    whole = await client.stream(path, body | {"n": 3})
    opened = [one.json["choices"][0]["index"] for one in whole.events[:3]]
    assert opened == [0, 1, 2]
    begun = whole.events[:read]
    again = await client.resume(Events(list(begun), begun[-1].id, whole.session_id))
    for index in range(3):
        assert again.text(index) == whole.text(index)
        openings = [one for one in again.choices(index) if "role" in one.get("delta", ())]
        assert len(openings) == (path == "/v1/chat/completions")


async def test_a_finished_stream_tells_an_event_source_to_stop(client: HttpClient) -> None:
    events = await client.stream("/v1/completions", BODY)
    path = f"/v1/sessions/{events.session_id}/events"
    assert (await client.raw.get(path, headers={"last-event-id": events.last_id})).status_code == 204
    again = await client.resume(Events(session_id=events.session_id))
    assert (again.text(), again.finish_reasons()) == (events.text(), ["length"])
    assert (await client.raw.get(f"{path}?last_event_id={events.last_id}")).status_code == 204


async def test_a_session_of_grpc_is_read_over_http(gateway: Gateway, client: HttpClient) -> None:
    received = await receive(gateway.generate())
    assert received.started is not None
    events = await client.resume(Events(session_id=received.started.session_id))
    assert (events.text(), events.is_done) == (received.text, True)


@pytest.mark.parametrize("last", ["5", "5.AAAA", "x", "1,1", "-1", "99999999999", "5." + "A" * 22])
async def test_a_wrong_event_id_is_refused(client: HttpClient, last: str) -> None:
    events = await client.stream("/v1/completions", BODY)
    path = f"/v1/sessions/{events.session_id}/events"
    response = await client.raw.get(path, headers={"last-event-id": last})
    lost = last.endswith("A" * 22)
    assert response.status_code == (500 if lost else 400)
    assert response.json()["error"]["code"] == ("data_loss" if lost else "invalid_argument")


@pytest.mark.parametrize("n", [1, 2])
async def test_state_and_end_of_a_session(world: World, gateway: Gateway, client: HttpClient, n: int) -> None:
    events = Events()
    world.target.gate.close_after(2 * n)
    async with client.open("/v1/completions", BODY | {"n": n, "max_tokens": 1000}) as response:
        await events.listen(response, until=1)
        path = f"/v1/sessions/{events.session_id}"
        state = (await client.raw.get(path)).json()
        assert (state["state"], len(state["choices"]), state["seed"]) == ("live", n, BODY["seed"])
        assert 0 < state["usage"]["completion_tokens"] < 1000
        assert (await client.raw.delete(path)).json()["aborted"] is True
        await events.listen(response)
    assert [events.finish_reasons(index) for index in range(n)] == [["abort"]] * n
    assert events.is_done
    state = (await client.raw.get(path)).json()
    assert (state["state"], state["choices"][0]["finish_reason"]) == ("finished", "abort")
    world.target.gate.open()
    await gateway.idle()


async def test_unknown_sessions_are_not_found(client: HttpClient) -> None:
    for session_id in ("00" * 16, "x"):
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
            response = await client.raw.request(
                method, f"/v1/sessions/{session_id}{path}", timeout=PATIENCE_S
            )
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
