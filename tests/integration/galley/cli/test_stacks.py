"""`galley up --detach`, `ps`, `logs` and `stop`, on processes that announce themselves as stacks do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from galley.stack.endpoint import console_log, live_stacks, state_dir
from galley.stack.processes import Process, start_time
from tests.fakes.tiny_model import save_tiny_model
from tests.fakes.waiting import PATIENCE_S
from tests.integration.galley.cli.ends import Ends

GALLEY = [sys.executable, "-m", "galley.cli"]
# Announces itself unless told otherwise, and ends by SIGTERM unless it is stubborn.
STACK = """
import signal, sys
from galley.stack.endpoint import Endpoint
name, logs, *flags = sys.argv[1:]
ended = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in flags else lambda *_: ended.append(1))
with Endpoint(name) as stack:
    if "starts" in flags:
        stack.announce(logs=logs)
    elif "waits" not in flags:
        gateways = [flag.partition("=")[2] for flag in flags if flag.startswith("gateways=")]
        stack.announce(*gateways or ["127.0.0.1:1"], http="127.0.0.1:2", model="tiny", logs=logs)
    print("up", flush=True)
    while not ended:
        signal.sigtimedwait([], 0.05)
"""
StartStack = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    (directory / "target.log").write_text("one\ntwo\nthree\n")
    (directory / "gateway.log").write_text("ready \x1b[2J\n")
    return directory


@pytest.fixture
def start(logs: Path) -> Iterator[StartStack]:
    with ExitStack() as opened:

        def run(name: str, *flags: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", STACK, name, str(logs), *flags]
            process = opened.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            opened.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            return process

        yield run


def galley(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GALLEY, *args], capture_output=True, text=True, check=False, timeout=180)


def test_ps_lists_the_stacks_that_serve_and_those_that_start(start: StartStack) -> None:
    blue, green = start("blue"), start("green", "waits")
    rows = [line.split() for line in galley("ps").stdout.splitlines()]
    assert rows == [
        ["NAME", "STATE", "GRPC", "HTTP", "MODEL", "PID"],
        ["blue", "serves", "127.0.0.1:1", "127.0.0.1:2", "tiny", str(blue.pid)],
        ["green", "starts", str(green.pid)],
    ]
    facts = [json.loads(line) for line in galley("ps", "--json").stdout.splitlines()]
    assert [(stack["name"], stack["pid"], stack["http"]) for stack in facts] == [
        ("blue", blue.pid, "127.0.0.1:2"),
        ("green", green.pid, ""),
    ]


def test_ps_shows_whole_addresses_in_a_pipe_and_on_a_narrow_terminal(
    start: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateways = ",".join(f"127.0.0.1:{port}" for port in range(50051, 50061))
    stack = start("blue", f"gateways={gateways}")
    monkeypatch.setenv("COLUMNS", "60")
    piped = [line.split() for line in galley("ps").stdout.splitlines()]
    assert piped[1:] == [["blue", "serves", gateways, "127.0.0.1:2", "tiny", str(stack.pid)]]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    heading, *rows = re.sub(r"\x1b\[[0-9;]*m", "", galley("ps").stdout).splitlines()
    assert max(map(len, rows)) <= 60
    column = slice(heading.index("GRPC"), heading.index("HTTP"))
    assert "".join(row[column].strip() for row in rows) == gateways


def test_stop_ends_the_only_stack_and_waits_for_it(start: StartStack) -> None:
    stack = start("blue")
    stopped = galley("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "stack 'blue' stopped\n")
    assert stack.wait(0) == 0
    again = galley("stop")
    assert again.returncode == 1
    assert "no stack runs here" in again.stderr
    assert "no stack runs here" in galley("ps").stderr


def test_stop_among_several_needs_a_name_or_all(start: StartStack) -> None:
    blue, green = start("blue"), start("green")
    unclear = galley("stop")
    assert (unclear.returncode, unclear.stderr) == (
        1,
        "error: several stacks run here; name one of blue, green\n",
    )
    assert galley("stop", "green").returncode == 0
    assert green.wait(0) == 0
    red = start("red")
    assert galley("stop", "--all").returncode == 0
    assert (blue.wait(0), red.wait(0)) == (0, 0)


def test_a_stack_that_does_not_end_is_reported_with_its_pid(start: StartStack) -> None:
    stack = start("blue", "stubborn")
    refused = galley("stop", "--timeout", "0.1")
    assert refused.returncode == 1
    assert refused.stderr == f"error: stack 'blue' still runs after 0.1 s; to end it: kill -9 {stack.pid}\n"


def test_stop_all_goes_on_after_a_stack_that_does_not_end(start: StartStack) -> None:
    blue, green = start("blue", "stubborn"), start("green")
    stopped = galley("stop", "--all", "--timeout", "2")
    assert stopped.returncode == 1
    assert stopped.stderr == (
        f"error: stack 'blue' still runs after 2 s; to end it: kill -9 {blue.pid}\nstack 'green' stopped\n"
    )
    assert green.wait(PATIENCE_S) == 0


def test_a_state_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    for command in (["ps"], ["stop"], ["logs"], ["generate", "x"]):
        refused = galley(*command)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: [Errno 20] Not a directory"), refused.stderr


def test_a_process_that_got_the_pid_of_a_stack_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = start_time(other.pid)
        assert started is not None
        facts = {"pid": other.pid, "started": started - 1, "address": "127.0.0.1:1"}
        (state_dir() / "blue.stack").write_text(json.dumps(facts))
        refused = galley("stop", "blue")
        assert (refused.returncode, other.poll()) == (1, None)
        assert "no stack 'blue' runs here" in refused.stderr
        stale = Process(other.pid, started - 1)
        stale.terminate()
        assert stale.ends_within(0)
        assert other.poll() is None


def test_logs_of_all_parts_and_of_one(start: StartStack) -> None:
    start("blue")
    assert galley("logs", "--lines", "2").stdout == (
        "gateway | ready \N{REPLACEMENT CHARACTER}[2J\ntarget  | two\ntarget  | three\n"
    )
    assert galley("logs", "blue", "--part", "gateway").stdout.startswith("gateway | ready")
    unknown = galley("logs", "--part", "draft")
    assert unknown.returncode == 2
    assert "--part: must be one of gateway, target, got draft" in unknown.stderr


def test_the_output_of_an_earlier_stack_is_not_that_of_the_running_one(start: StartStack) -> None:
    console_log("blue").write_text("gateway at 127.0.0.1:9\n")
    assert "up | gateway at 127.0.0.1:9" in galley("logs", "blue").stdout
    start("blue")
    assert "127.0.0.1:9" not in galley("logs").stdout


def test_the_last_line_of_a_part_that_crashed_is_printed(start: StartStack, logs: Path) -> None:
    start("blue")
    (logs / "target.log").write_text("started\nout of memory")
    assert galley("logs", "--part", "target").stdout == "target | started\ntarget | out of memory\n"


def test_an_ended_stack_has_no_logs_of_parts() -> None:
    console_log("blue").write_text("gateway at 127.0.0.1:9")
    assert galley("logs", "blue").stdout == "up | gateway at 127.0.0.1:9\n"
    refused = galley("logs", "blue", "--part", "target")
    assert refused.returncode == 2
    assert "--part: must be left out: 'blue' has ended" in refused.stderr


def test_followed_logs_end_with_the_stack(start: StartStack, logs: Path) -> None:
    stack = start("blue")
    command = [*GALLEY, "logs", "--follow", "--part", "target", "--lines", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "target | three\n"
        with (logs / "target.log").open("a") as log:
            log.write("fo")
            log.flush()
            log.write("ur\n")
        assert following.stdout.readline() == "target | four\n"
        with (logs / "target.log").open("a") as log:
            log.write("five")
        stack.terminate()
        assert following.communicate(timeout=PATIENCE_S)[0] == "target | five\n"
        assert following.returncode == 0


def test_followed_logs_of_a_stack_that_starts_find_its_parts(start: StartStack, logs: Path) -> None:
    stack = start("blue", "starts")
    command = [*GALLEY, "logs", "--follow", "--part", "target", "--part", "draft", "--lines", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "target | three\n"
        (logs / "draft.log").write_text("first\nsecond\n")
        assert [following.stdout.readline() for _ in range(2)] == ["draft  | first\n", "draft  | second\n"]
        stack.terminate()
        assert following.wait(PATIENCE_S) == 0


def test_a_stack_without_logs_says_so(start: StartStack) -> None:
    start("blue", "waits")
    none = galley("logs", "--part", "target")
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "stack 'blue' has no logs yet\n")


def test_a_stack_that_starts_is_named_to_those_who_would_use_it(start: StartStack) -> None:
    start("green", "starts")
    problem = "error: stack 'green' still starts; `galley logs --follow` shows how far it is\n"
    for flags in ((), ("--stack", "green")):
        refused = galley("generate", "w5", *flags)
        assert (refused.returncode, refused.stderr) == (1, problem)
    assert "no stack 'blue' runs here" in galley("generate", "w5", "--stack", "blue").stderr


def test_a_stack_has_logs_before_it_serves(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    flags = ("--draft-model=none", "--grpc-port=0", "--http-port=0", "--log-dir=kept")
    command = [*GALLEY, "up", "--model", str(tmp_path / "empty"), *flags]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline()  # its first part starts
        (stack,) = live_stacks()
        assert (stack.address, stack.logs) == ("", f"{tmp_path}/kept")
        starting.communicate(timeout=PATIENCE_S)
    assert starting.returncode == 1


def _first_calls_work(printed: str) -> None:
    """Run what the start printed, as a user who copies it."""
    (curl,) = re.findall(r"^curl .*\n.*$", printed, re.MULTILINE)
    (python,) = re.findall(r"^from galley import .*\n.*\n.*$", printed, re.MULTILINE)
    for command in (["bash", "-c", curl], [sys.executable, "-c", python]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert '"object":"chat.completion"' in subprocess.check_output(["bash", "-c", curl], text=True)


def test_a_detached_stack_serves_until_it_is_stopped(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    template = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    flags = ("--draft-model=none", "--grpc-port=0", "--http-port=0", "--name=blue", "--detach")
    started = galley("serve", str(model), *flags)
    assert started.returncode == 0, started.stderr
    assert "galley stop blue stops it" in started.stdout
    (listed,) = (json.loads(line) for line in galley("ps", "--json").stdout.splitlines())
    supervisor = psutil.Process(listed["pid"])
    children = supervisor.children()
    try:
        assert os.getsid(listed["pid"]) == listed["pid"] != os.getsid(0)
        assert f"gateway at {listed['address']}" in started.stdout
        _first_calls_work(started.stdout)
        answer = galley("generate", "w5 w6", "--raw", "--max-tokens", "4", "--stack", "blue")
        assert answer.returncode == 0, answer.stderr
        printed = galley("logs", "blue", "--lines", "1000").stdout
        assert {line.partition("|")[0].strip() for line in printed.splitlines()} > {"up", "gateway", "target"}
        with Ends([child.pid for child in children]) as ends:
            assert galley("stop", "blue").returncode == 0
            assert ends.all_within(0)
    finally:
        if supervisor.is_running():
            supervisor.kill()


def test_a_stack_stops_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    flags = ("--threads=1", "--draft-model=none", "--grpc-port=0", "--http-port=0")
    command = [*GALLEY, "serve", str(model), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stack:
        assert stack.stdout is not None
        assert stack.stderr is not None
        assert "starting" in stack.stdout.readline()
        stack.stdout.close()
        assert stack.wait(PATIENCE_S) == 1
        assert stack.stderr.read() == ""
    assert "no stack runs here" in galley("ps").stderr
    assert [*tmp_path.glob("galley-*")] == [], "the directory of a stack that stopped in order is removed"


def test_a_detached_stack_serves_also_if_nobody_reads_how_it_starts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    command = [*GALLEY, "serve", str(model), "--draft-model=none", "--grpc-port=0", "--http-port=0"]
    with subprocess.Popen([*command, "--detach"], stdout=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None
        assert "starting" in starting.stdout.readline()
        starting.stdout.close()
        started = starting.wait()
    listed = galley("ps").stdout
    assert galley("stop").returncode == 0
    assert started == 0
    assert "serves" in listed


def test_a_detached_stack_that_is_stopped_during_its_start_does_not_serve() -> None:
    flags = ("--threads=1", "--draft-model=none", "--grpc-port=0", "--http-port=0", "--name=blue")
    command = [*GALLEY, "up", *flags, "--detach", "--redis-url=redis://127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None
        assert "trying again" in starting.stdout.readline()
        assert galley("stop", "blue").returncode == 0
        _, problem = starting.communicate(timeout=PATIENCE_S)
    assert (starting.returncode, problem) == (1, "error: stopped before it served\n")


def test_a_detached_stack_that_cannot_start_reports_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    flags = ("--draft-model=none", "--grpc-port=0", "--http-port=0", "--name=blue", "--detach")
    failed = galley("up", "--model", str(tmp_path / "empty"), *flags)
    assert failed.returncode == 1
    assert "error: model ended with exit code 1 before it was ready" in failed.stdout
    assert "no stack runs here" in galley("ps").stderr
    last = galley("logs", "blue")
    assert last.stderr == "stack 'blue' has ended; its last output:\n"
    assert "up | error: model ended with exit code 1 before it was ready" in last.stdout
