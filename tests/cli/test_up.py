"""`galley up` as a user runs it: the real processes, on the real default model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.cli.ends import Ends

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GALLEY = [sys.executable, "-m", "services.cli"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "GALLEY_ENDPOINT": ""}


@pytest.fixture
def stack(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*GALLEY, "up", "--gateways", "2"], stdout=subprocess.PIPE, text=True, env=env
    ) as up:
        try:
            yield up
        finally:
            up.kill()


def _until_up(up: subprocess.Popen[str]) -> list[str]:
    """The addresses of the gateways; everything that was printed is shown if they do not come."""
    assert up.stdout is not None
    lines = []
    for line in up.stdout:
        lines.append(line)
        if "Ctrl-C stops it" in line:
            return [said.split()[-1] for said in lines if said.startswith("gateway at ")]
    raise AssertionError("".join(lines))


def _galley(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GALLEY, *args], env=env, capture_output=True, text=True, check=False, timeout=60)


def _texts(lines: str) -> str:
    return "".join(json.loads(line).get("chunk", {}).get("text", "") for line in lines.splitlines())


@pytest.mark.model
def test_a_stack_answers_resumes_at_its_other_gateway_and_leaves_no_process(
    stack: subprocess.Popen[str], env: dict[str, str]
) -> None:
    first, second = _until_up(stack)
    answer = _galley(env, "generate", "Count to ten.", "--json", "--max-tokens=16", "--temperature=0")
    assert answer.returncode == 0, answer.stderr
    session_id = json.loads(answer.stdout.splitlines()[0])["started"]["session_id"]
    again = _galley(env, "resume", session_id, "--json", "--endpoint", second)
    assert again.returncode == 0, again.stderr
    assert _texts(again.stdout) == _texts(answer.stdout) != ""
    assert first != second

    children = psutil.Process(stack.pid).children(recursive=True)
    # Valkey, target, draft and two gateways; the model was only looked up.
    assert len(children) == 5
    with Ends([child.pid for child in children]) as ends:
        stack.send_signal(signal.SIGKILL)
        assert ends.all_within(10)
    stack.wait()
    after = _galley(env, "generate", "x")
    assert after.returncode == 1
    assert "no stack runs here" in after.stderr


def test_a_part_that_cannot_start_is_named_with_its_last_words(env: dict[str, str]) -> None:
    ended = _galley(env, "up", "--model", "/no/such/model.gguf")
    assert ended.returncode == 1
    assert "/no/such/model.gguf: no such file" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: model ended with exit code 1 before it was ready"
