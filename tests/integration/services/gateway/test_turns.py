"""No call holds the event loop of a gateway for more than 5 ms of CPU time, itself or from another thread."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.wire.fields import varint
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.generation import FEW_MESSAGES, SHORT_BYTES
from services.gateway.http.transport.body import MOST_IDS
from tests.fakes import fleet as fleet_module
from tests.fakes import replicas, tokenizer_files
from tests.fakes.fleet import Fleet
from tests.fakes.http_client import HttpClient, http_client
from tests.fakes.processes import gateway_process
from tests.fakes.turns import FILE, MOST_MS, Turns, too_long
from tests.fakes.world import ID_SECRET, World

CONTEXT, VOCAB = MOST_IDS, 1 << 17
MIB = 1 << 20
LONG_TOKEN = 'é "a token that is as long as the longest runs of spaces of vocabularies"'
LONG_TOKEN_ID = 259
IDS = [1000 + index % (VOCAB - 1000) for index in range(CONTEXT - 100)]
TEXT = "The quick brown fox. " * (CONTEXT // 21 - 20)
PREDICTION = pb.Prediction(token_ids=pb.TokenIds(ids=IDS[: CONTEXT // 2]))
LONG_TOKENS = 2000
JSON = {"content-type": "application/json"}
SPACES = b" " * (3 * MIB)
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass
class Calls:
    stub: Any
    channel: grpc.aio.Channel
    http: HttpClient
    long: str = ""
    """The id of a session with a long answer and 20 logprobs a token."""
    response: str = ""
    """That of a long response."""
    predicted: str = ""
    """That of a session with a long prediction."""
    parts: str = ""
    """That of a long response that may call tools."""
    tools: str = ""
    """That of a response with many tools."""
    turns: str = ""
    """That of a response with many turns."""

    async def generate(self, **given: Any) -> str:
        """Return the id of a session that ran to its end."""
        request = pb.GenerateRequest(**{"max_tokens": 4, "ignore_eos": True, **given})
        events = [event async for event in self.stub.Generate(request)]
        assert events[-1].event.HasField("finished")
        return str(events[0].event.started.session_id)

    async def resume(self, session_id: str) -> None:
        async for _ in self.stub.Resume(pb.ResumeRequest(session_id=session_id)):
            pass

    async def audit(self, session_id: str) -> None:
        response = await self.stub.Audit(pb.AuditRequest(session_id=session_id))
        assert response.verdict == pb.AuditResponse.VERDICT_SAME

    async def generate_and_audit(self, **given: Any) -> None:
        await self.audit(await self.generate(**given))

    async def refused(self, data: bytes, compression: Any = None) -> None:
        """Send a request as it is, which must be refused."""
        call: Any = self.channel.unary_stream("/galley.v1.Generation/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(data, compression=compression):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def get(self, path: str, **headers: str) -> None:
        assert (await self.http.raw.get(path, headers=headers)).status_code == 200

    async def post(self, path: str, body: Mapping[str, Any], status: int = 200) -> str:
        response = await self.http.post(path, body)
        assert response.status_code == status, response.text[:500]
        return str(response.headers.get("x-galley-session-id", ""))

    async def detokenize_long_tokens(self) -> None:
        response = await self.http.post("/detokenize", {"tokens": [LONG_TOKEN_ID] * len(IDS)})
        assert response.json() == {"prompt": LONG_TOKEN * len(IDS)}

    async def send(self, path: str, body: bytes, status: int = 200) -> None:
        """Post a body as it is."""
        response = await self.http.raw.post(path, content=body, headers=JSON)
        assert response.status_code == status, response.text[:500]


def messages(count: int, size: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * size} for _ in range(count)]


def schema(properties: int, size: int) -> dict[str, Any]:
    """Return a schema whose properties have a description of `size` characters."""
    described = {"type": "string", "description": "x" * size}
    return {"type": "object", "properties": {f"p{index}": described for index in range(properties)}}


def tools(count: int, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{index}", "parameters": parameters} for index in range(count)]


def of_chat(flat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in flat
    ]


def sized(number: int, data: bytes) -> bytes:
    """Return a field of a message that holds `data`."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x" * 200) for _ in range(1024)])
