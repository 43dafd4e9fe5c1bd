"""`galley up` as a user runs it: the real processes, on the real default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from galley.core import names
from galley.trace.read.otlp_file import Lines, spans_in
from tests.integration.galley.cli.ends import Ends

GALLEY = [sys.executable, "-m", "galley.cli"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "GALLEY_TRACE_DIR": str(tmp_path)}
    return {**os.environ, **own, "GALLEY_ENDPOINT": ""}


@pytest.fixture
def stack(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*GALLEY, "up", "--gateways", "2", "--trace", "--grpc-port=0", "--http-port=0"],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as up:
        try:
            yield up
        finally:
            up.kill()


def _until_up(up: subprocess.Popen[str]) -> tuple[list[str], Path, list[str]]:
    assert up.stdout is not None
    lines = []
    for line in up.stdout:
        lines.append(line)
        if "Ctrl-C stops it" in line:
            gateways = [text.split()[-1] for text in lines if text.startswith("gateway at ")]
            (file,) = [text.split()[3].rstrip(";") for text in lines if text.startswith("traces go to ")]
            urls = [text.split()[-1] for text in lines if text.startswith("HTTP API at ")]
            return gateways, Path(file), urls
    raise AssertionError("".join(lines))


def _until_traced(path: Path, services: set[str], session_id: str, requests: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        spans = [span for line in Lines(path) for span in spans_in(line.document())]
        traced = [span for span in spans if span.is_request and span.text(names.SESSION_ID) == session_id]
        if services <= {span.process.service for span in spans} and len(traced) == requests:
            return
        time.sleep(0.05)
    raise AssertionError(path.read_text())


def _galley(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GALLEY, *args], env=env, capture_output=True, text=True, check=False, timeout=60)


def _texts(lines: str) -> str:
    return "".join(json.loads(line).get("chunk", {}).get("text", "") for line in lines.splitlines())


@pytest.mark.model
def test_stack_serves_resumes_and_leaves_no_process(
    stack: subprocess.Popen[str], env: dict[str, str]
) -> None:
    (first, second), traces, urls = _until_up(stack)
    answer = _galley(env, "generate", "Count to ten.", "--json", "--max-tokens=16", "--temperature=0")
    assert answer.returncode == 0, answer.stderr
    session_id = json.loads(answer.stdout.splitlines()[0])["started"]["session_id"]
    again = _galley(env, "resume", session_id, "--json", "--endpoint", second)
    assert again.returncode == 0, again.stderr
    assert _texts(again.stdout) == _texts(answer.stdout) != ""
    assert first != second
    events = httpx2.get(f"{urls[1]}/sessions/{session_id}/events", timeout=60).text
    assert events.endswith("data: [DONE]\n\n")

    _until_traced(traces, {"galley-gateway", "galley-target", "galley-draft"}, session_id, requests=3)
    listed = _galley(env, "trace", "--list")
    assert listed.returncode == 0, listed.stderr
    assert session_id[:8] in listed.stdout
    output = _galley(env, "trace", session_id, "--all")
    assert output.returncode == 0, output.stderr
    assert session_id in output.stdout
    assert "resumed" in output.stdout
    assert len(re.findall(r"^>? +\d+ +[\d,.]+ +\d", output.stdout, re.MULTILINE)) >= 4, output.stdout

    children = psutil.Process(stack.pid).children(recursive=True)
    assert len(children) == 6
    with Ends([child.pid for child in children]) as ends:
        stack.send_signal(signal.SIGKILL)
        assert ends.all_within(10)
    stack.wait()
    after = _galley(env, "generate", "x")
    assert after.returncode == 1
    assert "no stack runs here" in after.stderr


def test_a_part_that_cannot_start_is_named_with_its_last_words(env: dict[str, str], tmp_path: Path) -> None:
    ended = _galley(env, "up", "--model", str(tmp_path), "--grpc-port=0", "--http-port=0")
    assert ended.returncode == 1
    assert f"{tmp_path}: must hold config.json" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: model ended with exit code 1 before it was ready"
