"""The supervisor: the order of a start, its failures, and the end of all processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from galley.common.config.settings import ServiceSettings, parse_settings
from galley.common.models.files import DEFAULT_MODEL, shipped_draft
from galley.core.hints import MAX_DRAFT_TOKENS
from galley.stack import guard
from galley.stack.endpoint import Service
from galley.stack.options import environment_of
from galley.stack.part import PartFailed, PartSpec, PartStatus, State
from galley.stack.parts import stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions
from services.draft.settings import DraftSettings
from services.gateway.settings import GatewaySettings
from services.target.settings import TargetSettings
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


async def test_services_with_metrics() -> None:
    async with stack_of(stand_in("target", "--metrics=127.0.0.1:9"), stand_in("draft")) as stack:
        assert stack.services == (Service("target", "127.0.0.1:9", stack.address("target")),)


async def test_stop_leaves_no_process_and_no_file() -> None:
    stack = stack_of(stand_in("target"), with_valkey=True)
    async with stack:
        ends = Ends([stack.pid("target"), stack.pid("valkey")])
    with ends:
        assert ends.all_within(0)
    assert not stack.dirs.run.exists()


async def test_part_that_ignores_sigterm_is_killed() -> None:
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


async def test_only_the_user_can_read_the_data_of_the_store(tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = os.umask(0o022)
    try:
        stack = stack_of(with_valkey=True, options=StackOptions(data_dir=data))
        async with stack, redis.asyncio.from_url(f"unix://{stack.dirs.run}/valkey.sock") as store:
            await store.set("galley", "a prompt")
    finally:
        os.umask(before)
    made = [data, *data.rglob("*")]
    assert any(path.is_file() for path in made)
    assert {path: path.stat().st_mode & 0o077 for path in made} == dict.fromkeys(made, 0)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o703])
def test_a_data_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=f"must be closed to other users.*got mode {mode:04o}"):
        Stack(StackOptions(data_dir=tmp_path))
    tmp_path.chmod(0o700)
    Stack(StackOptions(data_dir=tmp_path)).forget()


async def test_a_data_directory_that_another_stack_uses_is_refused(tmp_path: Path) -> None:
    options = StackOptions(data_dir=tmp_path / "data", stop_grace_s=10)
    second = stack_of(stand_in("target"), options=options)
    async with stack_of(stand_in("target"), options=options):
        with pytest.raises(ValueError, match="data: must not be in use by another stack"):
            await second.start()
        assert not second.dirs.run.exists()
    async with stack_of(stand_in("target"), options=options) as third:
        assert third.running == ("target",)


@pytest.mark.parametrize(
    ("part", "problem", "tail"),
    [
        (
            stand_in("draft", "--say=no such model", "--die=3"),
            "draft ended with exit code 3 before",
            "no such",
        ),
        (replace(stand_in("draft"), command=lambda _: ["/no/such/command"]), "draft ended", "No such file"),
        (once("model", "raise SystemExit('no such model')"), "model ended with exit code 1", "no such model"),
        (stand_in("draft", "--garble"), "instead of a JSON object", ""),
    ],
    ids=["dies", "no command", "exits", "garbled"],
)
async def test_part_that_cannot_start(part: PartSpec, problem: str, tail: str) -> None:
    stack = stack_of(stand_in("target"), part)
    with pytest.raises(PartFailed, match=problem) as caught:
        await stack.start()
    assert tail in caught.value.tail
    assert caught.value.log.exists()
    assert not stack.running
    stack.forget()


async def test_silent_part_times_out() -> None:
    stack = stack_of(stand_in("target", "--mute"), options=StackOptions(start_timeout_s=1))
    with pytest.raises(PartFailed, match="not ready after 1 s"):
        await stack.start()
    assert not stack.running
    stack.forget()


async def test_part_that_exits_reports_its_last_line() -> None:
    seen: list[PartStatus] = []
    spec = once("model", "print('converting'); print('/models/tiny')")
    async with stack_of(spec, on_status=seen.append) as stack:
        assert stack.facts("model") == {"line": "/models/tiny"}
    assert [status.stage for status in seen] == ["starting", "converting", "/models/tiny", "ready"]


@pytest.mark.parametrize("fails", [False, True])
async def test_work_ends_when_a_part_dies(fails: bool) -> None:
    async with stack_of(stand_in("target"), stand_in("draft")) as stack:

        async def work() -> None:
            stack.send("draft", signal.SIGKILL)
            if fails:
                raise ConnectionError
            await asyncio.Event().wait()

        with pytest.raises(PartFailed, match="draft was killed by SIGKILL"):
            await stack.run(work())
    stack.forget()


async def test_result_of_work() -> None:
    async with stack_of(stand_in("target")) as stack:
        assert await stack.run(asyncio.sleep(0, 7)) == 7


async def test_cancelled_start_leaves_nothing() -> None:
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
def supervisor(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    flags = getattr(request, "param", ())
    command = [sys.executable, "-m", "tests.integration.galley.cli.supervise", *flags]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_the_supervisor(supervisor: subprocess.Popen[str], sig: signal.Signals) -> None:
    assert supervisor.stdout is not None
    printed = json.loads(supervisor.stdout.readline())
    with Ends([*printed["pids"], supervisor.pid]) as ends:
        supervisor.send_signal(sig)
        assert ends.all_within(10)
    killed = sig is signal.SIGKILL
    assert supervisor.wait() == (-sig if killed else 0)
    run = Path(printed["run"])
    assert run.exists() == killed
    if run.exists():
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()


@pytest.mark.parametrize("supervisor", [["--stubborn"]], indirect=True, ids=["stubborn"])
def test_further_signals_do_not_interrupt_the_end(supervisor: subprocess.Popen[str]) -> None:
    assert supervisor.stdout is not None
    printed = json.loads(supervisor.stdout.readline())
    with Ends(printed["pids"]) as ends:
        while not ends.all_within(0.05):
            supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(20) == 0
    assert not Path(printed["run"]).exists(), "it holds prompts"


def test_no_process_outlives_a_supervisor_whose_output_nobody_reads(
    supervisor: subprocess.Popen[str],
) -> None:
    assert supervisor.stdout is not None
    assert supervisor.stderr is not None
    printed = json.loads(supervisor.stdout.readline())
    supervisor.stderr.close()
    with Ends([*printed["pids"], supervisor.pid]) as ends:
        os.kill(printed["target"], signal.SIGKILL)  # which it reports
        assert ends.all_within(10)
    assert supervisor.wait() == 0
    shutil.rmtree(printed["run"])  # kept for the log of the target


def test_guard_starts_nothing_without_its_parent() -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "1", "0", "/bin/echo", "started"]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=10)
    assert ended.returncode == 70
    assert ended.stdout == b""


def test_niceness() -> None:
    script = "import os; print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)"
    printed = []
    for niceness in (0, 3):
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(niceness)]
        ended = subprocess.run(
            [*guarded, sys.executable, "-c", script], capture_output=True, check=True, timeout=30
        )
        printed.append(ended.stdout.decode().split())
    (plain, before), (nicer, idle) = printed
    assert int(nicer) == min(19, int(plain) + 3)
    assert (before, idle) == ("False", "True")


FACTS = {
    "model": {"line": "/models/tiny"},
    "draft-model": {"line": "/models/small"},
    "target": {"address": "127.0.0.1:1"},
    "draft": {"address": "127.0.0.1:2"},
    "valkey": {"address": "/run/valkey.sock"},
}


def parts_of(options: StackOptions) -> dict[str, PartSpec]:
    nowhere = Path("/nowhere")
    return {part.name: part for part in stack_parts(options, StackDirs(nowhere, nowhere, nowhere))}


def command_of(part: PartSpec) -> str:
    return " ".join(part.command(FACTS))


def test_commands_of_the_parts() -> None:
    extra = {"gateway": ["--max-sessions", "2"]}
    parts = parts_of(StackOptions(model="tiny", k=3, gateways=2, threads=1, extra_args=extra))
    assert list(parts) == ["valkey", "model", "target", "draft", "gateway", "gateway-2"]
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
        assert flags in command_of(parts["gateway-2"])
    for name in ("target", "draft"):
        assert "--threads 1" in command_of(parts[name])
    parts = parts_of(StackOptions(model="tiny", threads=6, draft_threads=2))
    assert "--threads 6" in command_of(parts["target"])
    assert "--threads 2" in command_of(parts["draft"])


def test_parts_that_start_again_keep_the_addresses_that_others_know() -> None:
    before = FACTS | {"gateway": {"address": "127.0.0.1:3", "http": "127.0.0.1:4"}}
    for replicas in (1, 2):
        parts = parts_of(StackOptions(model="tiny", replicas=replicas, drafts=replicas, http_port=0))
        ports = {
            name: flag_of(parts[name].command(before), "--port") for name in ("target", "draft", "gateway")
        }
        # Those that register themselves get a free port.
        assert ports == {"gateway": "3"} | (
            {"target": "1", "draft": "2"} if replicas == 1 else {"target": "0", "draft": "0"}
        )
        assert flag_of(parts["gateway"].command(before), "--http-port") == "4"


def flag_of(command: Sequence[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("k", [None, 0, 1, MAX_DRAFT_TOKENS])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_service_accepts_its_command(k: int | None, replicas: int) -> None:
    options = StackOptions(
        model="tiny",
        k=k,
        dtype="float32",
        replicas=replicas,
        drafts=replicas,
        metrics=True,
        log_format="console",
    )
    parts = parts_of(options)
    read: dict[str, ServiceSettings] = {}
    services: dict[str, type[ServiceSettings]] = {
        "gateway": GatewaySettings,
        "draft": DraftSettings,
        "target": TargetSettings,
    }
    for role, settings in services.items():
        command = list(parts[role].command(FACTS))
        argv = [*command[command.index(f"services.{role}") + 1 :], "--ready-fd", "9"]
        read[role] = parse_settings(settings, argv, role, "")
    assert {settings.log_format for settings in read.values()} == {"console"}
    gateway = read["gateway"]
    assert isinstance(gateway, GatewaySettings)
    assert gateway.k == (16 if k is None else k)


def test_targets_with_vllm_run_in_its_environment() -> None:
    options = StackOptions(
        model="tiny", engine="vllm", vllm_args='{"seed": 1}', tensor_parallel=2, target_python="/vllm/python"
    )
    parts = parts_of(options)
    target = parts["target"].command(FACTS)
    assert target[:4] == ["/vllm/python", "-P", "-m", "services.target"]
    settings = parse_settings(TargetSettings, target[4:], "target", "")
    assert (settings.engine, settings.tensor_parallel) == ("vllm", 2)
    assert settings.vllm_arguments == {"seed": 1}
    # The interpreter has this tree's packages, but not the tree.
    source = Path(parts["target"].environment(FACTS)["PYTHONPATH"])
    assert (source / "services" / "target" / "settings.py").exists()
    assert not parts["draft"].environment(FACTS)
    assert parts["draft"].command(FACTS)[0] == sys.executable


@pytest.mark.parametrize(
    ("options", "model", "strategy"),
    [
        (StackOptions(), str(shipped_draft("")), "hybrid"),
        (StackOptions(model=DEFAULT_MODEL, strategy="model"), str(shipped_draft("")), "model"),
        (StackOptions(draft_model="none"), None, "ngram"),
        (StackOptions(model="tiny"), None, "ngram"),
        (StackOptions(model="tiny", draft_model="my-draft"), "my-draft", "hybrid"),
    ],
)
def test_draft_model_and_strategy(options: StackOptions, model: str | None, strategy: str) -> None:
    parts = parts_of(options)
    draft = command_of(parts["draft"])
    assert f"--default-strategy {strategy}" in draft
    if model is None:
        assert "draft-model" not in parts
        assert "--tokenizer /models/tiny" in draft
        assert "--model" not in draft
    else:
        assert parts["draft-model"].command({})[-1] == model
        assert "--model /models/small --target-model /models/tiny" in draft
        assert set(parts["draft"].after) == {"model", "draft-model"}


def test_drafts_accept_others_in_place_of_their_own() -> None:
    parts = parts_of(StackOptions(drafts=2, max_load_mib=64))
    for name in ("draft", "draft-2"):
        command = list(parts[name].command(FACTS))
        read = parse_settings(DraftSettings, command[command.index("services.draft") + 1 :], "draft", "")
        assert read.max_load_bytes == 64 << 20
        assert read.redis_url.get_secret_value()
    assert "--max-load-mib" not in command_of(parts_of(StackOptions())["draft"])


def test_a_single_draft_that_accepts_others_registers_so_that_commands_find_it() -> None:
    parts = parts_of(StackOptions(max_load_mib=64))
    assert "--redis-url unix:///run/valkey.sock" in command_of(parts["draft"])
    assert "--draft" not in parts["gateway"].command(FACTS)
    assert "--redis-url" not in command_of(parts_of(StackOptions())["draft"])


@pytest.mark.parametrize(("role", "count"), [("target", 3), ("draft", 2)])
def test_several_replicas_register_in_the_store(role: str, count: int) -> None:
    counts = {"replicas" if role == "target" else "drafts": count}
    parts = parts_of(StackOptions(model="tiny", draft_model="small", **counts))  # type: ignore[arg-type]  # counts
    replicas = [name for name in parts if name.startswith(role) and name != "draft-model"]
    assert replicas == [role, *(f"{role}-{number}" for number in range(2, count + 1))]
    for name in replicas:
        assert "--redis-url unix:///run/valkey.sock" in command_of(parts[name])
        assert set(parts[name].after) >= {"model", "valkey"}
    other = "draft" if role == "target" else "target"
    gateway = parts["gateway"].command(FACTS)
    assert f"--{role}" not in gateway
    assert gateway[gateway.index(f"--{other}") + 1] == FACTS[other]["address"]
    assert set(parts["gateway"].after) >= {*replicas, other, "valkey"}


@pytest.mark.parametrize("metrics", [True, False])
def test_services_serve_metrics_on_request(metrics: bool) -> None:
    parts = parts_of(StackOptions(model="tiny", metrics=metrics))
    for name in ("target", "draft", "gateway"):
        assert ("--metrics-port 0" in command_of(parts[name])) == metrics


@pytest.mark.parametrize("replicas", [1, 2])
def test_url_of_the_users_store_is_on_no_command_line(replicas: int) -> None:
    options = StackOptions(redis_url="redis://:secret@store:6379/0", replicas=replicas, drafts=replicas)
    parts = parts_of(options)
    assert "valkey" not in parts
    for name in ("target", "draft", "gateway"):
        assert "secret" not in command_of(parts[name])
    names = {name for name, value in environment_of(options).items() if "secret" in value}
    registers = {"GALLEY_TARGET_REDIS_URL", "GALLEY_DRAFT_REDIS_URL"} if replicas > 1 else set()
    assert names == {"GALLEY_GATEWAY_REDIS_URL", *registers}


def test_files_of_secrets_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY_REDIS_URL", "TARGET_REDIS_URL", "GATEWAY_ID_SECRET"):
        monkeypatch.setenv(f"GALLEY_{name}_FILE", "/run/secrets/one")
    names = environment_of(StackOptions(redis_url="redis://store:6379/0", replicas=2))
    files = {name for name in names if name.startswith("GALLEY_") and name.endswith("_FILE")}
    assert files == {"GALLEY_GATEWAY_ID_SECRET_FILE"}
    assert "GALLEY_GATEWAY_ID_SECRET" not in names


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        (StackOptions(redis_url="redis://store:6379/0", pool="blue"), "blue"),
        (StackOptions(redis_url="redis://store:6379/0"), "of the shell"),
        (StackOptions(), None),
    ],
)
def test_all_services_of_a_stack_are_in_one_pool(
    options: StackOptions, pool: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"GALLEY_{role}_POOL" for role in ("GATEWAY", "TARGET", "DRAFT")]
    for name in names:
        monkeypatch.setenv(name, "of the shell")
    environment = environment_of(options)
    assert [environment.get(name) for name in names] == [pool] * 3


@pytest.mark.parametrize("name", ["gateways", "replicas", "tensor_parallel", "drafts"])
def test_least_counts(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name}: must be at least 1, got 0"):
        Stack(StackOptions(**options))
