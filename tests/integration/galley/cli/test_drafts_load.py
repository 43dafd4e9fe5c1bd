"""`galley drafts load` with real drafts of a tiny model, which register, and require mutual TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.common.draft_loading import draft_version
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.tls_servers import tls_settings
from tests.integration.galley.engine.drafts import draft_of, save_target
from tests.integration.services.draft.conftest import draft_server

NAME = "galley-draft.test"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY) as started:
        yield started


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def old(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_of(target).save(tmp_path_factory.mktemp("old") / "draft")


@pytest.fixture(scope="module")
def new(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = draft_of(target)
    for name in ("lm_head.weight", "lm_head.weight.scale"):
        draft.weights[name] = draft.weights[name].roll(1, 0)
    return draft.save(tmp_path_factory.mktemp("new") / "draft")


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    authority = Authority(tmp_path, "galley-test")
    return mounted(tmp_path / "tls", authority.ca, authority.issue(NAME))


@pytest.fixture
async def replicas(server: Server, target: Path, old: Path, files: Mounted) -> AsyncIterator[list[str]]:
    """Start two replicas; return their addresses in order."""
    await server.command("FLUSHALL")
    given: dict[str, Any] = {
        "model": str(old),
        "target_model": str(target),
        "dtype": "float32",
        "max_load_mib": 1,
        "redis_url": server.url,
        **tls_settings(files, mutual=True),
    }
    async with AsyncExitStack() as started:
        yield sorted([(await started.enter_async_context(draft_server(**given))).address for _ in "12"])


async def galley(server: Server, *args: str, files: Mounted | None = None) -> Result:
    env = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "300", "GALLEY_CONFIG": ""}
    env["GALLEY_DRAFTS_REDIS_URL"] = server.url
    tls = []
    if files is not None:
        tls = ["--peer-ca-file", files.ca, "--peer-cert-file", files.cert, "--peer-key-file", files.key]
        tls += ["--draft-tls-name", NAME]
    return await asyncio.to_thread(CliRunner().invoke, app, ["drafts", *args, *tls], env=env)


async def versions_of(server: Server) -> dict[str, str]:
    """Return the versions that the replicas' leases name, by address."""
    listed = await galley(server, "list", "--json")
    rows = json.loads(listed.stdout)["versions"]
    return {each["address"]: row["version"] for row in rows for each in row["replicas"]}


async def test_a_trained_draft_is_loaded_tried_and_promoted(
    server: Server, replicas: list[str], old: Path, new: Path, files: Mounted
) -> None:
    first, last = replicas
    before = draft_version(old)
    assert await versions_of(server) == {first: before, last: before}
    loaded = await galley(server, "load", str(new), "--version", "v2", files=files)
    assert (loaded.exit_code, loaded.stdout) == (0, f"{last} serves v2\n"), loaded.output
    await leases_show(server, {first: before, last: "v2"})
    assert (await galley(server, "try", "v2")).exit_code == 0
    promoted = await galley(server, "promote", "v2")
    assert "1 of 2 draft replicas serve it" in promoted.stderr
    assert (await galley(server, "load", str(new), "--version", "v2", files=files)).exit_code == 0
    await leases_show(server, {first: "v2", last: "v2"})
    other = await galley(server, "load", str(old), "--version", "v2", "--replica", last, files=files)
    assert (
        f"must be another than v2, by which {first} serves the weights {draft_version(new)}" in other.stderr
    )
    events = json.loads((await galley(server, "history", "--json")).stdout)
    assert [event["kind"] for event in events] == ["promote", "try", "drain"]


async def leases_show(server: Server, expected: dict[str, str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await versions_of(server) != expected:
            pass


async def test_a_refused_load_changes_nothing(
    server: Server, replicas: list[str], old: Path, target: Path, files: Mounted, tmp_path: Path
) -> None:
    broken = draft_of(target)
    del broken.weights["model.norm.weight"]
    directory = broken.save(tmp_path / "broken")
    refused = await galley(server, "load", str(directory), files=files)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {replicas[1]}: ")
    without = await galley(server, "load", str(old), "--version", "v2", "--timeout", "1")
    assert without.exit_code == 1
    assert f"error: {replicas[1]}: " in without.stderr
    assert set((await versions_of(server)).values()) == {draft_version(old)}
