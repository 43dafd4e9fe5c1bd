"""The programs in examples/, and those of the pages, run against a real gateway and do what they say."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.truth import ASSISTANT, END, USER, text_of, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World

ROOT = Path(__file__).resolve().parents[2]
TOO_LONG = 70_000  # bytes; the gateways of a World take messages of 65536
TESTED = {"batch", "chat", "openai_python", "resume", "seeds", "stream"}
# Their answers need a real target: tests/e2e/test_structured_programs.py.
TESTED_WITH_A_STACK = {"edit", "extract"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    tokenizer_files.write(tokenizer)
    # The path of a unix socket is limited to 107 bytes, which pytest's tmp_path can exceed.
    with running(VALKEY) as store, tempfile.TemporaryDirectory(prefix="galley-") as directory:
        async with World(Path(directory), tokenizer, store.url) as world:
            yield world


async def start(name: str | Path, *arguments: object) -> Process:
    program = name if isinstance(name, Path) else ROOT / "examples" / f"{name}.py"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GALLEY_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    words = [str(one) for one in arguments]
    return await asyncio.create_subprocess_exec(
        sys.executable, program, *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
    )


async def output(
    process: Process, given: str = "", *, rc: int = 0, patience_s: float = PATIENCE_S
) -> tuple[str, str]:
    async with asyncio.timeout(patience_s):
        out, err = await process.communicate(given.encode())
    assert process.returncode == rc, err.decode()
    return out.decode(), err.decode()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == TESTED | TESTED_WITH_A_STACK


@pytest.mark.parametrize("name", sorted(TESTED | TESTED_WITH_A_STACK))
async def test_an_example_shows_its_arguments(name: str) -> None:
    out, err = await output(await start(name, "--help"))
    assert out.startswith(f"usage: {name}.py ")
    assert err == ""


@pytest.mark.parametrize("name", ["batch", "edit"])
async def test_an_example_without_its_arguments_says_which_it_needs(name: str) -> None:
    _, err = await output(await start(name), rc=2)
    assert err.startswith(f"usage: {name}.py ")
    assert "required: HOST:PORT, " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
async def test_the_python_of_the_pages(world: World, page: str, tmp_path: Path) -> None:
    gateway = await world.gateway()
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text(code.replace("127.0.0.1:50051", gateway.address))
    out, err = await output(await start(program))
    assert out
    assert err == ""


def answers(world: World, max_tokens: int) -> list[str]:
    """Return the true text for each prompt that reached the target, in order."""
    texts: dict[str, str] = {}
    for call in world.target.calls:
        part = call.slice
        if part.start == 0 and part.session_id not in texts:
            prompt = part.tokens[: part.prompt_len]
            truth = true_output(prompt, max_tokens, part.sampling.seed, stops=frozenset({END}))
            texts[part.session_id] = text_of(truth)
    return list(texts.values())


async def test_stream(world: World) -> None:
    gateway = await world.gateway()
    out, err = await output(await start("stream", gateway.address, "Once"))
    text, summary, _ = out.rsplit("\n", 2)
    assert [text] == answers(world, 64)
    assert re.fullmatch(r"\d+ tokens, acceptance rate [01]\.\d\d", summary)
    assert err == ""


async def test_chat(world: World) -> None:
    gateway = await world.gateway()
    out, err = await output(await start("chat", gateway.address), "Hi\nAnd?\n")
    first, second = answers(world, 128)
    assert (out, err) == (f"{first}\n{second}\n", "")
    [*_, last] = [call.slice for call in world.target.calls if call.slice.start == 0]
    turns = [USER, *b"Hi", ASSISTANT, *first.encode(), USER, *b"And?", ASSISTANT]
    assert last.tokens[: last.prompt_len] == turns


async def test_chat_continues_after_an_error(world: World) -> None:
    gateway = await world.gateway()
    out, err = await output(await start("chat", gateway.address), "x" * TOO_LONG + "\nHi\n")
    assert err.startswith("error: INVALID_ARGUMENT: ")
    assert [out] == [f"\n{text}\n" for text in answers(world, 128)]


async def test_resume_after_the_program_was_killed(world: World, tmp_path: Path) -> None:
    first, second = await world.gateway(), await world.gateway()
    state = tmp_path / "state.json"
    world.target.gate.close_after(8)
    killed = await start("resume", first.address, state)
    await has_printed(killed)
    killed.send_signal(signal.SIGKILL)
    await output(killed, rc=-signal.SIGKILL)
    seen = json.loads(state.read_text())
    assert seen["next_index"] > 0
    world.target.gate.open()
    out, err = await output(await start("resume", second.address, state))
    [text] = answers(world, 256)
    assert (out, err) == (f"{text}\n", "")
    assert text.startswith(seen["text"])
    assert files_of(tmp_path) == ["tokenizer"]


async def test_resume_after_the_gateway_was_stopped(world: World, tmp_path: Path) -> None:
    leaving, staying = await world.gateway(drain_timeout_s=0.1), await world.gateway()
    world.target.gate.close_after(8)
    program = await start("resume", f"{leaving.address},{staying.address}", tmp_path / "state.json")
    printed = await has_printed(program)
    await leaving.running.stop()
    world.target.gate.open()
    out, err = await output(program)
    [text] = answers(world, 256)
    assert (printed + out, err) == (f"{text}\n", "")


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def has_printed(program: Process) -> str:
    """Return the first character, which may have several bytes."""
    assert program.stdout is not None
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    async with asyncio.timeout(PATIENCE_S):
        while not text:
            text = decoder.decode(await program.stdout.readexactly(1))
    return text


async def test_seeds(world: World) -> None:
    gateway = await world.gateway()
    out, err = await output(await start("seeds", gateway.address))
    first, again, plain, other = answers(world, 32)
    lines = out.splitlines()
    assert re.fullmatch(rf"seed \d+, build build-1: {re.escape(repr(first))}", lines[0])
    assert [" ".join(line.split()[-2:]) for line in lines[1:]] == [
        "same tokens",
        "same tokens",
        "other tokens",
    ]
    assert first == again == plain != other
    assert err == ""


async def test_openai_python(world: World) -> None:
    gateway = await world.gateway(http_port=0)
    out, err = await output(await start("openai_python", f"http://{gateway.http}/v1", "Hi"))
    first, plain = answers(world, 64)
    begin, rest = out[: len(first)], out[len(first) :]
    counts, again = re.findall(r"\n(\d+) tokens, (\d+) of them from the draft\n", rest)
    assert begin == first == plain
    assert counts[0] == again[0]
    assert int(counts[1]) > int(again[1]) == 0
    assert rest.endswith(
        f"draft\n{plain}\n{again[0]} tokens, 0 of them from the draft\nthe same seed, plain: same text\n"
    )
    assert err == ""


async def test_batch(world: World, tmp_path: Path) -> None:
    gateway = await world.gateway(max_sessions=2)
    files, out = [tmp_path / f"{name}.txt" for name in "abcd"], tmp_path / "out"
    out.mkdir()
    for file in files:
        file.write_text(f"This is {file.stem}.")
    long, latin = tmp_path / "long.txt", tmp_path / "latin.txt"
    long.write_text("x" * TOO_LONG)
    latin.write_bytes(b"caf\xe9")
    printed, err = await output(await start("batch", gateway.address, out, *files, long, latin), rc=1)
    assert "100%" in printed
    refused, unreadable = sorted(err.splitlines(), reverse=True)
    assert refused.startswith(f"{long}: INVALID_ARGUMENT: ")
    assert unreadable.startswith(f"{latin}: 'utf-8' codec")
    written = [(out / file.name).read_text() for file in files]
    assert sorted(written) == sorted(answers(world, 128))
    calls = len(world.target.calls)
    await output(await start("batch", gateway.address, out, *files))
    assert len(world.target.calls) == calls, "answers that are there are not requested again"
