"""The supervisor: starts in order, shows it, blames the right part, leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from galley.common.config.defaults import DEFAULT_MODEL, shipped_draft
from galley.stack import guard
from galley.stack.options import environment_of
from galley.stack.part import PartFailed, PartStatus, State
from galley.stack.parts import stack_parts
from galley.stack.stack import Stack, StackOptions
from galley.top.service import Service
from tests.integration.galley.cli.ends import Ends
from tests.integration.galley.cli.stand_in_stack import once, stack_of, stand_in

ROOT = Path(__file__).parents[4]


async def test_parts_start_when_those_they_need_are_ready() -> None:
    seen: list[PartStatus] = []
    specs = [
        stand_in("gateway", after=("target", "draft")),
        stand_in("target"),
        stand_in("draft", after=("target",)),
    ]
    async with stack_of(*specs, on_status=seen.append) as stack:
        assert stack.gateways == (f"127.0.0.1:{stack.pid('gateway')}",)
        assert stack.log("gateway").read_text() == (
            f"target at 127.0.0.1:{stack.pid('target')}\ndraft at 127.0.0.1:{stack.pid('draft')}\n"
        )
    ready = [status.name for status in seen if status.state is State.READY]
    assert ready == ["target", "draft", "gateway"]
    assert [s.stage for s in seen if s.name == "target"] == [
        "starting",
        "loading",
        "ready",
        "stopping",
        "stopped",
    ]
    stopped = [status.name for status in seen if status.stage == "stopped"]
    assert stopped == ["gateway", "draft", "target"]


async def test_parts_that_tell_metrics_are_known() -> None:
    async with stack_of(stand_in("target", "--metrics=127.0.0.1:9"), stand_in("draft")) as stack:
        assert stack.services == (Service("target", "127.0.0.1:9", stack.address("target")),)


async def test_a_stop_leaves_no_process_and_no_file() -> None:
    stack = stack_of(stand_in("target"), with_valkey=True)
    async with stack:
        ends = Ends([stack.pid("target"), stack.pid("valkey")])
    with ends:
        assert ends.all_within(0)
    assert not stack.dirs.run.exists()


async def test_a_part_that_ignores_sigterm_is_killed() -> None:
    async with stack_of(stand_in("target", "--stubborn"), options=StackOptions(stop_grace_s=0.1)) as stack:
        ends = Ends([stack.pid("target")])
    with ends:
        assert ends.all_within(0)


async def test_the_store_is_durable_private_and_has_no_port() -> None:
    async with stack_of(with_valkey=True) as stack:
        socket = stack.address("valkey")
        for path in (socket, str(stack.dirs.run)):
            assert os.stat(path).st_mode & 0o077 == 0  # noqa: PTH116  # pathlib counts as blocking here
        async with redis.asyncio.from_url(f"unix://{socket}", decode_responses=True) as store:
            config = await store.config_get("port", "appendonly", "appendfsync", "save", "protected-mode")
            assert config == {
                "port": "0",
                "appendonly": "yes",
                "appendfsync": "everysec",
                "save": "",
                "protected-mode": "yes",
            }
            await store.set("galley", "kept")
        await stack.kill("valkey")
        await stack.restart("valkey")
        async with redis.asyncio.from_url(f"unix://{socket}", decode_responses=True) as store:
            assert await store.get("galley") == "kept"


async def test_a_part_that_dies_at_start_is_blamed_and_the_others_are_stopped() -> None:
    specs = [stand_in("target"), stand_in("draft", "--say=no such model", "--die=3", after=("target",))]
    stack = stack_of(*specs)
    with pytest.raises(PartFailed, match="draft ended with exit code 3 before it was ready") as caught:
        await stack.start()
    assert "no such model" in caught.value.tail
    assert caught.value.log.exists()
    assert not stack.running
    stack.forget()


async def test_a_command_that_does_not_exist_is_blamed() -> None:
    spec = stand_in("target")
    object.__setattr__(spec, "command", lambda _: ["/no/such/command"])
    stack = stack_of(spec)
    with pytest.raises(PartFailed) as caught:
        await stack.start()
    assert "No such file" in caught.value.tail
    stack.forget()


@pytest.mark.parametrize(
    ("flag", "problem"), [("--mute", "not ready after 1 s"), ("--garble", "instead of a JSON object")]
)
async def test_a_part_that_says_nothing_or_nonsense_is_given_up(flag: str, problem: str) -> None:
    stack = stack_of(stand_in("target", flag), options=StackOptions(start_timeout_s=1))
    with pytest.raises(PartFailed, match=problem):
        await stack.start()
    assert not stack.running
    stack.forget()


async def test_a_part_that_runs_once_hands_on_its_last_line() -> None:
    seen: list[PartStatus] = []
    spec = once("model", "print('converting'); print('/models/tiny')")
    async with stack_of(spec, on_status=seen.append) as stack:
        assert stack.facts("model") == {"line": "/models/tiny"}
    assert [status.stage for status in seen] == ["starting", "converting", "/models/tiny", "ready"]


async def test_a_part_that_runs_once_may_fail() -> None:
    stack = stack_of(once("model", "raise SystemExit('no such model')"))
    with pytest.raises(PartFailed, match="model ended with exit code 1") as caught:
        await stack.start()
    assert caught.value.tail == "no such model"
    stack.forget()


async def test_work_ends_when_a_part_dies() -> None:
    async with stack_of(stand_in("target"), stand_in("draft")) as stack:

        async def work() -> None:
            stack.send("draft", signal.SIGKILL)
            await asyncio.Event().wait()

        with pytest.raises(PartFailed, match="draft was killed by SIGKILL"):
            await stack.run(work())
    stack.forget()


async def test_work_that_fails_because_a_part_died_is_explained_by_that() -> None:
    async with stack_of(stand_in("target")) as stack:

        async def work() -> None:
            stack.send("target", signal.SIGKILL)
            raise ConnectionError

        with pytest.raises(PartFailed, match="target was killed by SIGKILL"):
            await stack.run(work())
    stack.forget()


async def test_work_that_is_done_gives_its_result() -> None:
    async with stack_of(stand_in("target")) as stack:
        assert await stack.run(asyncio.sleep(0, 7)) == 7


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    loading = asyncio.Event()

    def note(status: PartStatus) -> None:
        if status.stage == "loading":
            loading.set()

    stack = stack_of(stand_in("target", "--mute"), on_status=note)
    starting = asyncio.ensure_future(stack.start())
    await loading.wait()
    with Ends([stack.pid("target")]) as ends:
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ends.all_within(0)
    assert not stack.dirs.run.exists()


async def test_only_the_main_thread_may_start_parts() -> None:
    stack = stack_of(stand_in("target"))
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(stack.start())
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "main thread" in str(failures)
    stack.forget()


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.galley.cli.supervise"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_the_supervisor(supervisor: subprocess.Popen[str], sig: signal.Signals) -> None:
    assert supervisor.stdout is not None
    told = json.loads(supervisor.stdout.readline())
    with Ends([*told["pids"], supervisor.pid]) as ends:
        supervisor.send_signal(sig)
        assert ends.all_within(10)
    killed = sig is signal.SIGKILL
    assert supervisor.wait() == (-sig if killed else 0)
    run = Path(told["run"])
    assert run.exists() == killed
    if run.exists():
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()


def test_the_guard_starts_nothing_for_a_parent_that_has_gone() -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "1", "0", "/bin/echo", "started"]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=10)
    assert ended.returncode == 70
    assert ended.stdout == b""


def test_a_nicer_part_goes_behind_the_others() -> None:
    script = "import os; print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)"
    told = []
    for niceness in (0, 3):
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(niceness)]
        ended = subprocess.run(
            [*guarded, sys.executable, "-c", script], capture_output=True, check=True, timeout=30
        )
        told.append(ended.stdout.decode().split())
    (plain, before), (nicer, idle) = told
    assert int(nicer) == min(19, int(plain) + 3)
    assert (before, idle) == ("False", "True")


def test_the_real_parts_are_wired_to_one_another(tmp_path: Path) -> None:
    options = StackOptions(
        model="tiny", k=3, gateways=2, threads=1, extra_args={"gateway": ["--max-sessions", "2"]}
    )
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    assert list(parts) == ["valkey", "model", "target", "draft", "gateway", "gateway-2"]
    facts = {
        "model": {"line": "/models/tiny"},
        "target": {"address": "127.0.0.1:1"},
        "draft": {"address": "127.0.0.1:2"},
        "valkey": {"address": "/run/valkey.sock"},
    }
    command = " ".join(parts["gateway-2"].command(facts))
    for flags in (
        "services.gateway",
        "--port 0",
        "--model /models/tiny",
        "--model-name tiny",
        "--target 127.0.0.1:1 --draft 127.0.0.1:2",
        "--redis-url unix:///run/valkey.sock",
        "--k 3",
        "--max-sessions 2",
    ):
        assert flags in command
    for name in ("target", "draft"):
        assert "--threads 1" in " ".join(parts[name].command(facts))


@pytest.mark.parametrize(
    ("options", "model", "strategy"),
    [
        (StackOptions(), str(shipped_draft("")), "hybrid"),
        (StackOptions(model=DEFAULT_MODEL, strategies=("model",)), str(shipped_draft("")), "model"),
        (StackOptions(draft_model="none"), None, "ngram"),
        (StackOptions(model="tiny"), None, "ngram"),
        (StackOptions(model="tiny", draft_model="my-draft"), "my-draft", "hybrid"),
    ],
)
def test_the_default_target_has_its_trained_draft_and_others_what_is_named(
    options: StackOptions, model: str | None, strategy: str
) -> None:
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    facts = {"model": {"line": "/models/target"}, "draft-model": {"line": "/models/draft"}}
    draft = " ".join(parts["draft"].command(facts))
    assert f"--default-strategy {strategy}" in draft
    if model is None:
        assert "draft-model" not in parts
        assert "--tokenizer /models/target" in draft
        assert "--model" not in draft
    else:
        assert parts["draft-model"].command({})[-1] == model
        assert "--model /models/draft --target-model /models/target" in draft
        assert set(parts["draft"].after) == {"model", "draft-model"}


def test_several_targets_register_and_are_not_told_to_the_gateway() -> None:
    options = StackOptions(model="tiny", replicas=3)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    targets = [name for name in parts if name.startswith("target")]
    assert targets == ["target", "target-2", "target-3"]
    facts = {
        "model": {"line": "/models/tiny"},
        "draft": {"address": "127.0.0.1:2"},
        "valkey": {"address": "/run/valkey.sock"},
    }
    for name in targets:
        command = parts[name].command(facts)
        assert command[command.index("--redis-url") + 1] == "unix:///run/valkey.sock"
        assert set(parts[name].after) == {"model", "valkey"}
    assert "--target" not in parts["gateway"].command(facts)
    assert set(parts["gateway"].after) >= {*targets, "valkey", "draft"}


def test_several_drafts_register_and_are_not_told_to_the_gateway() -> None:
    options = StackOptions(model="tiny", draft_model="small", drafts=2)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    drafts = [name for name in parts if name.startswith("draft") and name != "draft-model"]
    assert drafts == ["draft", "draft-2"]
    facts = {
        "model": {"line": "/models/tiny"},
        "draft-model": {"line": "/models/small"},
        "target": {"address": "127.0.0.1:1"},
        "valkey": {"address": "/run/valkey.sock"},
    }
    for name in drafts:
        command = parts[name].command(facts)
        assert command[command.index("--redis-url") + 1] == "unix:///run/valkey.sock"
        assert set(parts[name].after) == {"model", "draft-model", "valkey"}
    gateway = parts["gateway"].command(facts)
    assert "--draft" not in gateway
    assert gateway[gateway.index("--target") + 1] == "127.0.0.1:1"
    assert set(parts["gateway"].after) >= {*drafts, "target", "valkey"}


@pytest.mark.parametrize("wanted", [True, False])
def test_every_service_tells_metrics_where_they_are_wanted(wanted: bool) -> None:
    options = StackOptions(model="tiny", metrics=wanted)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    facts = {
        "model": {"line": "/models/tiny"},
        "target": {"address": "127.0.0.1:1"},
        "draft": {"address": "127.0.0.1:2"},
        "valkey": {"address": "/run/valkey.sock"},
    }
    for name in ("target", "draft", "gateway"):
        assert ("--metrics-port 0" in " ".join(parts[name].command(facts))) == wanted


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_address_of_a_store_of_ones_own_is_on_no_command_line(replicas: int) -> None:
    options = StackOptions(redis_url="redis://:secret@store:6379/0", replicas=replicas, drafts=replicas)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    facts = {
        "model": {"line": "/models/tiny"},
        "draft-model": {"line": "/models/small"},
        "target": {"address": "127.0.0.1:1"},
        "draft": {"address": "127.0.0.1:2"},
    }
    for name in ("target", "draft", "gateway"):
        assert "secret" not in " ".join(parts[name].command(facts))
    told = {name for name, value in environment_of(options).items() if "secret" in value}
    registers = {"GALLEY_TARGET_REDIS_URL", "GALLEY_DRAFT_REDIS_URL"} if replicas > 1 else set()
    assert told == {"GALLEY_GATEWAY_REDIS_URL", *registers}


def test_secrets_in_files_that_the_environment_names_are_not_given_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stack says itself which store it is; the gateways' secret may be the user's."""
    for name in ("GATEWAY_REDIS_URL", "TARGET_REDIS_URL", "GATEWAY_ID_SECRET"):
        monkeypatch.setenv(f"GALLEY_{name}_FILE", "/run/secrets/one")
    told = environment_of(StackOptions(redis_url="redis://store:6379/0", replicas=2))
    assert {name for name in told if name.startswith("GALLEY_") and name.endswith("_FILE")} == {
        "GALLEY_GATEWAY_ID_SECRET_FILE"
    }
    assert "GALLEY_GATEWAY_ID_SECRET" not in told


def test_a_store_of_ones_own_replaces_the_embedded_one() -> None:
    options = StackOptions(redis_url="redis://store:6379/0")
    stack = Stack(options)
    stack.forget()
    assert "valkey" not in stack.parts


@pytest.mark.parametrize("name", ["gateways", "replicas", "tensor_parallel", "drafts"])
def test_a_stack_has_one_of_each(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name}: must be at least 1, got 0"):
        Stack(StackOptions(**options))
