"""Requests that are refused: the status, the parameter and its bound, before any work."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from galley.common.config.settings import ServerLimits
from galley.common.metrics.registry import Registry
from galley.common.models.tokenizer import Tokenizer
from galley.common.server.server import Parts
from galley.core.errors import InvalidField
from services.gateway.http.transport.errors import error_reply
from services.gateway.settings import GatewaySettings
from tests.fakes.http_client import BODY, CHAT, Events, HttpClient, http_client
from tests.fakes.truth import true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT, PROMPT_TOKENS, Gateway, World, must_be_true, receive

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"temperature": -1.0}, "temperature", "must be >= 0, got -1"),
    (COMPLETIONS, {"top_p": 0.0}, "top_p", "must be in (0, 1], got 0"),
    (COMPLETIONS, {"repetition_penalty": 100.0}, "repetition_penalty", "must be in ["),
    (COMPLETIONS, {"logit_bias": {"x": 1.0}}, "logit_bias", "token ids as names"),
    (COMPLETIONS, {"logit_bias": {"1": 1000.0}}, "logit_bias[1]", "must be in [-100, 100]"),
    (COMPLETIONS, {"logit_bias": {"\x1b" * 9999: "x"}}, f"logit_bias.{'?' * 64}", "must be a number"),
    (COMPLETIONS, {"user": "x" * 257}, "user", "user: must have at most 256 characters, got 257"),
    (COMPLETIONS, {"max_tokens": 10**6}, "max_tokens", "must be in [1, 65535]"),
    (COMPLETIONS, {"n": 9}, "n", "n: must be at most 8, got 9"),
    (COMPLETIONS, {"seed": -1}, "seed", "must be at least 0, got -1"),
    (COMPLETIONS, {"seed": 1 << 64}, "seed", "must be at most 18446744073709551615"),
    (COMPLETIONS, {"seed": 10**300}, "seed", "must be at most 18446744073709551615"),
    (
        COMPLETIONS,
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        "logit_bias",
        "at most 1024 entries, got 1025",
    ),
    (COMPLETIONS, {"prompt": ""}, "prompt", "must not be empty"),
    (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt[1]", "token id must be in [0, 264)"),
    (COMPLETIONS, {"prompt": [[1, -1]]}, "prompt[0][1]", "must be in [0,"),
    (COMPLETIONS, {"prompt": ["x"] * 33}, "prompt", "must have 1 to 32 entries, got 33"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop", "must have at most 16 entries"),
    (COMPLETIONS, {"speculation": {"mode": "never"}}, "speculation.mode", "'auto', 'off' or 'fixed'"),
    (COMPLETIONS, {"speculation": {"width": 9}}, "speculation.width", "must be at most 8, got 9"),
    (COMPLETIONS, {"speculation": {"kk": 1}}, "speculation.kk", "must be mode, k, width or strategy"),
    (COMPLETIONS, {"workload": "a b"}, "workload", "must have only letters"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo with logprobs", "is not supported"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "is not supported"),
    (COMPLETIONS, {"stream": "yes"}, "stream", "must be true or false"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "prompt: must be text or a list"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "must be an integer"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]", "must be text"),
    (COMPLETIONS, {"prompt": [[1], [1, "a"]]}, "prompt[1][1]", "must be an integer"),
    (COMPLETIONS, {"prompt": [{}]}, "prompt[0]", "must be text or an integer or a list"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt", "must have at most 1024 entries, got 1025"),
    (COMPLETIONS, {"stop": 5}, "stop", "stop: must be text or a list"),
    (COMPLETIONS, {"stop": ["a", 5]}, "stop[1]", "must be text"),
    (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text or a list"),
    (CHATS, {"tool_choice": 5}, "tool_choice", "'required' or a JSON object"),
    (CHATS, {"messages": []}, "messages", "must have 1 to 1024 entries"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "got none"),
    (CHATS, {"messages": [{"role": "", "content": ""}]}, "messages[0].role", "must not be empty"),
    (CHATS, {"messages": [{"role": "system", "content": "x"}]}, "messages", "chat template refuses them"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "must be of type text",
    ),
    (CHATS, {"max_completion_tokens": 10**6}, "max_completion_tokens", "must be in [1, 65535]"),
    (CHATS, {"top_logprobs": 3}, "top_logprobs", "must come with logprobs"),
    (CHATS, {"tools": [{"type": "function"}]}, "tools[0].function", "must be given"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "is not",
    ),
]


async def test_what_a_chat_template_says_of_messages_is_not_logged(client: HttpClient) -> None:
    with capture_logs() as lines:
        response = await client.post(CHATS, CHAT | {"messages": [{"role": "system", "content": "x"}]})
    assert "only users and assistants speak here" in response.json()["error"]["message"]
    [line] = [line for line in lines if line["event"] == "call finished"]
    assert (line["field"], line["status"]) == ("messages", "invalid_argument")
    assert "only users" not in repr(lines)


async def test_bad_parameters_name_themselves_and_their_bound(world: World, client: HttpClient) -> None:
    for path, given, param, problem in BAD:
        response = await client.post(path, (BODY if path == COMPLETIONS else CHAT) | given)
        error = response.json()["error"]
        assert response.status_code == 400, given
        assert error["param"] == param
        assert problem in error["message"]
        assert error["message"].startswith(param)
        assert error["type"] == "invalid_request_error"
    assert not world.target.calls
    assert not world.draft.calls


async def test_unknown_parameters_are_ignored_with_a_warning_or_refused(
    world: World, client: HttpClient
) -> None:
    given = BODY | {"guidance": 3, 'x"\r\ny': 1, "suffix": None, "parallel_tool_calls": True}
    response = await client.post(COMPLETIONS, given)
    assert response.headers["warning"] == '299 galley "unknown parameters ignored: guidance, x???y"'
    strict = await world.gateway(http_port=0, strict_parameters=True)
    async with http_client(strict.http) as other:
        refused = await other.post(COMPLETIONS, given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guidance")
        assert (await other.post(COMPLETIONS, BODY)).status_code == 200


async def test_what_is_not_served_is_taken_where_it_asks_for_nothing(client: HttpClient) -> None:
    nothing: dict[str, list[Any]] = {
        "skip_special_tokens": [True, None],
        "add_generation_prompt": [True],
        "spaces_between_special_tokens": [True],
        "length_penalty": [1, 1.0],
        "priority": [0],
        "suffix": ["", None],
        "use_beam_search": [False],
        "prompt_logprobs": [None],
        "logits_processors": [[]],
    }
    for index in range(2):
        given = {name: values[index] for name, values in nothing.items() if index < len(values)}
        response = await client.post(COMPLETIONS, BODY | given)
        assert "warning" not in response.headers
        assert response.status_code == 200
    for name, value in (
        ("skip_special_tokens", False),
        ("add_generation_prompt", False),
        ("spaces_between_special_tokens", False),
        ("prompt_logprobs", 0),
        ("length_penalty", 0),
        ("length_penalty", True),
        ("use_beam_search", 0),
    ):
        response = await client.post(COMPLETIONS, BODY | {name: value})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
UNKNOWN_INSIDE: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {"response_format": {"type": "text", "shape": 1}}, "response_format.shape"),
    (
        CHATS,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shape": 1}}},
        "response_format.json_schema.shape",
    ),
    (
        CHATS,
        {"tools": [{"type": "function", "function": FUNCTION, "shape": 1}], "tool_choice": "none"},
        "tools[0].shape",
    ),
    (
        CHATS,
        {"tools": [{"type": "function", "function": {**FUNCTION, "n": 1}}], "tool_choice": "none"},
        "tools[0].function.n",
    ),
    (
        CHATS,
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "x", "shape": 1}]}},
        "prediction.content[0].shape",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "text", "shape": 1}}, "store": False},
        "text.format.shape",
    ),
    (
        RESPONSES,
        {"tools": [{"type": "function", **FUNCTION, "shape": 1}], "tool_choice": "none"},
        "tools[0].shape",
    ),
]


async def test_unknown_names_inside_parameters_are_named_or_refused(world: World, client: HttpClient) -> None:
    strict = await world.gateway(http_port=0, strict_parameters=True)
    async with http_client(strict.http) as strict_client:
        for path, given, name in UNKNOWN_INSIDE:
            body = given | ({"input": "x"} if path == RESPONSES else {"messages": CHAT["messages"]})
            response = await client.post(path, body)
            assert response.headers["warning"] == f'299 galley "unknown parameters ignored: {name}"', given
            refused = await strict_client.post(path, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_what_is_no_request_is_refused(client: HttpClient) -> None:
    raw, kind = client.raw, {"content-type": "application/json"}
    cases = [
        (await raw.post(COMPLETIONS, content=b"{", headers=kind), 400),
        (await raw.post(COMPLETIONS, content=b"[]", headers=kind), 400),
        (await raw.post(COMPLETIONS, content=json.dumps(BODY), headers={"content-type": "text/plain"}), 400),
        (await raw.get(COMPLETIONS), 405),
        (await raw.post("/v1/nothing", json={}), 404),
        (await raw.post(COMPLETIONS, content=b"x" * (1 << 17), headers=kind), 413),
        (await raw.post(COMPLETIONS, json=BODY, headers={"x-galley-timeout-s": "soon"}), 400),
        (await raw.post(COMPLETIONS, json=BODY, headers={"origin": "https://elsewhere.example"}), 403),
        (await raw.get("/v1/models/other"), 404),
        (await raw.get("/health", headers={"x-request-id": "x" * 20_000}), 431),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]
    for sent, param, message in (
        ({"data": {"prompt": "x"}}, "content-type", "content-type: must be application/json"),
        ({"content": b"[]", "headers": kind}, None, "body: must be a JSON object"),
        ({"json": {}}, "prompt", "prompt: must be given"),
    ):
        error = (await raw.post(COMPLETIONS, **sent)).json()["error"]
        assert (error["param"], error["message"]) == (param, message)
    for method, path, status, message in (
        ("PUT", COMPLETIONS, 405, f"method: must be one of the path, got PUT {COMPLETIONS}"),
        ("GET", "/v1/%1b%C3%BCx", 404, "path: must be one of the API, got GET /v1/??x"),
        ("GET", f"/v1/{'x' * 9999}", 404, f"path: must be one of the API, got GET /v1/{'x' * 120}"),
    ):
        response = await raw.request(method, path)
        assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    packed = gzip.compress(json.dumps(BODY).encode())
    response = await raw.post(COMPLETIONS, content=packed, headers=kind | {"content-encoding": "gzip"})
    error = response.json()["error"]
    assert error["param"] == "content-encoding"
    assert error["message"] == "content-encoding: must be absent or identity, got 'gzip'"
    assert (await raw.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"


def test_errors_of_the_wire_name_the_parameter_of_a_prompt() -> None:
    for field, param in (("text", "prompt"), ("token_ids", "prompt"), ("token_ids.ids[3]", "prompt[3]")):
        error = error_reply(InvalidField(field, "must have at most 4 tokens")).object
        assert (error["param"], error["message"]) == (param, f"{param}: must have at most 4 tokens")


async def test_an_event_that_no_answer_can_have_is_refused_by_its_header(client: HttpClient) -> None:
    events = await client.stream(COMPLETIONS, BODY)
    path = f"/v1/sessions/{events.session_id}/events"
    last = next(event.id for event in reversed(events.events) if "." in event.id)
    unknown = f"70000.{last.partition('.')[2].partition('!')[0]}"
    refused = await client.raw.get(path, headers={"last-event-id": unknown})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id")


async def test_pages_of_listed_origins_may_call(world: World) -> None:
    gateway = await world.gateway(http_port=0, http_cors_origins="https://chat.example")
    async with http_client(gateway.http, origin="https://chat.example") as page:
        ours = "authorization, content-type, x-stainless-lang"
        asked = {"access-control-request-method": "POST", "access-control-request-headers": ours}
        preflight = await page.raw.options(COMPLETIONS, headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == ours
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        answer = await page.post(COMPLETIONS, BODY)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    async with http_client(gateway.http, origin=f"http://{gateway.http}") as own_page:
        assert (await own_page.post(COMPLETIONS, BODY)).status_code == 200


async def test_a_deadline_ends_the_work(world: World, gateway: Gateway, client: HttpClient) -> None:
    world.target.gate.close()
    response = await client.post(COMPLETIONS, BODY, x_galley_timeout_s="0.3")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert len(response.headers["x-galley-session-id"]) == 32
    world.target.gate.open()
    await gateway.idle()


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x"}), (COMPLETIONS, BODY | {"prompt": "x" * 2000})]
)
async def test_a_prompt_that_is_still_read_at_the_deadline_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    gateway = await world.gateway(http_port=0, max_sessions=1)
    held, encode = threading.Event(), Tokenizer.encode

    def encode_later(*given: Any) -> Any:
        assert held.wait(PATIENCE_S)
        return encode(*given)

    async with http_client(gateway.http) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Tokenizer, "encode", encode_later)
            response = await client.post(path, body, x_galley_timeout_s="0.1")
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
            await gateway.has_places()
            held.set()
        assert (await client.post(path, body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work(world: World, gateway: Gateway, stream: bool) -> None:
    async with http_client(gateway.http) as client:
        world.target.gate.close_after(2 if stream else 1)
        body = BODY | {"max_tokens": 5000, "n": 2}
        if stream:
            async with client.open(COMPLETIONS, body) as response:
                await Events().listen(response, until=1)
        else:
            leaving = asyncio.create_task(client.post(COMPLETIONS, body))
            await world.target.has_answered(1)
            leaving.cancel()
            await asyncio.wait({leaving})
    async with asyncio.timeout(PATIENCE_S):
        await gateway.has_places()
    world.target.gate.open()
    await gateway.idle()


async def test_an_unread_stream_ends_and_can_be_resumed(world: World) -> None:
    gateway = await world.gateway(http_port=0, client_timeout_s=1, buffer=32, max_sessions=1)
    host, port = gateway.http.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(BODY | {"max_tokens": 60_000, "stream": True, "logprobs": 20}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode()
    cast("asyncio.Transport", writer.transport).pause_reading()
    session_id = headers.partition("x-galley-session-id: ")[2][:32]
    await gateway.has_places()
    must_be_true(await receive(gateway.generate()))
    writer.transport.abort()
    path = f"/v1/sessions/{session_id}/events"
    async with http_client(gateway.http) as client, client.raw.stream("GET", path) as response:
        assert response.status_code == 200
        await Events().listen(response, until=3)


async def test_a_choice_that_has_ended_long_before_the_other_ends_nothing(world: World) -> None:
    """What is left unread is bounded, not how long another choice takes."""
    gateway = await world.gateway(http_port=0, client_timeout_s=0.5)
    first = bytes(true_output(PROMPT_TOKENS, 1)).decode()
    body = BODY | {"n": 2, "stop": [first], "stream": True}
    async with http_client(gateway.http) as client:
        world.target.gate.close_after(1)
        async with client.raw.stream("POST", COMPLETIONS, json=body) as response:
            events = Events()
            await events.listen(response, until=1)
            assert events.finish_reasons(0) == ["stop"]
            await asyncio.sleep(1.0)
            world.target.gate.open()
            await events.listen(response)
    assert events.is_done


async def test_a_silent_connection_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatewaySettings, "server_limits", lambda _: ServerLimits(handshake_timeout_s=0.2))
    gateway = await world.gateway(http_port=0)
    host, port = gateway.http.rsplit(":", 1)
    for sent in (b"", b"GET /health HTTP/1.1\r\nho"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_health_and_metrics(world: World) -> None:
    gateway = await world.gateway_of(Parts(metrics=Registry("gateway")), http_port=0)
    async with http_client(gateway.http) as client:
        assert (await client.raw.get("/health")).json() == {"status": "ok"}
        assert (await client.raw.get("/ready")).json() == {"status": "ok"}
        assert (await client.raw.get("/version")).json()["version"]
        for path in ("/health", "/ready", "/version"):
            head, whole = await client.raw.head(path), await client.raw.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == whole.headers["content-length"]
        await client.complete(prompt=PROMPT)
        metrics = (await client.raw.get("/metrics")).text
        assert 'galley_streams_total{fault="none",outcome="ok"} 1.0' in metrics
        [model] = (await client.raw.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 65536)
        world.target.gate.close()
        streaming = asyncio.create_task(client.post(COMPLETIONS, BODY))
        await world.target.gate.has_waiter()
        draining = asyncio.create_task(gateway.running.stop())
        while (ready := await client.raw.get("/ready")).status_code == 200:
            pass
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        refused = await client.post(COMPLETIONS, BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        world.target.gate.open()
        await draining
        assert (await streaming).status_code in {200, 503}
