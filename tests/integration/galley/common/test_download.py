"""Downloads of models from a stub of the hub: progress, checksums, gated models, a hub that is away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from galley.common.models.files import tokenizer_hash
from tests.fakes import hub
from tests.fakes.hub import MODEL, Hub
from tests.fakes.tiny_model import save_tiny_model

TIMEOUT_S = 120
WEIGHTS = "model.safetensors"
TOKEN = "hf_of_the_test"
DOWNLOAD = "galley.common.models.download"
RESOLVE = "galley.engine.load.resolve"
HASHES = f"""
from galley.common.models.tokenizer import Tokenizer
from services.draft.loading import load_strategies
from services.draft.settings import DraftSettings
print(Tokenizer.load("{MODEL}").hash, load_strategies(DraftSettings(tokenizer="{MODEL}"))[1].tokenizer_hash)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    save_tiny_model(directory)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def served(model: Path) -> Iterator[Hub]:
    with hub.serving(model) as served:
        yield served


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def download(served: Hub, home: Path, *flags: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status and the events of the log."""
    ended = python("-m", DOWNLOAD, MODEL, *flags, **served.environment(home, **environment))
    return ended.returncode, events(ended.stderr)


def events(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def names(log: list[dict[str, Any]]) -> list[str]:
    return [entry["event"] for entry in log if entry["logger"] == "__main__"]


def resolved_offline(served: Hub, home: Path) -> Path:
    """Return what a server loads that may not call the hub."""
    ended = python("-m", RESOLVE, MODEL, **served.environment(home, HF_HUB_OFFLINE="1"))
    assert ended.returncode == 0, ended.stderr
    return Path(ended.stdout.strip())


def files_in(home: Path) -> set[str]:
    return {path.name for path in home.glob("hub/*/snapshots/*/**/*") if path.is_file()}


def test_a_download_shows_its_progress_and_is_found_offline(served: Hub, home: Path, model: Path) -> None:
    half_sent, rest = Event(), Event()
    served.held[WEIGHTS] = (half_sent, rest)
    command = [sys.executable, "-m", DOWNLOAD, MODEL, "--report-every-s", "0.05"]
    with subprocess.Popen(
        command, env=served.environment(home), stderr=subprocess.PIPE, text=True
    ) as downloading:
        assert downloading.stderr is not None
        log = []
        for line in downloading.stderr:
            log += events(line)
            if names(log)[-1:] == ["model download progressed"] and half_sent.is_set():
                rest.set()
    assert downloading.returncode == 0
    assert names(log)[0] == "model download started"
    assert names(log)[-1] == "model ready"
    # The whole files that came before are a share of the model; the bytes on the disk count.
    shares = [entry["percent"] for entry in log if entry["event"] == "model download progressed"]
    assert shares == sorted(shares)
    assert all(0 <= share < 100 for share in shares[:1])
    found = resolved_offline(served, home)
    assert (found / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    assert not (found / "pytorch_model.bin").exists()
    assert "pytorch_model.bin" not in dict(served.reads)


def test_files_that_are_not_read_are_not_downloaded(served: Hub, home: Path, model: Path) -> None:
    read = {path.name for path in model.iterdir()} - {"pytorch_model.bin"}
    for name in ("consolidated.safetensors", "original/model-00001.safetensors", "onnx/model.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"a copy in another form")
    assert download(served, home)[0] == 0
    assert {name for name, _ in served.reads} == files_in(home) == read
    served.reads.clear()
    other = home.with_name("other")
    assert python("-m", RESOLVE, MODEL, **served.environment(other)).returncode == 0
    assert {name for name, _ in served.reads} == files_in(other) == read


def test_a_file_with_another_checksum_is_fetched_again(served: Hub, home: Path, model: Path) -> None:
    served.spoiled = [WEIGHTS, "tokenizer.json"]
    status, log = download(served, home)
    assert status == 0
    (removed,) = [entry for entry in log if entry["event"] == "model files removed"]
    sha256, git = sorted(removed["problems"])
    expected = {entry["path"]: entry for entry in served.tree()}
    assert sha256.startswith(f"{WEIGHTS}: sha256 must be {expected[WEIGHTS]['lfs']['oid']}, got ")
    assert git.startswith(f"tokenizer.json: sha1 must be {expected['tokenizer.json']['oid']}, got ")
    found = resolved_offline(served, home)
    for name in (WEIGHTS, "tokenizer.json"):
        assert (found / name).read_bytes() == (model / name).read_bytes()


def test_a_model_that_stays_broken_is_not_served(served: Hub, home: Path, model: Path) -> None:
    """A branch still means the commit before, of which servers that start find all files."""
    assert download(served, home)[0] == 0
    before = resolved_offline(served, home)
    weights = model / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    served.commit = "d" * 40
    served.spoiled = [WEIGHTS] * 2
    status, log = download(served, home)
    assert status == 1
    assert names(log)[-1] == "model download failed"
    assert "sha256 must be" in log[-1]["reason"]
    assert resolved_offline(served, home) == before
    assert download(served, home)[0] == 0
    assert resolved_offline(served, home).name == served.commit


def test_a_gated_model_needs_a_token(model: Path, home: Path) -> None:
    with hub.serving(model, token=TOKEN) as served:
        status, log = download(served, home, HF_TOKEN="")
        assert status == 1
        assert "it is gated and the token has no access" in log[-1]["reason"]
        assert TOKEN not in json.dumps(log)
        assert download(served, home, HF_TOKEN=TOKEN)[0] == 0
        assert resolved_offline(served, home).name == served.commit


@pytest.mark.parametrize("flags", [(), ("--wait",)])
def test_a_name_that_is_no_hub_id_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    ended = python("-m", DOWNLOAD, "no hub id", *flags, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert ended.returncode == 1
    [failed] = events(ended.stderr)
    assert failed["reason"] == "model: must be a directory, a .gguf file or a hub id, got 'no hub id'"


def test_gateways_and_drafts_need_the_hub_only_once(model: Path, home: Path) -> None:
    with hub.serving(model, token=TOKEN) as served:
        assert download(served, home, "--tokenizer", HF_TOKEN=TOKEN)[0] == 0
        assert served.bytes_of_weights == 0
    # The hub is away, and the next gateway has the same volume.
    status, log = download(served, home, "--tokenizer")
    assert status == 0
    assert names(log) == ["hub did not list the model; using the cache"]
    for offline in "01":
        loaded = python("-c", HASHES, **served.environment(home, HF_HUB_OFFLINE=offline))
        assert loaded.stdout.split() == [tokenizer_hash(model)] * 2, loaded.stderr
    # The weights were never there.
    status, log = download(served, home)
    assert status == 1
    assert log[-1]["reason"].startswith(f"{MODEL}: cannot be downloaded: ")


def test_a_checked_model_is_not_read_again(served: Hub, home: Path) -> None:
    assert download(served, home)[0] == 0
    reads = len(served.reads)
    status, log = download(served, home)
    assert (status, names(log)) == (0, ["model ready"])
    assert len(served.reads) == reads


def test_others_wait_until_all_is_checked(served: Hub, home: Path) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", DOWNLOAD, MODEL, "--wait"],
        env=served.environment(home, HF_HUB_OFFLINE="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    with waiting:
        assert waiting.stderr is not None
        assert names(events(waiting.stderr.readline())) == ["waiting for the download of the models"]
        assert waiting.poll() is None
        assert download(served, home)[0] == 0
        assert waiting.wait(TIMEOUT_S) == 0


def test_a_model_that_does_not_fit_is_not_begun(served: Hub, home: Path) -> None:
    served.sizes[WEIGHTS] = 10**15
    status, log = download(served, home)
    assert status == 1
    assert log[-1]["reason"].startswith(f"{MODEL}: needs 10000000")
    assert not served.reads


def test_what_a_killed_download_left_is_removed(served: Hub, home: Path) -> None:
    blobs = home / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "a.1.incomplete", blobs / "b.2.incomplete"
    for path in (old, new):
        path.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    assert download(served, home)[0] == 0
    assert not old.exists()
    assert new.exists(), "another process may be writing it"
