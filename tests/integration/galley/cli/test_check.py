"""`galley check`: whether a pair fits, told from its files before any weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from galley.common.models.files import DEFAULT_MODEL, shipped_draft, tokenizer_hash
from tests.fakes import hub
from tests.fakes.model_configs import CONFIGS, save_random
from tests.fakes.tiny_model import save_tiny_model
from tests.integration.galley.cli.test_commands import galley
from tests.integration.galley.engine.drafts import draft_of, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target")


def facts(*args: str) -> dict[str, Any]:
    result = galley("check", *args, "--json")
    assert result.exit_code in {0, 1}, result.output
    return dict(json.loads(result.stdout))


def test_a_trained_draft_fits_its_target(target: Path, tmp_path: Path) -> None:
    draft = draft_of(target).save(tmp_path / "draft")
    result = galley("check", str(target), str(draft))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split()[:2] == ["target", "target"]
    assert lines[2].split()[:2] == ["draft", "draft"]
    assert "Speculation pays from an acceptance rate of 0." in result.stdout
    assert lines[-1] == f"fits; measure it: galley bench --quick --model {target} --draft-model {draft}"
    assert result.stderr == ""


def test_sizes_are_those_of_the_headers(target: Path, tmp_path: Path) -> None:
    draft = draft_of(target).save(tmp_path / "draft")
    told = facts(str(target), str(draft), "--dtype=float32")
    ours, theirs = told["models"]
    file = target / "model.safetensors"
    assert 0 < file.stat().st_size - ours["weight_bytes"] < 8192, "all but the header"
    # 3 layers of 2 KV heads of 16 numbers, keys and values, in 4 bytes; the draft has 2 layers.
    assert (ours["kv_bytes_per_token"], theirs["kv_bytes_per_token"]) == (768, 512)
    assert ours["tokenizer_hash"] == theirs["tokenizer_hash"] == tokenizer_hash(target)
    assert told["cost_ratio"] > 1
    assert [one["alpha"] for one in told["gains"]] == [0.5, 0.7, 0.9]
    assert told["fits"] is True


@pytest.mark.model
def test_the_acceptance_that_its_training_measured_gives_the_gain_to_expect() -> None:
    told = facts(DEFAULT_MODEL)
    alpha = told["expected"]["alpha"]
    record = json.loads((Path(str(shipped_draft(""))) / "training.json").read_text())["acceptance"]
    assert (
        min(one["greedy"] for one in record.values()) < alpha < max(one["greedy"] for one in record.values())
    )
    assert 1 < told["expected"]["gain"] < told["gains"][-1]["gain"]


def test_another_tokenizer_does_not_fit_and_its_first_difference_is_named(
    target: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other")
    refused = galley("check", str(target), str(other))
    assert refused.exit_code == 1
    hashes = f"{tokenizer_hash(target)} and {tokenizer_hash(other)}"
    assert refused.stderr.startswith(f"does not fit: tokenizers: must be the same, got {hashes}")
    assert "tokens; token " in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_too_little_memory_and_a_draft_as_large_as_its_target(target: Path) -> None:
    small = galley("check", str(target), str(target), "--memory-gib=0.0001")
    assert small.exit_code == 1
    assert small.stderr == "does not fit: memory: the pair needs 0.00 GiB, got 0.00 GiB\n"
    same = galley("check", str(target), str(target))
    assert same.exit_code == 1
    assert "speed: a draft step costs 1.00 of a target step, so no draft token can pay" in same.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.safetensors", b"\xff" * 8, "its header must be at most 100000000 bytes"),
        ("model.safetensors", b"\x04" + bytes(7) + b"null", "must be readable"),
        ("config.json", b"{}", "KeyError"),
        ("config.json", b'{"auto_map": {}', "must be readable"),
    ],
)
def test_a_broken_file_is_one_line(
    name: str, content: bytes, problem: str, target: Path, tmp_path: Path
) -> None:
    broken = save_random(CONFIGS["llama"](), tmp_path / "broken")
    (broken / name).write_bytes(content)
    refused = galley("check", str(target), str(broken))
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {broken}: config.json and weights must be readable: ")
    assert problem in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_model_with_the_field_names_of_gpt2_is_read(tmp_path: Path) -> None:
    model = str(save_random(CONFIGS["gpt2"](), tmp_path / "gpt2"))
    told = facts(model, model, "--dtype=float32")
    # 3 layers of 64 numbers, keys and values, in 4 bytes.
    assert told["models"][0]["kv_bytes_per_token"] == 2 * 3 * 64 * 4
    assert told["needed_bytes"] > 2 * 1024 * told["models"][0]["kv_bytes_per_token"]


def test_a_composite_model_is_refused_by_its_reason(target: Path, tmp_path: Path) -> None:
    composite = save_random(CONFIGS["llama"](), tmp_path / "composite")
    (composite / "config.json").write_text('{"model_type": "llava", "text_config": {"hidden_size": 64}}')
    refused = galley("check", str(target), str(composite))
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: llava: must be a text-only language model")


def test_a_draft_must_be_named_for_a_target_of_ones_own(target: Path) -> None:
    refused = galley("check", str(target))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: DRAFT: must be given: Galley brings a draft for its own target")


def test_of_a_model_of_the_hub_only_the_header_is_read(target: Path, tmp_path: Path) -> None:
    draft = draft_of(target).save(tmp_path / "draft")
    with hub.serving(target) as served:
        ended = subprocess.run(
            [sys.executable, "-m", "galley.cli", "check", hub.MODEL, str(draft), "--json"],
            env=served.environment(tmp_path / "hf"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    told, local = json.loads(ended.stdout), facts(str(target), str(draft))
    assert told["models"][0] | {"name": ""} == local["models"][0] | {"name": ""}
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert 0 < served.bytes_of_weights < 200_000
