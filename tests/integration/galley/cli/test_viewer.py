"""What `galley up --trace` starts to take traces, and how the other parts are told of it."""

from __future__ import annotations

import asyncio
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from galley.stack.part import PartFailed, PartSpec
from galley.stack.parts import export_to, find_viewer, stack_parts, traced
from galley.stack.stack import Stack, StackDirs, StackOptions
from galley.trace.read.otlp_file import Lines, newest_file, spans_in
from tests.fakes.waiting import PATIENCE_S
from tests.integration.galley.cli.stand_in_stack import once, stack_of, stand_in

STAND_IN = Path(__file__).with_name("stand_in_phoenix.py")


@pytest.fixture(autouse=True)
def trace_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "traces"
    monkeypatch.setenv("GALLEY_TRACE_DIR", str(directory))
    # A user's OpenTelemetry variables must not redirect the traces.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    return directory


@pytest.fixture
def phoenix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    package = site / "phoenix" / "server"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    shutil.copy(STAND_IN, package / "main.py")
    about = site / "arize_phoenix-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: arize-phoenix\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")


def traced_stack(*specs: PartSpec) -> tuple[Stack, str]:
    viewer = find_viewer()
    return stack_of(*traced(list(specs), viewer.part)), viewer.note


async def test_the_services_send_their_spans_to_a_file(trace_dir: Path) -> None:
    stack, reported = traced_stack(once("model", "print('/m')"), stand_in("gateway", "--span=hello"))
    async with stack:
        assert set(stack.running) == {"traces", "gateway"}
    path = newest_file(trace_dir)
    assert path is not None
    assert reported == f"traces go to {path}; galley trace --list shows them"
    spans = [span for line in Lines(path) for span in spans_in(line.document())]
    assert [(span.name, span.process.service) for span in spans] == [("hello", "stand-in")]


async def test_spans_are_exported_while_the_service_runs(trace_dir: Path) -> None:
    stack, _ = traced_stack(stand_in("gateway", "--span=hello"))
    async with stack:
        path = newest_file(trace_dir)
        assert path is not None
        await asyncio.to_thread(_until_written, path)
        assert "gateway" in stack.running


def _until_written(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(True for _ in Lines(path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("given", "delay_ms"), [(None, "250"), ("4000", "4000")])
def test_the_delay_of_an_export_is_below_half_a_second_unless_one_is_set(
    given: str | None, delay_ms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_BSP_SCHEDULE_DELAY", raising=False)
    if given is not None:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", given)
    assert export_to("127.0.0.1:4711")["OTEL_BSP_SCHEDULE_DELAY"] == delay_ms


async def test_with_phoenix_they_send_them_there(phoenix: None, trace_dir: Path) -> None:
    stack, reported = traced_stack(stand_in("gateway", "--span=hello"))
    async with stack:
        link = reported.split()[2]
        assert reported == f"traces at {link} (Arize Phoenix)"
        assert link.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(link) as page:  # noqa: ASYNC210  # it answers at once
            assert page.read() == b"Phoenix"
    assert (trace_dir / "phoenix" / "spans").read_text() == "hello\n"
    assert newest_file(trace_dir) is None


async def test_a_phoenix_that_cannot_start_is_blamed(phoenix: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_PHOENIX_FAILS", "1")
    stack, _ = traced_stack(stand_in("gateway"))
    with pytest.raises(PartFailed, match="phoenix ended with exit code 1 before it was ready") as caught:
        await stack.start()
    assert caught.value.tail == "cannot open its database"
    stack.forget()


async def test_stack_survives_the_end_of_its_trace_collector() -> None:
    stack, _ = traced_stack(stand_in("gateway"))
    async with stack:

        async def work() -> tuple[str, ...]:
            await stack.kill("traces")
            await stack.ended("traces")
            return stack.running

        assert await stack.run(work()) == ("gateway",)


def test_all_services_but_the_store_get_the_endpoint(tmp_path: Path) -> None:
    viewer = PartSpec("traces", lambda _: [])
    options = StackOptions(gateways=2, drafts=2, replicas=2, viewer=viewer)
    parts = stack_parts(options, StackDirs(tmp_path, tmp_path, tmp_path))
    facts = {"traces": {"address": "127.0.0.1:4711"}}
    reported = {part.name for part in parts if endpoint(part.environment, facts) == "http://127.0.0.1:4711"}
    assert reported == {"target", "target-2", "draft", "draft-2", "gateway", "gateway-2"}
    assert {part.name for part in parts if "traces" in part.after} == reported


@pytest.mark.parametrize(("name", "kinds"), [("traces", None), ("phoenix", "true")])
def test_phoenix_gets_kinds_that_it_knows(tmp_path: Path, name: str, kinds: str | None) -> None:
    options = StackOptions(viewer=PartSpec(name, lambda _: []))
    parts = stack_parts(options, StackDirs(tmp_path, tmp_path, tmp_path))
    [gateway] = [part for part in parts if part.name == "gateway"]
    environment = gateway.environment({name: {"address": "127.0.0.1:4711"}})
    assert environment.get("GALLEY_OPENINFERENCE") == kinds


def endpoint(
    environment: Callable[[dict[str, dict[str, str]]], object], facts: dict[str, dict[str, str]]
) -> str:
    result = environment(facts)
    assert isinstance(result, dict)
    return str(result.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""))
