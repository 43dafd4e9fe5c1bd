"""Clients that others wrote, as programs of their own: what they print must be the true answers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.fakes.http_client import BODY
from tests.fakes.truth import ASSISTANT, END, SEED, USER, text_of, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, Gateway, World

PROGRAMS = Path(__file__).parent / "clients"
_LONG_S = 6 * PATIENCE_S  # litellm takes a while to be imported

STOPS = frozenset({END})
CHAT_TOKENS = [USER, *PROMPT_TOKENS, ASSISTANT]
CHAT, OTHER = (text_of(true_output(CHAT_TOKENS, MAX_TOKENS, seed, stops=STOPS)) for seed in (SEED, SEED + 1))
TEXT = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS, stops=STOPS))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    # Bytecode is kept, so that a second run is faster.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", **more}


async def run(
    *words: str | Path,
    cwd: Path,
    given: bytes = b"",
    rc: int = 0,
    more: Mapping[str, str] = MappingProxyType({}),
) -> str:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=cwd, env=environment(more)
    )
    async with asyncio.timeout(_LONG_S):
        out, err = await process.communicate(given)
    assert process.returncode == rc, err.decode()
    return (out if rc == 0 else err).decode()


async def python(clients: Path, program: str, gateway: Gateway) -> dict[str, Any]:
    words = (clients / "bin" / "python", PROGRAMS / program, f"http://{gateway.http}/v1", PROMPT)
    # litellm prints advice before its errors.
    *_, last = (await run(*words, cwd=clients)).splitlines()
    return dict(json.loads(last))


async def node(clients: Path, program: str, gateway: Gateway) -> dict[str, Any]:
    # Read from the standard input, a program finds the packages below its working directory.
    words = (clients / "bin" / "node", "--input-type=module", "-", f"http://{gateway.http}/v1", PROMPT)
    return dict(json.loads(await run(*words, cwd=clients, given=(PROGRAMS / program).read_bytes())))


async def test_litellm(gateway: Gateway, clients: Path) -> None:
    assert await python(clients, "litellm_client.py", gateway) == {
        "chat": [CHAT, OTHER],
        "logprobs": MAX_TOKENS,
        "streamed": CHAT,
        "usage": [2 * MAX_TOKENS, MAX_TOKENS],
        "async": CHAT,
        "text": TEXT,
        "responses": [CHAT, CHAT],
        "errors": {
            "temperature": ["BadRequestError", 400],
            "model": ["NotFoundError", 404],
            "tools": ["BadRequestError", 400],
        },
    }


async def test_langchain(gateway: Gateway, clients: Path) -> None:
    received = await python(clients, "langchain_client.py", gateway)
    whole, streamed = received.pop("usage")
    assert whole == streamed
    assert (whole["input_tokens"], whole["output_tokens"]) == (len(CHAT_TOKENS), MAX_TOKENS)
    assert received.pop("parts") > 2
    assert received == {
        "chat": CHAT,
        "finish": "length",
        "streamed": CHAT,
        "async": CHAT,
        "batch": [CHAT, CHAT],
        "logprobs": MAX_TOKENS,
        "plain": CHAT,
        "text": TEXT,
        "responses": [CHAT, CHAT],
        "error": "model_not_found",
    }


async def test_llm(gateway: Gateway, clients: Path, tmp_path: Path) -> None:
    model = {"model_id": "galley", "model_name": "tiny", "api_base": f"http://{gateway.http}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    llm = (clients / "bin" / "llm", "-m", "galley", "-o", "max_tokens", f"{MAX_TOKENS}", "-o", "seed")
    words, home = (*llm, f"{SEED}", PROMPT), {"LLM_USER_PATH": str(tmp_path)}
    for flags in ((), ("--no-stream",)):
        assert await run(*words, *flags, cwd=tmp_path, more=home) == CHAT + "\n"
    assert "gpt-9" in await run(*words, "-m", "gpt-9", cwd=tmp_path, rc=1, more=home)
    logged = json.loads(await run(clients / "bin" / "llm", "logs", "--json", cwd=tmp_path, more=home))
    assert {(one["input_tokens"], one["output_tokens"]) for one in logged} == {(len(CHAT_TOKENS), MAX_TOKENS)}


async def test_vercels_ai_sdk(gateway: Gateway, clients: Path) -> None:
    assert await node(clients, "ai_sdk.mjs", gateway) == {
        "chat": CHAT,
        "finish": "length",
        "streamed": CHAT,
        "usage": [MAX_TOKENS, MAX_TOKENS],
        "error": ["AI_APICallError", 404, "model: must be 'tiny' or empty, got 'other'"],
    }


async def test_openai_on_node(gateway: Gateway, clients: Path) -> None:
    assert await node(clients, "openai_node.mjs", gateway) == {
        "chat": [CHAT, OTHER],
        "logprobs": MAX_TOKENS,
        "streamed": CHAT,
        "usage": [2 * MAX_TOKENS, MAX_TOKENS],
        "plain": CHAT,
        "text": TEXT,
        "responses": [CHAT, CHAT, CHAT],
        "models": ["tiny"],
        "error": [True, "temperature", "invalid_argument"],
    }


@pytest.fixture
def curl() -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("curl is not installed")
    return found


async def start_curl(*words: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *words, "--silent", "--show-error", "--no-buffer", "--fail-with-body", stdout=PIPE, stderr=DEVNULL
    )


async def read(process: Process, events: int | None = None) -> list[str]:
    """Return the next events of a stream, or all that are left."""
    assert process.stdout is not None
    received: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while events is None or len(received) < events:
            lines = [await process.stdout.readline() for _ in range(3)]
            if not lines[0]:
                break
            assert lines[2] == b"\n", lines
            received.append(b"".join(lines).decode())
    return received


def texts(events: list[str]) -> str:
    bodies = [event.partition("data: ")[2] for event in events]
    parts = [json.loads(body)["choices"] for body in bodies if not body.startswith("[DONE]")]
    return "".join(choice["text"] for part in parts for choice in part)


async def test_curl_streams_and_resumes(world: World, gateway: Gateway, curl: str) -> None:
    truth = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS))
    url = f"http://{gateway.http}/v1"
    world.target.gate.close_after(2)
    body = json.dumps(BODY | {"stream": True, "continue_without_client": True})
    call = await start_curl(
        curl, f"{url}/completions", "--header", "content-type: application/json", "--data", body
    )
    first = await read(call, 1)  # it comes while the target waits
    call.kill()
    await call.wait()
    world.target.gate.open()
    last_id = first[-1].partition("\n")[0]
    session = json.loads(first[-1].partition("data: ")[2])["id"].removeprefix("cmpl-")
    again = await start_curl(curl, f"{url}/sessions/{session}/events", "--header", f"last-event-{last_id}")
    rest = await read(again)
    assert await again.wait() == 0
    assert rest[-1] == "id: done\ndata: [DONE]\n\n"
    assert texts(first) + texts(rest) == truth
    refused = await start_curl(curl, f"{url}/models/other")
    assert await refused.wait() == 22  # an HTTP error
