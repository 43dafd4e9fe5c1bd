"""What people see: where the tokens come from, how a start goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from galley.cli.answer import TextView, legend, reason
from galley.cli.up import StackProgress
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.stack.part import PartStatus, State

GREEN, UNDERLINE, RESET = "\x1b[32m", "\x1b[4m", "\x1b[0m"


def _chunk(text: str, *, from_draft: bool) -> pb.StreamEvent:
    return pb.StreamEvent(chunk=pb.Chunk(token_ids=[1], text=text, from_draft=[from_draft]))


def _output_of(console: Console) -> str:
    view = TextView(console, origins=True)
    for text, from_draft in (
        ("The", False),
        (" cat", True),
        ("", False),
        (" [b]sat", True),
        (" down", False),
    ):
        view.show(_chunk(text, from_draft=from_draft))
    view.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _console(*, terminal: bool, no_color: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        no_color=no_color,
        color_system="standard" if terminal else None,
        width=20,
        legacy_windows=False,
    )


def test_draft_tokens_are_green_without_wrapping_or_markup() -> None:
    output = _output_of(_console(terminal=True))
    assert output == f"The{GREEN} cat{RESET}{GREEN} [b]sat{RESET} down\n"


def test_without_colours_they_are_underlined() -> None:
    output = _output_of(_console(terminal=True, no_color=True))
    assert output == f"The{UNDERLINE} cat{RESET}{UNDERLINE} [b]sat{RESET} down\n"


def test_without_a_terminal_they_are_in_brackets() -> None:
    assert _output_of(_console(terminal=False)) == "The[ cat [b]sat] down\n"


def test_a_chunk_of_both_origins_is_split_where_its_tokens_end() -> None:
    console = _console(terminal=False)
    view = TextView(console, origins=True)
    mixed = pb.Chunk(
        token_ids=[1, 2, 3, 4],
        text="The cat sat down",
        from_draft=[False, True, True, False],
        text_ends=[3, 7, 11, 16],
    )
    view.show(pb.StreamEvent(chunk=mixed))
    mixed.text_ends[:] = [30, 7, 0, 1 << 31]
    view.show(pb.StreamEvent(chunk=mixed))
    view.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "The[ cat sat] downThe cat sat down\n", "bad ends harm nothing"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_legend_explains_it(terminal: bool) -> None:
    text = legend(_console(terminal=terminal)).plain
    assert "draft" in text
    assert "target" in text


def test_why_an_answer_ended() -> None:
    assert reason(pb.Finished(reason=pb.Finished.REASON_LENGTH)) == "length"
    assert reason(pb.Finished(reason=pb.Finished.REASON_STOP, stop_token_id=2)) == "stop token 2"


def test_start_is_logged_in_plain_lines_without_a_terminal() -> None:
    console = _console(terminal=False)
    progress = StackProgress(console)
    progress.expect(["target"])
    with progress:
        progress.show(PartStatus("target", State.STARTING, "loading model", 0.2))
        progress.show(PartStatus("target", State.READY, "ready", 1.25, "127.0.0.1:4711"))
    progress.show(PartStatus("target", State.STOPPED, "stopped", 9.0))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "target: loading model\ntarget: ready (1.2 s) 127.0.0.1:4711\n"


def test_a_start_is_a_live_table_on_a_terminal() -> None:
    console = _console(terminal=True)
    console.width = 80
    progress = StackProgress(console)
    progress.expect(["target", "gateway"])
    with progress:
        progress.show(PartStatus("target", State.READY, "ready", 1.25, "127.0.0.1:4711"))
    assert isinstance(console.file, io.StringIO)
    target, gateway = console.file.getvalue().rstrip().splitlines()[-3:-1]
    assert "✔" in target
    assert "127.0.0.1:4711" in target
    assert "waiting" in gateway
