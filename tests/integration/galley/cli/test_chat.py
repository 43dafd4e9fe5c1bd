"""`galley chat`: commands from a pipe, and the editor on a terminal, against a scripted gateway."""

from __future__ import annotations

import json
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import FakeChunk, FakeGateway, serving
from tests.fakes.terminal import Terminal
from tests.integration.galley.cli.test_commands import ask, generate_request_of, turns_of

COMMAND = [sys.executable, "-m", "galley.cli", "chat"]
ANSWER = "Hello, world!\n"
SENT, NEW_LINE, PROMPT = b"\r", b"\n", b"\x1b[?2004h"
"""Keys, and what the editor writes when it begins to read: bracketed paste on."""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def sent(gateway: FakeGateway) -> list[list[tuple[str, str]]]:
    return [turns_of(generate_request_of(gateway, number)) for number in range(len(gateway.requests))]


def test_undo_and_retry_change_the_conversation() -> None:
    gateway = FakeGateway()
    result = ask(gateway, "chat", stdin="/undo\n/retry\none\ntwo\n/retry\n/undo\nthree\n")
    one, two, answer = ("user", "one"), ("user", "two"), ("assistant", ANSWER)
    assert sent(gateway) == [[one], [one, answer, two], [one, answer, two], [one, answer, ("user", "three")]]
    assert "error: /undo: there is no message to remove" in result.stderr
    assert "error: /retry: there is no message to send again" in result.stderr


def test_retry_sends_a_message_again_that_failed() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), failures=1)
    result = ask(gateway, "chat", "--patience=0", stdin="one\n/retry\n")
    assert (result.stdout, result.exit_code) == (ANSWER, 1)
    assert sent(gateway) == [[("user", "one")]] * 2


def test_the_system_message_can_be_set_and_removed() -> None:
    gateway = FakeGateway()
    lines = '/system Be brief.\none\n/system\n/system ""\n/reset\ntwo\n'
    result = ask(gateway, "chat", stdin=lines)
    assert sent(gateway) == [[("system", "Be brief."), ("user", "one")], [("user", "two")]]
    assert result.stderr.count("system message: Be brief.") == 2
    assert "system message: none" in result.stderr


def test_options_are_set_shown_and_set_back() -> None:
    gateway = FakeGateway(default_sampling=pb.SamplingParams(temperature=0.25, top_k=20))
    lines = (
        "/set temperature 0\n/set seed 7\n/set k 3\n/set width 2\n/set strategy ngram\n/set lora sql\n"
        "/set\none\n"
        "/set temperature\n/set speculation off\n/set lora\n/set\ntwo\n"
    )
    shown = ask(gateway, "chat", stdin=lines).stderr
    first, second = (generate_request_of(gateway, number) for number in (0, 1))
    assert first.sampling == pb.SamplingParams(temperature=0, seed=7)
    assert first.speculation == pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=3, width=2, strategy="ngram")
    assert second.sampling == pb.SamplingParams(seed=7)
    assert second.speculation.mode == pb.Speculation.MODE_OFF
    assert (first.lora, second.lora) == ("sql", "")
    before, _, after = shown.partition("temperature: default")
    assert "temperature: 0\ntop_p: default\ntop_k: 20 (the model's)" in before
    assert (
        "seed: 7\nlora: sql\nspeculation: fixed, k 3, width 2, strategy ngram\norigins: off\nstats: off"
        in before
    )
    assert "temperature: 0.25 (the model's)" in after
    assert "speculation: off" in after


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/set temperature hot", "temperature: must be a number, got 'hot'"),
        ("/set seed -1", "seed: must be in [0, 18446744073709551615], got -1"),
        ("/set temperature -1", "temperature: must be >= 0, got -1"),
        ("/set top_p nan", "top_p: must be finite and in (0, 1], got nan"),
        ("/set presence_penalty 3", "presence_penalty: must be in [-2, 2], got 3"),
        ("/set width 9", "speculation.width: must be in [1, 8], got 9"),
        ("/set k 1.5", "speculation.k: must be an integer, got 1.5"),
        ("/set speculation maybe", 'speculation: must be "auto", "off"'),
        ("/set origins perhaps", "origins: must be on or off, got perhaps"),
        ("/set foo 1", "/set: must name one of temperature, "),
        ("/save", "/save: must name a file"),
        ("/save /nowhere/x", "/save: /nowhere/x: cannot be written: No such file"),
        ("/save ~nobody-has-this-name/x", "/save: ~nobody-has-this-name/x: cannot be written: "),
        ("/foo", "/foo: unknown command; /help lists them"),
    ],
)
def test_a_bad_command_is_refused_in_one_line_and_the_chat_goes_on(line: str, problem: str) -> None:
    gateway = FakeGateway()
    result = ask(gateway, "chat", stdin=f"{line}\none\n")
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {problem}")
    assert result.exit_code == 1
    assert sent(gateway) == [[("user", "one")]]


