"""`galley drafts` beside a real store, with leases of drafts that do not run, and with fake replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.common.draft_loading import ACCEPTED, CONFIG, WEIGHTS, draft_version
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.spool import LearningSpool
from galley.common.registry.trials import DraftVersions
from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.state import NOT_TRIED
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.replicas import FakeDraft

POOL = "ns.release"
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with running(VALKEY) as server:
        yield server


@pytest.fixture
async def server(shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    await shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
async def versions(server: Server) -> AsyncIterator[DraftVersions]:
    found = DraftVersions(server.url, POOL)
    yield found
    await found.close()


async def galley(server: Server, *args: str, **env: str) -> Result:
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "300", "GALLEY_CONFIG": ""}
    store = {"GALLEY_DRAFTS_REDIS_URL": server.url, "GALLEY_DRAFTS_POOL": POOL}
    return await asyncio.to_thread(CliRunner().invoke, app, ["drafts", *args], env={**plain, **store, **env})


async def register(server: Server, *drafts: tuple[str, str, int], digest: str = "") -> None:
    """Register drafts by address, version and most bytes of a load, all with weights of one digest."""
    registry = ReplicaRegistry(server.url, POOL, lease_s=HOUR_S)
    for address, version, most in drafts:
        info = pb.GetDraftInfoResponse(
            model="m", incarnation="i", version=version, max_load_bytes=most, weights_digest=digest
        )
        await registry.publish(DRAFT_POOL, draft_lease(address, info, sessions=3))
    await registry.close()


def counts(sessions: int, accepted: int) -> VersionCounts:
    """Return the counts of sessions of 100 tokens, of which some more or fewer were accepted."""
    total = VersionCounts()
    for index in range(sessions):
        total += session_counts(
            output_tokens=100,
            accepted=accepted + index % 3,
            proposals=40,
            round_ns=1_000_000_000,
            plain_ns=1_500_000_000,
            draft_compute_ns=50_000_000,
        )
    return total


async def list_json(server: Server) -> dict[str, Any]:
    result = await galley(server, "list", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def arms(found: dict[str, Any]) -> dict[str, tuple[str, float, int]]:
    return {row["version"]: (row["arm"], row["share"], len(row["replicas"])) for row in found["versions"]}


async def test_without_drafts_and_trials_the_list_says_so(server: Server) -> None:
    result = await galley(server, "list")
    assert result.exit_code == 0
    assert result.stdout == (
        f"no draft is registered in the pool {POOL}, and no version was tried; drafts of `galley up` "
        "register with --drafts 2 or --max-load-mib\n"
    )
    assert await list_json(server) == {"pool": POOL, "trial": None, "versions": []}
    assert (await galley(server, "history")).stdout == "nothing has changed yet\n"


async def test_the_list_compares_the_versions_of_a_trial(server: Server, versions: DraftVersions) -> None:
    await register(server, ("a:1", "v1", 0), ("b:1", "v1", 0), ("c:1", "v2", 1 << 20))
    assert arms(await list_json(server)) == {"v1": ("stable", 1.0, 2), "v2": ("stable", 1.0, 1)}
    tried = await galley(server, "try", "v2", "--share", "0.1", "--tokens", "500", "--reason", "new corpus")
    assert (tried.exit_code, tried.stdout) == (0, "v2 gets 10.0% of the sessions, drawn by session\n")
    state = await versions.read()
    await versions.add("", counts(40, 50), state.trial)
    await versions.add("v2", counts(6, 60), state.trial)
    found = await list_json(server)
    assert arms(found) == {"v2": ("canary", 0.1, 1), "v1": ("stable", 0.9, 2), "": ("stable", 0.9, 0)}
    canary = next(row for row in found["versions"] if row["version"] == "v2")
    assert (canary["sessions"], canary["output_tokens"]) == (6, 600)
    assert canary["gain"]["value"] == pytest.approx(0.61)
    assert canary["gain"]["low"] < canary["gain"]["value"] < canary["gain"]["high"]
    assert canary["speed_up"]["value"] == pytest.approx(1.5)
    assert canary["cost_ms"]["value"] == pytest.approx(0.5)
    assert found["trial"]["version"] == "v2"
    assert (found["trial"]["outcome"], found["trial"]["tokens"]) == ("keep", 500)
    text = (await galley(server, "list")).stdout
    assert "trial of v2: 10.0% of the sessions, drawn by session, since 20" in text
    assert "keep (6 of 8 sessions in the smaller arm)" in text
    assert "0.610 ± 0.0" in text
    assert "c:1: v2, 3 sessions, queue 0, takes loads" in text


async def test_the_list_shows_replicas_whose_version_names_different_weights(server: Server) -> None:
    await register(server, ("a:1", "v1", 0), ("b:1", "ab12", 0), digest="ab12")
    await register(server, ("c:1", "v1", 0))
    same = await galley(server, "list")
    assert "a:1: v1 (ab12), 3 sessions" in same.stdout
    assert "b:1: ab12, 3 sessions" in same.stdout
    assert "c:1: v1, 3 sessions" in same.stdout
    assert not same.stderr
    await register(server, ("d:1", "v1", 0), digest="cd34")
    different = await galley(server, "list")
    assert different.stderr == (
        "warning: replicas of v1 serve different weights (ab12, cd34); give each draft a version of its own\n"
    )
    replicas = next(row for row in (await list_json(server))["versions"] if row["version"] == "v1")[
        "replicas"
    ]
    assert [each["weights_digest"] for each in replicas] == ["ab12", "", "cd34"]


async def test_a_version_is_promoted_and_another_drained(server: Server, versions: DraftVersions) -> None:
    await register(server, ("a:1", "v1", 0), ("b:1", "v2", 0))
    promoted = await galley(server, "promote", "v2", "--reason", "by eye")
    assert promoted.exit_code == 0
    assert promoted.stdout == "v2 gets all sessions\n"
    assert "1 of 2 draft replicas serve it" in promoted.stderr
    assert "galley drafts load DIR --version v2" in promoted.stderr
    assert arms(await list_json(server)) == {"v2": ("stable", 1.0, 1), "v1": ("other", 0.0, 1)}
    assert (await galley(server, "drain", "v1")).stdout == "v1 gets no more sessions\n"
    assert arms(await list_json(server))["v1"] == ("drained", 0.0, 1)
    events = json.loads((await galley(server, "history", "--json")).stdout)
    assert [(each["kind"], each["version"], each["reason"]) for each in events] == [
        ("drain", "v1", ""),
        ("promote", "v2", "by eye"),
    ]
    first, last = (await galley(server, "history")).stdout.splitlines()
    assert "Z  drain v1" in first
    assert "Z  promote v2" in last
    assert last.endswith(": by eye")
    assert (await versions.read()).split.stable == "v2"


@pytest.mark.parametrize(
    ("args", "code", "problem"),
    [
        (("try", "v2", "--share", "0.9"), 2, "--share: must be > 0 and <= 0.5, got 0.9"),
        (("try", "a/b"), 2, "VERSION: must be 1 to 64 letters, digits and . _ -, got 'a/b'"),
        (("try", "v2", "--by", "day"), 2, "--by: must be one of session, tenant, workload, got 'day'"),
        (("try", "v2", "--tokens", "0"), 2, "--tokens: must be at least 1, got 0"),
        (("drain", "v2", "--reason", "x" * 301), 2, "--reason: must be at most 300 characters, got 301"),
        (("promote", "v9"), 1, "error: no registered draft serves v9"),
        (("list", "--pool", "a b"), 2, "--pool: must be 1 to 128 letters"),
        (("list", "--redis-url", "http://x"), 2, "--redis-url: must"),
        (("list", "--redis-url", "redis://:pw@x:1"), 2, "use GALLEY_DRAFTS_REDIS_URL"),
        (("load", "/no/such/directory"), 2, "DIR: must be a directory, got /no/such/directory"),
        (("load", ".", "--replica", "nowhere"), 2, "--replica: must"),
        (("load", "."), 1, "must hold config.json"),
    ],
)
async def test_wrong_usage_is_one_line(
    server: Server,
    args: tuple[str, ...],
    code: int,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = await galley(server, *args)
    assert result.exit_code == code, result.output
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


async def test_without_a_command_only_the_help_is_printed(server: Server) -> None:
    result = await galley(server)
    assert result.exit_code == 2
    assert "Usage: galley drafts" in result.output
    assert "error" not in result.output


async def test_a_drain_of_a_version_that_nobody_knows_is_a_warning(
    server: Server, versions: DraftVersions
) -> None:
    await register(server, ("a:1", "v1", 0))
    await versions.try_version("v2", 0.1)
    for known in ("v1", "v2"):
        assert not (await galley(server, "drain", known)).stderr
    unknown = await galley(server, "drain", "v3")
    assert (unknown.exit_code, unknown.stdout) == (0, "v3 gets no more sessions\n")
    assert unknown.stderr == "warning: no registered draft serves v3, and it was never tried or decided\n"
    assert not (await galley(server, "drain", "v3")).stderr


async def test_a_store_that_is_away_is_an_error(server: Server) -> None:
    result = await galley(server, "list", GALLEY_DRAFTS_REDIS_URL="redis://127.0.0.1:1/0")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


async def test_a_second_trial_waits_for_the_first(server: Server) -> None:
    assert (await galley(server, "try", "v2")).exit_code == 0
    other = await galley(server, "try", "v3")
    assert other.exit_code == 1
    assert "v2 is on trial" in other.stderr
    assert "no registered draft serves v2" in (await galley(server, "try", "v2")).stderr


async def test_what_writers_of_the_store_put_there_cannot_control_a_terminal(server: Server) -> None:
    await register(server, ("a:1\x1b[2J", "v\x1b]0;x\x07", 0))
    await server.command(
        "LPUSH", f"galley:drafts:{{{POOL}}}:history", '{"kind": "try", "version": "\\u001b[2J"}'
    )
    for command in ("list", "history"):
        result = await galley(server, command)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout


async def test_the_gateways_own_variables_are_read(server: Server, versions: DraftVersions) -> None:
    """Inside a gateway's pod no flag is needed."""
    await versions.drain("v1")
    own = {"GALLEY_GATEWAY_REDIS_URL": server.url, "GALLEY_GATEWAY_POOL": POOL}
    result = await galley(server, "list", GALLEY_DRAFTS_REDIS_URL="", GALLEY_DRAFTS_POOL="", **own)
    assert "v1" in result.stdout


