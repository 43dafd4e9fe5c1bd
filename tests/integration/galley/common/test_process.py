"""What a process says of itself, and how it ends with its parent."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading

import pytest
from structlog.testing import capture_logs

from galley.common.config.settings import parse_settings
from galley.common.server.process import Readiness, hand_back_free_memory, in_passing_thread
from galley.common.wire.codec import logprobs_from, logprobs_message, sampling_from, sampling_message
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.echo_service import settings

LOGGING = """
import logging, structlog, sys
from opentelemetry import trace
from galley.common.logs import get_logger, start_logging
from galley.common.tracing.telemetry import context_from
start_logging("galley-test", "info", sys.argv[1])
structlog.contextvars.bind_contextvars(session_id="s1")
parent = context_from("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
with trace.use_span(trace.get_current_span(parent)):
    get_logger("a").info("round", k=4, prompt="my secret", tokens=[1, 2, 3])
logging.getLogger("grpc").warning("from %s", "grpc")
get_logger("a").debug("unseen")
try:
    local_secret = "my secret"
    raise ValueError("broken")
except ValueError:
    get_logger("a").exception("failed")
"""


FREED_BENEATH_WHAT_LIVES = """
from galley.common.server.process import hand_back_free_memory, in_passing_thread
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
many = [bytes(4000) for _ in range(25_000)]
last = many[-1]
del many
before = resident()
hand_back_free_memory()
print(before - resident())
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=20, check=True
    )


def test_logs_are_json_lines_with_ids_and_without_content() -> None:
    result = run(LOGGING, "json")
    assert result.stdout == ""
    first, second, third = (json.loads(line) for line in result.stderr.splitlines())
    assert first["service"] == "galley-test"
    assert first["session_id"] == "s1"
    assert first["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert first["span_id"] == "b7ad6b7169203331"
    assert (first["event"], first["k"], first["tokens"]) == ("round", 4, "<withheld: 3>")
    assert (second["event"], second["logger"], second["level"]) == ("from grpc", "grpc", "warning")
    assert second["service"] == "galley-test"
    assert "ValueError: broken" in third["exception"]
    assert "my secret" not in first.values()


def test_logs_for_people_show_no_local_variables() -> None:
    result = run(LOGGING, "console")
    assert "round" in result.stderr
    assert "ValueError: broken" in result.stderr
    assert "my secret" not in result.stderr
    assert "unseen" not in result.stderr


ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c",
     "import time; from galley.common.server.process import die_with_parent; die_with_parent();"
     "print('ready', flush=True); time.sleep(60)"],
    stdout=subprocess.PIPE, pass_fds=[int(sys.argv[1])])
child.stdout.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux alone")
def test_it_ends_when_its_parent_is_killed() -> None:
    read, write = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(write)], pass_fds=[write])
    os.close(write)
    assert parent.wait(20) == -9
    # The child alone holds the other end: it closes when the child is gone.
    with os.fdopen(read) as lines:
        assert lines.read() == ""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library hands it back by itself")
def test_memory_that_is_free_is_handed_back() -> None:
    assert int(run(FREED_BENEATH_WHAT_LIVES).stdout) > 50_000_000


def test_without_a_call_for_it_nothing_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    hand_back_free_memory()


def test_readiness_is_reported_in_json_lines_and_logged() -> None:
    read, write = os.pipe()
    readiness = Readiness(write)
    with capture_logs() as logged:
        readiness.stage("loading model", detail="tiny")
    assert logged == [{"event": "start", "log_level": "info", "stage": "loading model", "detail": "tiny"}]
    readiness.ready("127.0.0.1:1", sessions=3)
    readiness.stage("too late")
    with os.fdopen(read) as lines:
        assert [json.loads(line) for line in lines] == [
            {"stage": "loading model", "detail": "tiny"},
            {"stage": "ready", "address": "127.0.0.1:1", "sessions": 3},
        ]


def test_a_reader_that_has_gone_does_not_stop_a_server() -> None:
    read, write = os.pipe()
    os.close(read)
    readiness = Readiness(write)
    readiness.ready("127.0.0.1:1")
    Readiness(None).ready("127.0.0.1:1")


def test_flags_come_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_PORT", "1")
    monkeypatch.setenv("GALLEY_LOG_LEVEL", "error")
    kind = type(settings())
    parsed = parse_settings(kind, ["--port", "2", "--die-with-parent"], "x", "y")
    assert type(parsed) is kind
    assert (parsed.port, parsed.log_level, parsed.die_with_parent) == (2, "error", True)


def test_sampling_goes_over_the_wire_and_back() -> None:
    assert sampling_from(pb.SamplingParams()) == SamplingParams()
    given = SamplingParams(
        temperature=0.0, top_p=0.5, top_k=3, min_p=0.25, frequency_penalty=-1.5, presence_penalty=2.0,
        repetition_penalty=1.5, logit_bias={3: -100.0}, seed=2**64 - 1,
    )  # fmt: skip
    sent = pb.SamplingParams.FromString(sampling_message(given).SerializeToString())
    assert sampling_from(sent) == given


def test_logprobs_go_over_the_wire_and_back() -> None:
    given = PositionLogprobs(-0.5, ((7, -0.5), (3, -1.25)))
    assert logprobs_from(logprobs_message(given)) == given


async def test_passing_thread_ends_with_its_call() -> None:
    thread = await in_passing_thread(threading.current_thread)
    thread.join(timeout=10)
    assert not thread.is_alive()
    with pytest.raises(ValueError, match="no"):
        await in_passing_thread(int, "no")
