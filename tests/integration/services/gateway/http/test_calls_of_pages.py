"""The first calls that pages show, sent to a gateway: it answers each of them."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes import tokenizer_files
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.http.test_other_clients import run
from tests.repo.commands.recording import ROOT, Call, Shell, blocks

PAGES = (
    *("README.md", "docs/getting-started.md", "docs/getting-started-cluster.md", "docs/http.md"),
    *("docs/operate/compose.md", "docs/operate/walks.md"),
)
BIN = Path(sys.prefix) / "bin"
# Of a server's other ports, or of a session that only the page's reader has.
NOT_A_FIRST_CALL = (":3000/", ":9101/", "/v1/sessions/")
# What a gateway without TLS does not take.
OF_TLS = {"--cacert": 2, "-cacert": 2, "-authority": 2}


def calls() -> dict[str, Call]:
    """Return the calls of gateways in the pages, each once."""
    found: dict[str, Call] = {}
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            shell = Shell(Path(folder))
            for block in blocks((ROOT / page).read_text()):
                found |= {str(inner): inner for call in shell.run(block)[0] if (inner := _first_call(call))}
    return found


def _first_call(call: Call) -> Call | None:
    words = call.arguments
    if call.program == "kubectl" and "--" in words:
        program, *rest = words[words.index("--") + 1 :]
        return _first_call(Call(program, tuple(rest)))
    if call.program == "python" and words[:3] == ("-m", "galley.cli", "generate"):
        return Call("galley", words[2:])
    asks = call.program in ("buf", "curl", "grpcurl") or (call.program == "galley" and words[0] == "generate")
    if not asks or "--file" in words or any(part in str(call) for part in NOT_A_FIRST_CALL):
        return None
    return call


def command(call: Call, gateway: Gateway) -> list[str | Path]:
    """Return the call with the gateway's addresses in place of the page's."""
    words = list(call.arguments)
    for flag, count in {**OF_TLS, "--endpoint": 2}.items():
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    match call.program:
        case "curl":
            path = next(word for word in words if word.startswith("http")).split("/", 3)[3]
            kept = [word for word in words if not word.startswith("http")]
            return ["curl", "--silent", "--fail-with-body", *kept, f"http://{gateway.http}/{path}"]
        case "galley":
            return [BIN / "galley", *words, "--endpoint", gateway.address]
    # grpcurl is in no package: buf sends the same message.
    body, method = words[words.index("-d") + 1], words[-1].split("/", 3)[-1]
    method = method if method.startswith("galley.") else words[-1]
    protocol = ("--protocol", "grpc", "--http2-prior-knowledge")
    return [BIN / "buf", "curl", *protocol, "-d", body, f"http://{gateway.address}/{method}"]


CALLS = calls()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(directory, tokenizer_files.TOOLS_TEMPLATE, control=["<tool_call>", "</tool_call>"])
    return directory


@pytest.fixture
async def gateway(world: World, tokenizer: Path) -> Gateway:
    """Return a gateway whose model calls tools, as the grammar of a call allows."""
    world.target.truth = Answers(tokenizer).of
    return await world.gateway(http_port=0)


def test_pages_show_each_kind_of_call() -> None:
    assert {call.program for call in CALLS.values()} == {"buf", "curl", "galley", "grpcurl"}


@pytest.mark.parametrize("name", CALLS)
async def test_a_gateway_answers(name: str, gateway: Gateway, tmp_path: Path) -> None:
    output = await run(*command(CALLS[name], gateway), cwd=tmp_path)
    assert output.strip()
    if "/v1/models" in name:
        assert json.loads(output)["data"]
    if "tool_choice" in name:
        assert json.loads(output)["choices"][0]["message"]["tool_calls"]
