"""`make bench-gpu` without a GPU: it says so; what it measures by, on a small model of the CPU."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import gpu
from bench.engine_sides import Case
from galley.engine.model import CausalModel
from tests.engine.configs import CONFIGS, load, save_random, tokens_of


@pytest.fixture
def model(tmp_path: Path) -> CausalModel:
    return load(save_random(CONFIGS["llama"](), tmp_path))


def test_without_a_device_it_measures_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_on_the_cpu_no_token_depends_on_company(model: CausalModel) -> None:
    rng = random.Random(1)
    texts = [tokens_of(rng, 40) for _ in range(5)]
    found = gpu.differing(model, texts, company=3)
    assert [(one.temperature, one.positions, one.differing) for one in found] == [
        (0.0, 200, 0),
        (1.0, 200, 0),
    ]


def test_what_differs_is_counted(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = model.run

    def feels_company(chunks: list[object], *more: object) -> torch.Tensor:
        logits = run(chunks, *more)  # type: ignore[arg-type]  # handed on as it came
        return logits.flip(1) if len(chunks) > 1 else logits

    monkeypatch.setattr(model, "run", feels_company)
    texts = [tokens_of(random.Random(2), 12) for _ in range(2)]
    greedy, _ = gpu.differing(model, texts, company=2)
    assert greedy.differing > 20
    assert greedy.per_million == 1e6 * greedy.differing / 24


def test_each_side_of_a_step_is_timed_and_shown(model: CausalModel) -> None:
    steps = [gpu.step_times({"one": model, "other": model}, Case(2, 3, 40), pairs=2)]
    assert {name: len(times) for name, times in steps[0]["wall_s"].items()} == {"one": 2, "other": 2}
    out = io.StringIO()
    gpu.show(steps, {"one": [gpu.Differing(1.0, 4000, 3)]}, Console(file=out, width=120))
    assert "750.0" in out.getvalue()