SHORT_CHAT = pb.ChatMessages(
    messages=[pb.ChatMessage(role="user", content="x" * 48) for _ in range(FEW_MESSAGES)]
)
EMPTY_MESSAGES = sized(3, b"\x0a\x00" * (MIB * 3 // 2))
BIASES = sized(5, pb.SamplingParams(logit_bias=dict.fromkeys(range(300_000), 1.0)).SerializeToString())
UNPACKED = sized(4, b"\x08\x01" * MIB)
PACKED = sized(4, sized(1, b"\x01" * (3 * MIB)))
TOOLS = tools(110, schema(20, 40))
TOO_LARGE_TOOLS = tools(110, schema(20, 1000))
LARGE_TOOL = tools(1, schema(2000, 40))
LARGE_SCHEMA = {"type": "json_schema", "schema": schema(2500, 80)}
INTEGERS = tools(1, {"type": "object", "properties": {"a": {"enum": [10**4300 - 1] * 900}}})
LONG_INTEGERS = json.dumps({"messages": messages(1, 8), "tools": of_chat(INTEGERS)}).encode()
RANDOM = bytes(range(256)) * (4 * MIB // 256)

CASES: dict[str, Callable[[Calls], Awaitable[object]]] = {
    "generate, ids": lambda on: on.generate(token_ids=pb.TokenIds(ids=IDS)),
    "generate, text": lambda on: on.generate(text=TEXT),
    "generate, too long a text": lambda on: on.refused(
        pb.GenerateRequest(text="a b" * (MIB // 3)).SerializeToString()
    ),
    "generate, chat": lambda on: on.generate(messages=CHAT),
    "generate, the longest text that needs no thread": lambda on: on.generate(text=TEXT[: SHORT_BYTES - 64]),
    "generate, the longest chat that needs no thread": lambda on: on.generate(messages=SHORT_CHAT),
    "generate, long parameters": lambda on: on.generate(
        text=TEXT,
        sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1000, 2024), 1.0)),
        stop=[f"{index:255}" for index in range(16)],
        stop_token_ids=range(1000, 1256),
    ),
    "generate, gzip": lambda on: on.refused(
        gzip.compress(pb.GenerateRequest(text="x" * 3 * MIB).SerializeToString())
    ),
    "generate, empty messages": lambda on: on.refused(EMPTY_MESSAGES),
    "generate, many biases": lambda on: on.refused(BIASES),
    "generate, ids that are not packed": lambda on: on.refused(UNPACKED),
    "generate, too many ids": lambda on: on.refused(PACKED),
    "generate, no message": lambda on: on.refused(RANDOM),
    "generate, prediction": lambda on: on.generate(text="Tell me all.", prediction=PREDICTION),
    "resume": lambda on: on.resume(on.long),
    "resume, prediction": lambda on: on.resume(on.predicted),
    "audit": lambda on: on.audit(on.long),
    "audit, ids": lambda on: on.generate_and_audit(token_ids=pb.TokenIds(ids=IDS)),
    "abort": lambda on: on.stub.Abort(pb.AbortRequest(session_id=on.long)),
    "model info": lambda on: on.stub.GetModelInfo(pb.GetModelInfoRequest()),
    "http: ids": lambda on: on.post("/v1/completions", {"prompt": IDS, "max_tokens": 4}),
    "http: ids, echoed": lambda on: on.http.stream(
        "/v1/completions", {"prompt": IDS, "max_tokens": 4, "echo": True}
    ),
    "http: prompts of ids": lambda on: on.post(
        "/v1/completions", {"prompt": [IDS[:8000]] * 32, "max_tokens": 1}
    ),
    "http: text": lambda on: on.post("/v1/completions", {"prompt": TEXT, "max_tokens": 4}),
    "http: chat": lambda on: on.post(
        "/v1/chat/completions", {"messages": messages(1024, 200), "max_tokens": 4}
    ),
    "http: text after many spaces": lambda on: on.send(
        "/v1/completions", b'{"max_tokens":4,"prompt":' + SPACES + b'"hi"}'
    ),
    "http: text before many spaces": lambda on: on.send(
        "/v1/completions", b'{"max_tokens":4,"prompt":["hi"' + SPACES + b"]}"
    ),
    "http: chat with long integers, refused": lambda on: on.send("/v1/chat/completions", LONG_INTEGERS, 400),
    "http: many wrong biases": lambda on: on.post(
        "/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(8000)), "")}, 400
    ),
    "http: tokenize": lambda on: on.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "http: detokenize": lambda on: on.post("/detokenize", {"tokens": IDS}),
    "http: detokenize to a long text": lambda on: on.detokenize_long_tokens(),
    "http: response of a long text": lambda on: on.post(
        "/v1/responses", {"input": TEXT, "max_output_tokens": 4}
    ),
    "http: chat with tools": lambda on: on.post(
        "/v1/chat/completions", {"messages": messages(1, 8), "max_tokens": 4, "tools": of_chat(TOOLS)}
    ),
    "http: chat with a large tool": lambda on: on.post(
        "/v1/chat/completions", {"messages": messages(1, 8), "max_tokens": 4, "tools": of_chat(LARGE_TOOL)}
    ),
    "http: chat that must call, refused": lambda on: on.post(
        "/v1/chat/completions",
        {"messages": messages(1, 8), "tools": of_chat(TOOLS), "tool_choice": "required"},
        400,
    ),
    "http: chat with a large schema, refused": lambda on: on.post(
        "/v1/chat/completions",
        {
            "messages": messages(1, 8),
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", **LARGE_SCHEMA}},
        },
        400,
    ),
    "http: chat with too large tools, refused": lambda on: on.post(
        "/v1/chat/completions", {"messages": messages(1, 8), "tools": of_chat(TOO_LARGE_TOOLS)}, 400
    ),
    "http: response with too large tools, refused": lambda on: on.post(
        "/v1/responses", {"input": "Tell me all.", "tools": TOO_LARGE_TOOLS, "tool_choice": "required"}, 400
    ),
    "http: tokenize tools": lambda on: on.post(
        "/tokenize", {"messages": messages(1, 8), "tools": of_chat(TOOLS)}
    ),
    "http: response with tools": lambda on: on.http.stream(
        "/v1/responses", {"input": "Tell me all.", "max_output_tokens": 4, "tools": TOOLS}
    ),
    "http: response with a large tool": lambda on: on.post(
        "/v1/responses", {"input": "Tell me all.", "max_output_tokens": 4, "tools": LARGE_TOOL}
    ),
    "http: response with a large schema, refused": lambda on: on.post(
        "/v1/responses", {"input": "Tell me all.", "text": {"format": LARGE_SCHEMA}}, 400
    ),
    "http: response that continues one": lambda on: on.post(
        "/v1/responses",
        {"input": "More.", "max_output_tokens": 4, "previous_response_id": f"resp_{on.turns}"},
    ),
    "http: items of a response": lambda on: on.get(f"/v1/responses/resp_{on.turns}/input_items?limit=100"),
    "http: response that was stored with tools": lambda on: on.get(f"/v1/responses/resp_{on.tools}"),
    "http: cancel": lambda on: on.post(f"/v1/responses/resp_{on.tools}/cancel", {}),
    "http: session": lambda on: on.get(f"/v1/sessions/{on.long}"),
    "http: session, prediction": lambda on: on.get(f"/v1/sessions/{on.predicted}"),
    "http: sessions": lambda on: asyncio.gather(*(on.get(f"/v1/sessions/{on.long}") for _ in range(6))),
    "http: events": lambda on: on.get(f"/v1/sessions/{on.long}/events"),
    "http: response": lambda on: on.get(f"/v1/responses/resp_{on.response}"),
    "http: events of a response": lambda on: on.get(f"/v1/responses/resp_{on.response}?stream=true"),
    "http: response with parts": lambda on: on.get(f"/v1/responses/resp_{on.parts}"),
    "http: events of a response with parts": lambda on: on.get(f"/v1/responses/resp_{on.parts}?stream=true"),
    "http: models": lambda on: on.get("/v1/models"),
    "http: metrics": lambda on: on.get("/metrics"),
    "http: open metrics": lambda on: on.get("/metrics", accept="application/openmetrics-text"),
    "http: description": lambda on: on.get("/openapi.json"),
}

_PARSED = (
    *("generate", "audit, ids", "http: ids", "http: prompts", "http: text", "http: chat"),
    *("http: tokenize", "http: detokenize", "http: response of a long text", "http: response with tools"),
    *("http: response with a large tool", "http: response that continues"),
)
PARSED = {name for name in CASES if name.startswith(_PARSED)}
"""Calls whose prompts are parsed or decoded in threads, in part in Python."""
MOST_PARSING_MS = 40.0
"""Such a thread may hold the interpreter lock for so long (decision 029)."""


@pytest.fixture
def credit() -> int:
    return 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(directory, tokenizer_files.TOOLS_TEMPLATE, added=[LONG_TOKEN])
    return directory


@asynccontextmanager
async def measured(world: World, turns_at: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Calls]:
    """Run a measured gateway before two targets that cache blocks of other prompts."""
    for module in (replicas, fleet_module):
        monkeypatch.setattr(module, "VOCAB", VOCAB)
    monkeypatch.setattr(replicas, "CONTEXT", CONTEXT)
    async with Fleet(world) as fleet:
        for member in fleet.members:
            member.context, member.block, member.cached = CONTEXT, 16, range(1 << 10)
        await fleet.register()
        flags = {"target": "", "http-port": "0"}
        environment = {FILE: str(turns_at), "GALLEY_GATEWAY_ID_SECRET": ID_SECRET}
        log = turns_at.with_suffix(".log")
        async with (
            gateway_process(world, log, environment, flags, "tests.fakes.measured_gateway") as at,
            grpc.aio.insecure_channel(at["address"], options=_UNLIMITED) as channel,
            http_client(at["http"]) as client,
        ):
            yield Calls(rpc.GenerationStub(channel), channel, client)


async def test_no_turn_takes_more_than_five_milliseconds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path / "turns")
    async with measured(world, tmp_path / "turns", monkeypatch) as on:
        on.long = await on.generate(text="Tell me all.", max_tokens=LONG_TOKENS, logprobs=20)
        on.predicted = await on.generate(text="Tell me all.", prediction=PREDICTION)
        body = {"input": "Tell me all.", "max_output_tokens": LONG_TOKENS, "top_logprobs": 20}
        on.response = await on.post("/v1/responses", body)
        on.parts = await on.post("/v1/responses", {**body, "tools": [{"type": "function", "name": "now"}]})
        short = {"max_output_tokens": 4}
        on.tools = await on.post("/v1/responses", {**short, "input": "Tell me all.", "tools": TOOLS})
        on.turns = await on.post("/v1/responses", {**short, "input": messages(1000, 200)})
        failed = []
        for name, case in CASES.items():

            async def called(case: Callable[[Calls], Awaitable[object]] = case) -> None:
                await case(on)
                await on.stub.GetModelInfo(pb.GetModelInfoRequest())

            if found := await too_long(turns, called, MOST_PARSING_MS if name in PARSED else MOST_MS):
                failed.append(f"{name}: {found}")
    assert not failed, "\n".join(failed)