async def test_a_principal_is_forgotten(server: Server) -> None:
    spool = LearningSpool(server.url, POOL)
    await spool.close()
    result = await galley(server, "forget", "anna")
    assert (result.exit_code, result.stdout) == (0, "0 sessions of anna deleted\n")


class LoadedDraft(FakeDraft):
    """A draft that takes what it is sent, or refuses it."""

    refusal = ""
    max_load_bytes = 1 << 30

    def __init__(self, directory: Path, version: str) -> None:
        directory.mkdir()
        super().__init__(directory, "hash")
        self.version, self.max_load_bytes = version, 1 << 30

    async def LoadDraft(self, request_iterator: Any, context: Any) -> pb.LoadDraftResponse:
        await context.send_initial_metadata(((ACCEPTED, "1"),))
        messages = [message async for message in request_iterator]
        if self.refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        if (replaces := messages[0].draft.replaces) not in {"", self.version}:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"serves {self.version}, not {replaces}")
        self.version = messages[0].draft.version
        return pb.LoadDraftResponse(version=self.version)


@pytest.fixture
async def replicas(server: Server, tmp_path: Path) -> AsyncIterator[dict[str, LoadedDraft]]:
    found = {
        name: LoadedDraft(tmp_path / name, version)
        for name, version in (("a", "v1"), ("b", "v1"), ("c", "bad"))
    }
    for each in found.values():
        await each.start()
    await register(server, *((each.address, each.version, each.max_load_bytes) for each in found.values()))
    yield found
    for each in found.values():
        await each.stop()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "draft"
    path.mkdir()
    (path / CONFIG).write_text("{}")
    (path / WEIGHTS).write_bytes(b"weights")
    return path