def test_a_message_may_begin_with_a_slash() -> None:
    gateway = FakeGateway()
    ask(gateway, "chat", stdin="//etc/hosts?\n")
    assert sent(gateway) == [[("user", "/etc/hosts?")]]


def test_the_conversation_is_saved_as_messages_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    saved = ask(FakeGateway(), "chat", "--system=Be brief.", stdin=f"one\n/save {file}\n/save {file}\n")
    messages: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    assert [one["content"] for one in messages] == ["Be brief.", "one", ANSWER]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"wrote 3 messages to {file}" in saved.stderr
    assert "cannot be written: File exists" in saved.stderr


def test_statistics_of_an_answer_and_of_the_chat() -> None:
    result = ask(FakeGateway(), "chat", "--stats", stdin="one\ntwo\n/stats\n/help\n")
    lines = [line for line in result.stderr.splitlines() if "tokens/s" in line]
    assert len(lines) == 3
    assert lines[0].startswith("4 tokens · ")
    assert "mean accepted length 2.00 · 50% of draft tokens accepted · first token " in lines[0]
    assert lines[2].startswith("2 answers · 8 tokens · ")
    assert "/retry" in result.stderr


def chat_on_terminal(address: str, *flags: str) -> Terminal:
    # This terminal does not answer where its cursor is.
    command = [*COMMAND, f"--endpoint={address}", "--patience=0", *flags]
    return Terminal(command, NO_COLOR="", PROMPT_TOOLKIT_NO_CPR="1")


def test_a_chat_on_a_terminal_succeeds_although_an_answer_failed() -> None:
    with (
        serving(FakeGateway(error=Unavailable("draining"))) as address,
        chat_on_terminal(address) as terminal,
    ):
        terminal.until(PROMPT)
        terminal.press(b"one" + SENT)
        terminal.until(b"draining")
        terminal.until(PROMPT)
        terminal.press(b"\x04")
        assert terminal.process.wait(20) == 0


def test_the_editor_takes_several_lines_and_keeps_them_for_the_next_chat(tmp_path: Path) -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        with chat_on_terminal(address) as terminal:
            terminal.until(PROMPT)
            terminal.press(b"first" + NEW_LINE + b"second" + SENT)
            terminal.until(b"first token ")
            terminal.until(PROMPT)
            terminal.press(b"\x04")
            assert terminal.process.wait(20) == 0
            assert terminal.modes == terminal.before
        with chat_on_terminal(address) as terminal:
            terminal.until(PROMPT)
            terminal.press(b"\x1b[A" + SENT)
            terminal.until(b"first token ")
            terminal.until(PROMPT)
            terminal.press(b"half\x03")
            terminal.press(b"\x03")
            assert terminal.process.wait(20) == 0
    assert sent(gateway) == [[("user", "first\nsecond")]] * 2
    file = tmp_path / "state" / "galley" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_history_can_be_left_off(tmp_path: Path) -> None:
    with serving(FakeGateway()) as address, chat_on_terminal(address, "--no-history") as terminal:
        terminal.until(PROMPT)
        terminal.press(b"one" + SENT)
        terminal.until(b"first token ")
    assert not (tmp_path / "state").exists()


def test_a_stopped_answer_is_kept() -> None:
    script = (FakeChunk((1,), "It was a dark"), FakeChunk((2,), "never"))
    gateway = FakeGateway(script=script, hang=True, fail_at=1)
    with serving(gateway) as address, chat_on_terminal(address) as terminal:
        terminal.until(PROMPT)
        terminal.press(b"one" + SENT)
        terminal.until(b"It was a dark")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(b"stopped; the answer so far is kept")
        assert gateway.cancelled.wait(20)
        gateway.hang = False
        terminal.until(PROMPT)
        terminal.press(b"two" + SENT)
        terminal.until(b"first token ")
    assert sent(gateway) == [
        [("user", "one")],
        [("user", "one"), ("assistant", "It was a dark"), ("user", "two")],
    ]


def test_tokens_are_coloured_by_origin_on_request() -> None:
    with serving(FakeGateway()) as address, chat_on_terminal(address) as terminal:
        terminal.until(PROMPT)
        terminal.press(b"/set origins on" + SENT)
        terminal.until(b"\x1b[32mproposed by the draft\x1b[0m")
        terminal.until(b"supplied by the target")
        terminal.until(PROMPT)
        terminal.press(b"one" + SENT)
        terminal.until(b"Hello\x1b[32m, wor\x1b[0mld!")


def test_history_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file", encoding="utf-8")
    with serving(FakeGateway()) as address, chat_on_terminal(address) as terminal:
        terminal.until(b"chat_history: history is not kept: Not a directory")
        terminal.until(PROMPT)
        terminal.press(b"one" + SENT)
        terminal.until(b"first token ")
