"""The real process: how it starts, stops and refuses to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.cores import usable_cores
from galley.common.host import this_host
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.processes import service_process
from tests.fakes.verify_items import slice_of

COMMAND = [sys.executable, "-m", "services.draft"]


def environment(**given: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GALLEY_", "OTEL_"))}
    return kept | given


@pytest.fixture
def started() -> Iterator[tuple[subprocess.Popen[str], list[dict[str, Any]]]]:
    """A draft process and the stages that it reported."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "--ready-fd", str(write)],
        pass_fds=[write],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            yield process, [json.loads(line) for line in lines]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_reports_ready_and_stops_on_a_signal(
    started: tuple[subprocess.Popen[str], list[dict[str, Any]]], number: signal.Signals
) -> None:
    process, stages = started
    assert stages[0] == {"stage": "starting"}
    assert stages[-1]["stage"] == "ready"
    async with grpc.aio.insecure_channel(stages[-1]["address"]) as channel:
        stub = rpc.DraftStub(channel)
        stream = stub.ProposeStream()
        item = pb.ProposeItem(slice=slice_of([1, 2, 3, 1, 2]), k=1)
        await stream.write(pb.ProposeStreamRequest(items=[item]))
        answered: Any = await stream.read()
        assert list(answered.answers[0].result.draft_tokens) == [3]
        process.send_signal(number)
        # An open stream does not hold up the stop: it is ended.
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    _, logs = process.communicate(timeout=10)
    assert process.returncode == 0
    events = [json.loads(line) for line in logs.splitlines()]
    assert [event["event"] for event in events if event["level"] == "info"] == [
        "server started",
        "server stopping",
        "server stopped",
    ]
    assert all(event["service"] == "galley-draft" for event in events)


async def test_it_describes_the_cores_that_it_computes_on(tmp_path: Path) -> None:
    async with (
        service_process("services.draft", tmp_path / "log", {}, {"threads": "auto"}) as ready,
        grpc.aio.insecure_channel(ready["address"]) as channel,
    ):
        info = await rpc.DraftStub(channel).GetDraftInfo(pb.GetDraftInfoRequest())
    assert info.host == this_host(usable_cores())


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["--max-batch", "0"], {}, "--max-batch (or GALLEY_DRAFT_MAX_BATCH): must be at least 1, got 0"),
        ([], {"GALLEY_DRAFT_PORT": "99999"}, "GALLEY_DRAFT_PORT): must be at most 65535, got 99999"),
        (["--default-strategy", "model"], {}, "--default-strategy: must not be model without --model"),
        (
            ["--version", "a b"],
            {},
            "--version (or GALLEY_DRAFT_VERSION): must be 1 to 64 letters",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name(
    arguments: list[str], variables: dict[str, str], expected: str
) -> None:
    result = subprocess.run(
        [*COMMAND, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=20,
    )
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('services.draft', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=20,
    )
    assert result.returncode == 0, result.stderr
    for words in ("--max-draft-tokens", "--drain-timeout-s", "Default: ngram.", "Address to listen on."):
        assert words in result.stdout