async def test_a_load_goes_to_replicas_without_sessions(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await versions.drain("bad")
    result = await galley(server, "load", str(directory))
    assert result.exit_code == 0, result.output
    version = draft_version(directory)
    assert {name: each.version for name, each in replicas.items()} == {"a": "v1", "b": "v1", "c": version}
    assert result.stdout == f"{replicas['c'].address} serves {version}\n"


async def test_what_is_loaded_gets_no_sessions_until_it_is_tried(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    """Without a trial every version is a stable one, so the new draft would get sessions at once."""
    assert (await galley(server, "load", str(directory), "--version", "v2")).exit_code == 0
    assert [name for name, each in replicas.items() if each.version == "v2"] == ["c"]
    state = await versions.read()
    assert state.split.drained == {"v2"}
    assert state.decided == {"v2": "loaded, not tried"}
    assert (await galley(server, "try", "v2")).exit_code == 0
    assert (await versions.read()).split.drained == set()


async def test_a_replica_whose_version_was_loaded_and_not_tried_is_left_alone(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await register(server, *((replicas[name].address, "v1", 0) for name in "ab"))
    await versions.drain("bad", reason=NOT_TRIED)
    refused = await galley(server, "load", str(directory), "--version", "v2")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "error: bad was loaded and not tried yet: `galley drafts try` or `drain` it, or name its replica "
        "with --replica\n"
    )
    assert {name: each.version for name, each in replicas.items()} == {"a": "v1", "b": "v1", "c": "bad"}


async def test_a_replica_whose_version_was_drained_by_a_person_is_loaded(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await versions.drain("bad", reason=NOT_TRIED)
    assert (await galley(server, "load", str(directory), "--version", "v2")).exit_code == 0
    assert {name: each.version for name, each in replicas.items()} == {"a": "v1", "b": "v2", "c": "bad"}
    assert (await galley(server, "drain", "bad")).exit_code == 0
    assert (await galley(server, "load", str(directory), "--version", "v3")).exit_code == 0
    assert {name: each.version for name, each in replicas.items()} == {"a": "v1", "b": "v2", "c": "v3"}


async def test_a_load_of_a_version_that_gets_sessions_does_not_drain_it(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    """As after a test of other weights, when a replica gets the first ones again."""
    await versions.drain("bad")
    assert (await galley(server, "load", str(directory), "--version", "v1")).exit_code == 0
    assert {each.version for each in replicas.values()} == {"v1"}
    assert (await versions.read()).split.drained == {"bad"}


async def test_a_name_that_another_replica_serves_with_other_weights_is_refused(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    """What was decided of the version holds for the weights that bore its name."""
    await register(server, ("d:1", "v2", 0), digest="0123456789abcdef")
    await versions.promote("v2")
    refused = await galley(server, "load", str(directory), "--version", "v2")
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"error: --version: must be another than v2, by which d:1 serves the weights 0123456789abcdef; those "
        f"of {directory} are {draft_version(directory)}\n"
    )
    assert {each.version for each in replicas.values()} == {"v1", "bad"}
    await register(server, ("d:1", "v2", 0), digest=draft_version(directory))
    assert (await galley(server, "load", str(directory), "--version", "v2")).exit_code == 0
    assert {each.version for each in replicas.values()} == {"v2"}


async def test_a_version_on_trial_keeps_its_weights_also_if_its_only_replica_restarts(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    """Otherwise the rule would decide on the sums of two drafts."""
    canary = replicas["c"].address
    await versions.promote("v1")
    await register(server, (canary, "v2", 1 << 30), digest="0123456789abcdef")
    assert (await galley(server, "try", "v2")).exit_code == 0
    await register(server, (canary, "bad", 1 << 30))
    refused = await galley(server, "load", str(directory), "--version", "v2")
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"error: --version: must be another than v2, which is on trial with the weights 0123456789abcdef; "
        f"those of {directory} are {draft_version(directory)}\n"
    )
    assert {each.version for each in replicas.values()} == {"v1", "bad"}
    await versions.drain("v2")
    assert (await galley(server, "load", str(directory), "--version", "v2")).exit_code == 0
    assert replicas["c"].version == "v2"


async def test_after_a_promotion_the_others_are_loaded_with_the_same_version(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await versions.promote("v2")
    assert (await galley(server, "load", str(directory), "--version", "v2")).exit_code == 0
    assert {each.version for each in replicas.values()} == {"v2"}
    assert (await versions.read()).split.stable == "v2"
    assert (await versions.read()).split.drained == set()


async def test_a_replica_that_refuses_does_not_keep_others_from_loading(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await versions.promote("other")
    replicas["b"].refusal = "another vocabulary"
    result = await galley(server, "load", str(directory), "--version", "v2")
    assert result.exit_code == 1
    assert f"error: {replicas['b'].address}: another vocabulary" in result.stderr
    assert {name: each.version for name, each in replicas.items()} == {"a": "v2", "b": "v1", "c": "v2"}


async def test_a_replica_that_was_loaded_since_its_lease_is_left_alone(
    server: Server, versions: DraftVersions, replicas: dict[str, LoadedDraft], directory: Path
) -> None:
    await versions.drain("bad")
    late = replicas["c"]
    late.version = "v3"
    refused = await galley(server, "load", str(directory), "--version", "v2")
    assert refused.exit_code == 1
    assert refused.stderr == f"error: {late.address}: serves v3, not bad\n"
    assert late.version == "v3"


async def test_without_drafts_a_load_says_how_they_register(server: Server, directory: Path) -> None:
    result = await galley(server, "load", str(directory))
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: no draft is registered in the pool {POOL}; drafts of `galley up` register with --drafts 2 "
        "--max-load-mib 64; or name replicas with --replica\n"
    )


async def test_without_a_replica_that_fits_nothing_changes(
    server: Server, versions: DraftVersions, directory: Path
) -> None:
    await register(server, ("a:1", "v1", 1 << 20))
    result = await galley(server, "load", str(directory), "--version", "v2")
    assert result.exit_code == 1
    assert f"no replica of the pool {POOL} can take v2" in result.stderr
    assert (await versions.read()).epoch == 0


async def test_a_replica_of_the_version_on_trial_is_not_loaded(
    server: Server, versions: DraftVersions, directory: Path
) -> None:
    await register(server, ("a:1", "v1", 1 << 20), ("b:1", "v2", 1 << 20))
    await versions.promote("v1")
    await versions.try_version("v2", 0.1)
    result = await galley(server, "load", str(directory), "--version", "v3")
    assert result.exit_code == 1
    assert "neither of the version on trial nor the only one of the stable version" in result.stderr
