"""What a hostile gateway can make the commands write: text, and nothing that a terminal would interpret."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import Parse
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import FakeChunk, FakeGateway, serving
from tests.fakes.waiting import PATIENCE_S

CLIPBOARD, CLEAR, C1, REORDER = "\x1b]52;c;ZXZpbA==\x07", "\x1b[2J", "\x9b31m", "\u202etxt.exe\u2066"
HOSTILE = f"a{CLIPBOARD}b{CLEAR}c{C1}d{REORDER}e\x7f\u2028\u200f"
OBEYED = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u200e\u200f\u061c"}
OBEYED |= {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
WRITTEN = {"\r", "\n", "\t"}
COMMANDS = [
    ("generate", "x"),
    ("generate", "x", "--origins", "--logprobs=1"),
    ("resume", "s"),
    ("chat",),
]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def hostile_gateway(*, breaks: bool) -> FakeGateway:
    pieces = ("first\x1b", f"]0;title\x07 {HOSTILE}", "")
    script = tuple(
        FakeChunk((at,), piece, from_draft=at == 1, logprobs=(-1.0,), token_bytes=(piece.encode(),))
        for at, piece in enumerate(pieces)
    )
    error = Unavailable(f"draining\n{HOSTILE}") if breaks else None
    return FakeGateway(script, error, fail_at=2, session_id=f"id {HOSTILE}", stop=HOSTILE)


def on_terminal(address: str, *args: str) -> str:
    """Return all that the command writes to its terminal, which has no colours."""
    fd, theirs = pty.openpty()
    command = [sys.executable, "-m", "galley.cli", *args, f"--endpoint={address}", "--patience=0"]
    env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        os.write(fd, b"one\n/quit\n")
        written = b""
        # Linux raises an OSError once the last writer has closed the terminal.
        try:
            while piece := os.read(fd, 65536):
                written += piece
        except OSError:
            os.close(fd)
        process.wait(PATIENCE_S)
    return written.decode()


def piped(address: str, *args: str) -> Result:
    return CliRunner().invoke(app, [*args, f"--endpoint={address}", "--patience=0"], input="one\n/quit\n")


@pytest.mark.parametrize("breaks", [False, True], ids=["finishes", "breaks"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_terminal_gets_no_character_that_it_would_obey(command: tuple[str, ...], breaks: bool) -> None:
    with serving(hostile_gateway(breaks=breaks)) as address:
        output = on_terminal(address, *command)
    assert "first\ufffd" in output
    assert not (OBEYED - WRITTEN) & set(output)
    if breaks:
        [error] = [line for line in output.splitlines() if line.startswith("error: ")]
        assert "UNAVAILABLE: draining\ufffda" in error


@pytest.mark.parametrize("command", COMMANDS[::2], ids=" ".join)
def test_a_pipe_gets_the_text_unchanged_and_clean_messages(command: tuple[str, ...]) -> None:
    with serving(hostile_gateway(breaks=True)) as address:
        result = piped(address, *command)
    assert result.stdout == f"first\x1b]0;title\x07 {HOSTILE}\n"
    assert not (OBEYED - {"\n"}) & set(result.stderr)


def test_a_pipe_gets_the_text_unchanged_where_draft_tokens_are_marked() -> None:
    with serving(hostile_gateway(breaks=False)) as address:
        output = piped(address, "generate", "x", "--origins").stdout
    assert output == f"first\x1b[]0;title\x07 {HOSTILE}]\n"


def test_a_pipe_gets_no_control_character_in_the_table_of_logprobs() -> None:
    with serving(hostile_gateway(breaks=False)) as address:
        output = piped(address, "generate", "x", "--logprobs=1").stdout
    text, table = output.split("\n\n")
    assert text == f"first\x1b]0;title\x07 {HOSTILE}"
    assert r"'first\x1b'" in table
    assert all(line.isprintable() for line in table.split("\n"))


def test_json_escapes_every_control_character() -> None:
    with serving(hostile_gateway(breaks=False)) as address:
        output = piped(address, "generate", "x", "--json").stdout
    assert output.isascii()
    assert not (OBEYED - {"\n", "\x7f"}) & set(output)
    texts = [Parse(line, pb.StreamEvent()).chunk.text for line in output.splitlines()]
    assert "".join(texts) == f"first\x1b]0;title\x07 {HOSTILE}"


@pytest.mark.parametrize("session_id", ["x; reboot", "--endpoint=evil", "$(reboot)", "a\nb", "x" * 300])
def test_no_command_is_suggested_for_a_session_id_that_a_shell_would_read_otherwise(session_id: str) -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=1, session_id=session_id)
    with serving(gateway) as address:
        result = piped(address, "generate", "x")
    assert result.exit_code == 1
    assert result.stderr == "error: UNAVAILABLE: draining\n"


def test_a_reason_that_this_version_does_not_know_is_shown_by_its_number() -> None:
    from galley.cli.answer import reason  # noqa: PLC0415

    finished = pb.Finished()
    finished.MergeFromString(b"\x08\x63")
    assert reason(finished) == "reason 99"
