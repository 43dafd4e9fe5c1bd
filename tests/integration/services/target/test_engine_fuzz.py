"""The short form of `make prove-engine`: fixed seeds, the same checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from galley.engine.model import CausalModel
from tests.fakes.truncated_model import truncate_model
from tests.integration.services.target.fuzz import SMALL, PagedWorld, load_pair, save_small_model
from tests.integration.services.target.invariance import InvarianceTrial

STEPS = 400


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, CausalModel]:
    return load_pair(save_small_model(tmp_path_factory.mktemp("small")), SMALL)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_response_equals_that_of_a_fresh_run(
    small_pair: tuple[CausalModel, CausalModel], seed: int
) -> None:
    world = PagedWorld(*small_pair, SMALL, seed)
    world.play(STEPS)
    counts = world.counts
    assert counts.passes > STEPS / 3
    assert counts.tokens_checked > STEPS / 2
    assert counts.accepted > 0
    for what in (
        "Miss",
        "Superseded",
        "cancelled",
        "extended",
        "Confirmed",
        "failed passes",
        "trees",
        "moved tokens",
        "states",
    ):
        assert counts.happened[what] > 0, counts


@pytest.fixture(scope="module")
def shallow_model(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return truncate_model(default_model_dir, [0, 14, 29], tmp_path_factory.mktemp("models") / "shallow")


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_of_the_default_models_shapes_keep_their_bits_in_any_batch(
    shallow_model: Path, dtype: torch.dtype
) -> None:
    model = CausalModel.load(shallow_model, dtype=dtype, device="cpu", threads=1, kv_blocks=64)
    assert model.info.deterministic
    counts = InvarianceTrial(model, sequences=3, longest=100, seed=5).run(12)
    assert counts.differing == 0, counts.first_difference
    assert min(counts.rows, counts.states) > 100
    assert counts.evictions > 0
