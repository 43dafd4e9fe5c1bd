"""`galley trace` as a user runs it, on files of traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.core import names
from galley.trace.read.library import WHEN
from galley.trace.read.spans import Process, Span
from tests.fakes import trace_scenes as scenes
from tests.fakes.trace_builder import BEGAN_NS, SESSION, Scene, write

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def own_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "traces"
    directory.mkdir()
    monkeypatch.setenv("GALLEY_TRACE_DIR", str(directory))
    return directory


def galley_trace(*args: str) -> Result:
    return CliRunner().invoke(app, ["trace", *args], env=PLAIN)


def test_the_newest_file_is_read_by_default(own_traces: Path) -> None:
    write(Scene(), own_traces / "traces-old.jsonl")
    os.utime(own_traces / "traces-old.jsonl", (1, 1))
    write(scenes.eventful(), own_traces / "traces-new.jsonl")
    result = galley_trace(SESSION[:8])
    assert result.exit_code == 0, result.output
    assert f"session {SESSION}" in result.stdout
    assert "Slowest  " in result.stdout
    assert "session.moved" in result.stdout


def test_the_list_names_the_latest_first(own_traces: Path) -> None:
    write(scenes.eventful(), own_traces / "traces-1.jsonl")
    result = galley_trace("--list")
    assert result.exit_code == 0, result.output
    heading, *lines, total = result.stdout.splitlines()
    assert "slowest round" in heading
    assert len(lines) == 2
    assert any(SESSION in line and "170 ms" in line and line.endswith("ok") for line in lines)
    assert total == f"2 requests in {own_traces}/traces-1.jsonl"


def test_an_unknown_id_a_missing_file_and_a_bad_line_are_one_line_each(tmp_path: Path) -> None:
    path = write(scenes.resumed(), tmp_path / "t.jsonl")
    unknown = galley_trace("beef", "--file", str(path))
    assert unknown.exit_code == 1
    assert unknown.stderr == f"error: no session or trace 'beef' in {path}; {WHEN}\n"
    assert "within half a second of its end" in WHEN
    missing = galley_trace("beef", "--file", str(tmp_path / "none.jsonl"))
    assert (missing.exit_code, missing.stderr) == (1, f"error: {tmp_path / 'none.jsonl'}: no such file\n")
    path.write_bytes(b'{}\n"galley.session.id"\n')
    bad = galley_trace("beef", "--file", str(path))
    assert bad.exit_code == 1
    assert bad.stderr == f"error: {path}:2: must be a JSON object\n"
    nothing = galley_trace("beef")
    assert nothing.exit_code == 1
    assert "start a stack with `galley up --trace`" in nothing.stderr


def test_the_latest_request_and_the_one_with_the_slowest_round(own_traces: Path) -> None:
    scene = Scene()
    scene.request(attributes={names.SLOWEST_ROUND_NS: 900}).round().end()
    later = scene.request(session="b" * 32, at_ns=BEGAN_NS + 1, attributes={names.SLOWEST_ROUND_NS: 800})
    later.round().end()
    write(scene, own_traces / "traces-1.jsonl")
    assert galley_trace("--last").stdout.startswith(f"session {'b' * 32}")
    assert galley_trace("--slowest").stdout.startswith(f"session {SESSION}")
    (own_traces / "traces-1.jsonl").write_text("")
    empty = galley_trace("--last")
    assert empty.exit_code == 1
    assert f"traces-1.jsonl: holds no request yet; {WHEN}" in empty.stderr


def test_a_refused_call_is_shown_with_status_field_and_message(own_traces: Path) -> None:
    scene = Scene()
    refused = scene.request(session="", attributes={names.ROUNDS: 0, names.FIELD: "max_tokens"})
    refused.end(error="invalid_argument", problem="max_tokens: must be >= 1")
    write(scene, own_traces / "traces-1.jsonl")
    shown = " ".join(galley_trace("--last").stdout.split())
    assert "Refused The call was refused with invalid_argument (max_tokens: must be >= 1)" in shown
    assert "invalid_argument max_tokens" in galley_trace("--list").stdout


def test_an_id_or_the_list_one_of_them() -> None:
    assert galley_trace().exit_code == 2
    assert galley_trace("5e", "--list").exit_code == 2
    assert galley_trace("--last", "--slowest").exit_code == 2
    assert galley_trace("--list", "--html", "page.html").exit_code == 2


def test_a_page_is_written(tmp_path: Path) -> None:
    path = write(scenes.eventful(), tmp_path / "t.jsonl")
    (tmp_path / "page.html").write_text("an earlier page, open to all")
    (tmp_path / "page.html").chmod(0o644)
    result = galley_trace(SESSION, "--file", str(path), "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600
    assert result.stdout == f"wrote {tmp_path / 'page.html'}\n"
    assert SESSION in (tmp_path / "page.html").read_text(encoding="utf-8")
    elsewhere = galley_trace(SESSION, "--file", str(path), "--html", str(tmp_path / "no" / "page.html"))
    assert elsewhere.exit_code == 1
    assert "No such file or directory" in elsewhere.stderr


def test_a_trace_of_several_sessions_is_shown_whole_and_has_no_page(tmp_path: Path) -> None:
    scene = Scene()
    first = scene.request().round().end()
    scene.request(session="b" * 32, trace_id=first.trace_id).round().end()
    path = str(write(scene, tmp_path / "t.jsonl"))
    output = galley_trace(first.trace_id, "--file", path)
    assert output.stdout.count("Slowest") == 2
    refused = galley_trace(first.trace_id, "--file", path, "--html", str(tmp_path / "page.html"))
    assert refused.exit_code == 1
    assert refused.stderr == "error: this trace has 2 sessions; name one of them\n"


def test_another_systems_trace_is_shown_plainly(tmp_path: Path) -> None:
    scene = Scene()
    trace_id = scene.trace_id()
    scene.add(Span(trace_id, scene.span_id(), "", "GET /", BEGAN_NS, BEGAN_NS + 5, Process("web")))
    result = galley_trace(trace_id, "--file", str(write(scene, tmp_path / "t.jsonl")))
    assert result.exit_code == 0
    assert "this trace has no request of Galley; its 1 span:" in result.stdout
    assert "GET / (web)" in result.stdout


def test_20_000_rounds_take_less_than_four_kilobytes_each(tmp_path: Path) -> None:
    scene = Scene()
    request = scene.request()
    for _ in range(1000):
        request.round()
    request.end()
    path = write(Scene(spans=scene.spans[-1:]), tmp_path / "big.jsonl")
    rounds = write(Scene(spans=scene.spans[:-1]), tmp_path / "rounds.jsonl").read_bytes()
    with path.open("ab") as file:
        for copy in range(20):
            file.write(rounds.replace(b'"spanId":"0000', b'"spanId":"%04x' % copy))
    command = [sys.executable, "-m", "galley.cli", "trace", SESSION, "--file", str(path)]
    # In a small process: RUSAGE_CHILDREN includes the memory of the forking process.
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command],
        env={**os.environ, **PLAIN},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "20,000 rounds" in done.stdout
    assert int(done.stderr.splitlines()[-1]) < 20_000 * 4 + _STARTED_KIB


_STARTED_KIB = 64 * 1024
_MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, file=sys.stderr)
sys.exit(status)
"""
