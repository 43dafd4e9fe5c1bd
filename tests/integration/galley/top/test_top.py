"""`galley top` as a user runs it, against services that tell the committed sample over real HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.core.routing.choice import DraftLease
from galley.core.versions.split import Split
from galley.stack import endpoint
from galley.stack.endpoint import Service
from tests.fakes.metric_servers import serve_texts, unused_address
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.terminal import Terminal
from tests.fakes.waiting import PATIENCE_S
from tests.unit.galley.top import sample

GALLEY = [sys.executable, "-m", "galley.cli", "top"]
SOON = ("--interval", "0.2")
OTHER_SCREEN, FIRST_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("GALLEY_TOP_REDIS_URL", raising=False)
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def the_sample() -> Iterator[list[Service]]:
    with ExitStack() as held:
        yield [
            Service(
                one.name,
                held.enter_context(serve_texts(sample.text(one, 0), sample.text(one, 1))),
                one.address,
            )
            for one in sample.services()
        ]


def addresses(services: list[Service]) -> str:
    return ",".join(one.metrics for one in services)


def galley(*args: str) -> Result:
    return CliRunner().invoke(app, ["top", *args], env={"TERM": "dumb", "COLUMNS": "80"})


def test_once_as_a_process_prints_one_frame_without_control_codes() -> None:
    with the_sample() as services:
        reported = ["--metrics", addresses([*services, Service("x", unused_address())])]
        done = subprocess.run(
            [*GALLEY, "--once", *SOON, *reported], capture_output=True, timeout=60, check=False, text=True
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "4 of 5 up" in done.stdout
    assert "refused" in done.stdout
    for workload in ("chat", "code", "support", "rewrite"):
        assert re.search(rf"^{workload} +\d", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_arguments_the_stack_that_runs_here_is_found() -> None:
    with the_sample() as services, endpoint.Endpoint() as stack:
        stack.announce("127.0.0.1:1", services)
        displayed = galley("--once", *SOON)
    assert displayed.exit_code == 0, displayed.output
    assert "4 of 4 up" in displayed.stdout
    assert "target-2" in displayed.stdout
    gone = galley("--once", *SOON)
    assert gone.exit_code == 1
    assert "error: no stack runs here" in gone.stderr


def test_store_of_the_local_stack_is_read() -> None:
    with endpoint.Endpoint() as stack:
        with the_sample() as services, running(VALKEY) as server:
            stack.announce("127.0.0.1:1", services, server.url)
            result = endpoint.find_stack()
            assert (result.services, result.store) == (tuple(services), server.url)
            output = galley("--once", *SOON)
            assert "registry" not in output.stdout
        away = galley("--once", *SOON)
    assert away.exit_code == 1
    assert "registry away" in away.stdout


def test_stack_without_metrics_is_reported() -> None:
    with endpoint.Endpoint() as stack:
        stack.announce("127.0.0.1:1")
        assert "name services with --metrics" in galley("--once").stderr


def test_unreachable_service_is_a_frame_and_an_error() -> None:
    output = galley("--once", *SOON, "--metrics", unused_address())
    assert output.exit_code == 1
    assert "0 of 1 up" in output.stdout
    assert "error: no service answers" in output.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("--metrics", "somewhere"),
        ("--metrics", ","),
        ("--metrics", ",".join(f"host:{port}" for port in range(1, 70))),
        ("--metrics", "host:1", "--interval", "0.1"),
        ("--metrics", "host:1", "--interval", "61"),
        ("--redis-url", "http://host"),
        ("--redis-url", "redis://user:password@host"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(wrong: tuple[str, ...]) -> None:
    assert galley("--once", *wrong).exit_code == 2


async def test_registered_replicas_and_a_lost_store_are_shown() -> None:
    from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry  # noqa: PLC0415
    from galley.common.registry.trials import DraftVersions  # noqa: PLC0415
    from galley.top.registry import read_leases  # noqa: PLC0415

    with running(VALKEY) as server:
        registry = ReplicaRegistry(server.url, lease_s=60, call_timeout_s=1)
        versions = DraftVersions(server.url, call_timeout_s=1)
        lease = DraftLease(
            address="10.0.0.8:5\x1b[2J",
            incarnation="1",
            model="m",
            tokenizer_hash="h",
            vocab_size=9,
            version="v2\x1b[2J",
        )
        await registry.publish(DRAFT_POOL, lease)
        await versions.try_version("v2", 0.25)
        response = await read_leases(registry, versions)
        assert [one.address for one in response.drafts] == ["10.0.0.8:5\ufffd[2J"]
        assert [one.version for one in response.drafts] == ["v2\ufffd[2J"]
        assert response.split == Split(canary="v2", share=0.25)
        assert (list(response.targets), response.problem) == ([], "")
        await server.command("HSET", "galley:drafts:{default}", "share", "moon")
        without_split = await read_leases(registry, versions)
        assert (without_split.drafts, without_split.split) == (response.drafts, None)
        assert "moon" in without_split.problem
    away = await read_leases(registry, versions)
    await versions.close()
    await registry.close()
    assert away.problem
    assert not away.drafts


def test_on_a_terminal_it_is_live_until_q_and_leaves_it_as_it_was() -> None:
    with the_sample() as services, Terminal([*GALLEY, "--metrics", addresses(services), *SOON]) as terminal:
        terminal.until(OTHER_SCREEN)
        terminal.until(b"4 of 4 up")
        assert terminal.modes != terminal.before, "keys are received at once, and not shown"
        terminal.press(b"x")
        terminal.until(b"rewrite")
        terminal.press(b"q")
        terminal.until(FIRST_SCREEN)
        assert terminal.process.wait(PATIENCE_S) == 0
        assert terminal.modes == terminal.before


def test_keys_change_what_is_shown_at_once() -> None:
    with the_sample() as services:
        command = [*GALLEY, "--metrics", addresses(services), "--interval", "60"]
        with Terminal(command, columns=60) as terminal:
            terminal.until(b"4 of 4 up")
            terminal.until(b"s sort: pool")
            terminal.press(b"s")
            terminal.until(b"s sort: sess")
            terminal.press(b"?")
            terminal.until(b"show only rows with a text")
            terminal.press(b"?j\r")
            terminal.until(b"oldest request, p99")
            terminal.press(b"q")
            assert terminal.process.wait(PATIENCE_S) == 0
            assert terminal.modes == terminal.before


def test_a_signal_ends_it_as_well() -> None:
    with (
        the_sample() as services,
        Terminal([*GALLEY, "--metrics", addresses(services[:1]), *SOON]) as terminal,
    ):
        terminal.until(b"1 of 1 up")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(FIRST_SCREEN)
        assert terminal.process.wait(PATIENCE_S) == 0
        assert terminal.modes == terminal.before
