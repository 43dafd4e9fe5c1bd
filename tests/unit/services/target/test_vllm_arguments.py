"""The arguments that vLLM's engine gets: settings first, then `--vllm-args`, then what Galley needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from galley.core.errors import UnsupportedModel
from services.target.engine.vllm.adapters import Adapters
from services.target.engine.vllm.arguments import check_version, engine_arguments, refuse_unknown
from services.target.settings import TargetSettings

DIRECTORY = Path("/models/m")


def arguments(**given: object) -> dict[str, object]:
    return engine_arguments(TargetSettings(kv_memory_mb=3, max_sessions=5), DIRECTORY, given)


def test_settings_are_passed_and_vllm_args_go_before_them() -> None:
    assert arguments()["kv_cache_memory_bytes"] == 3 * 2**20
    assert arguments()["max_num_seqs"] == 5
    assert arguments(max_num_seqs=7, quantization="fp8") | {"max_num_seqs": 7, "quantization": "fp8"} == (
        arguments(max_num_seqs=7, quantization="fp8")
    )


def test_the_head_is_float32_unless_another_is_given() -> None:
    assert arguments()["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments(hf_overrides={"rope_theta": 1.0})["hf_overrides"] == {
        "head_dtype": "float32",
        "rope_theta": 1.0,
    }
    assert arguments(hf_overrides={"head_dtype": "model"})["hf_overrides"] == {"head_dtype": "model"}


@pytest.mark.parametrize(
    "name",
    [
        "max_loras",
        "generation_config",
        "model",
        "runner",
        "scheduler_cls",
        "speculative_config",
        "worker_extension_cls",
    ],
)
def test_what_galley_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^vllm_args\.{name}: must not be set"):
        arguments(**{name: "other"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 2}, r"^vllm_args\.data_parallel_size: must be 1"),
        ({"pipeline_parallel_size": 2}, r"^vllm_args\.pipeline_parallel_size: must be 1"),
        ({"hf_overrides": "float32"}, r"^vllm_args\.hf_overrides: must be an object, got 'float32'$"),
    ],
)
def test_bad_values_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(**given)


def test_all_sequences_with_all_drafts_fit_into_a_step_with_adapters() -> None:
    settings = TargetSettings(max_sessions=40, max_rows=256, max_draft_tokens=7)
    adapted = engine_arguments(settings, DIRECTORY, {}, Adapters({"sql": DIRECTORY}, rank=8))
    plain = engine_arguments(settings, DIRECTORY, {})
    assert (plain["max_num_batched_tokens"], adapted["max_num_batched_tokens"]) == (256, 40 * 8)
    assert (adapted["enable_lora"], adapted["max_loras"], adapted["max_lora_rank"]) == (True, 2, 8)


def test_unknown_names_are_refused() -> None:
    refuse_unknown({"dtype": "float32"}, frozenset({"dtype"}))
    with pytest.raises(ValueError, match=r"^vllm_args\.dtpye: must be an argument of vLLM's engine"):
        refuse_unknown({"dtpye": "float32"}, frozenset({"dtype"}))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.2rc1.dev3"])
def test_known_versions_are_admitted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev", "0.3"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"^vllm: must be of version 0\.32\.x, got "):
        check_version(version)
