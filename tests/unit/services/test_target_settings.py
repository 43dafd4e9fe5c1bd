"""What a target refuses of its engine's settings, before anything loads."""

from __future__ import annotations

import pytest

from galley.common.config.settings import parse_settings
from services.target.settings import TargetSettings


def parse(*argv: str) -> TargetSettings:
    return parse_settings(TargetSettings, argv, "target", "")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--engine=sglang"], "GALLEY_TARGET_ENGINE): must be 'paged' or 'vllm'"),
        (["--vllm-args={}"], "--vllm-args: must be empty with --engine paged"),
        (["--lora-adapters=sql=/a"], "--lora-adapters: must be empty with --engine paged, got sql=/a"),
        (["--engine=vllm", "--lora-adapters=sql"], "--lora-adapters: must be NAME=DIRECTORY, got 'sql'"),
        (["--engine=vllm", "--vllm-args={"], "--vllm-args: must be a JSON object: Expecting property name"),
        (["--engine=vllm", "--vllm-args=[1]"], "--vllm-args: must be a JSON object, got [1]"),
        (["--engine=vllm", '--vllm-args={"seed": NaN}'], "of finite numbers, got NaN"),
        (["--engine=vllm", '--vllm-args={"seed": 1, "seed": 2}'], "each name once, got 'seed' several times"),
        (["--engine=vllm", '--vllm-args={"a": {"b": 1, "b": 1}}'], "each name once, got 'b' several times"),
        (
            ["--engine=vllm", "--hosts=2", "--tensor-parallel=2"],
            "--hosts: must be 1 with --engine vllm, got 2",
        ),
        (
            ["--engine=vllm", "--quantization=int8"],
            "must be none with --engine vllm, got int8; name that of vLLM in",
        ),
        (["--engine=vllm", "--invariant"], "--invariant: must be false with --engine vllm"),
        (["--engine=vllm", "--max-itl-ms=50"], "--max-itl-ms: must be left out with --engine vllm, got 50"),
        (["--threads=many"], "GALLEY_TARGET_THREADS): must be an integer"),
        (["--max-itl-ms=-1"], "must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    assert problem in capsys.readouterr().err


def test_arguments_of_vllm_are_a_json_object() -> None:
    assert parse("--engine=vllm").vllm_arguments == {}
    settings = parse("--engine=vllm", '--vllm-args={"quantization": "fp8", "hf_overrides": {"a": [1]}}')
    assert settings.vllm_arguments == {"quantization": "fp8", "hf_overrides": {"a": [1]}}


@pytest.mark.parametrize(
    ("argv", "threads"),
    [
        ([], 1),
        (["--threads=3"], 3),
        (["--threads=auto"], 12),
        (["--threads=0"], 12),
        (["--threads=auto", "--tensor-parallel=3"], 4),
        (["--threads=auto", "--tensor-parallel=6", "--hosts=2", "--ranks-address=a:1"], 4),
        (["--threads=auto", "--tensor-parallel=16"], 1),
    ],
)
def test_auto_threads_are_the_cores_of_each_rank(
    argv: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("services.target.settings", "galley.common.registry.registration"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: 12)
    assert parse(*argv).thread_count == threads


def test_auto_threads_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_TARGET_THREADS", "auto")
    monkeypatch.setattr("services.target.settings.usable_cores", lambda: 7)
    assert parse().thread_count == 7


def test_galleys_own_engine_is_the_default() -> None:
    assert parse().engine == "paged"
