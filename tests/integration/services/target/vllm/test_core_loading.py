"""A core as a replica loads it: probed, with the name of its build; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.target.settings import TargetSettings
from tests.fakes.core_runs import continue_all, sequence_of
from tests.fakes.tiny_model import load_tiny_model
from tests.integration.services.target.vllm.conftest import BLOCK_TOKENS, MARKS

pytestmark = MARKS


def settings(model: Path, **other: object) -> TargetSettings:
    return TargetSettings.model_validate(
        {"model": str(model), "dtype": "float32", "kv_memory_mb": 8, "max_draft_tokens": 4} | other
    )


def test_a_loaded_core_is_probed_and_names_its_build(poisoned_dir: Path) -> None:
    from galley.engine.fingerprint import build_of  # noqa: PLC0415  # numba must come after vLLM's start
    from services.target.engine.vllm.loading import load_core  # noqa: PLC0415

    core = load_core(settings(poisoned_dir), {"block_size": BLOCK_TOKENS})
    try:
        info = core.info
        paged = build_of(load_tiny_model(poisoned_dir, kv_blocks=8))
        assert info.weights_digest == paged.weights_digest
        assert len(info.fingerprint) == len(paged.fingerprint)
        assert info.fingerprint != paged.fingerprint
        assert (info.dtype, info.device, info.ranks, info.vocab_size) == ("float32", "cpu", 1, 128)
        assert core.max_draft_tokens == 4
        # The probe leaves nothing behind.
        facts = core.facts()
        assert (facts.used_blocks, list(facts.events)) == (0, [])
        assert (
            continue_all(core, [sequence_of("probe-plain-0", list(range(70)))], 2)["probe-plain-0"]
            .steps[0]
            .cached
            == 0
        )
    finally:
        core.close()


@pytest.mark.parametrize(
    ("given", "other", "message"),
    [
        ({"dtpye": "float32"}, {}, r"^vllm_args\.dtpye: must be an argument of vLLM's engine"),
        ({"speculative_config": {}}, {}, r"^vllm_args\.speculative_config: must not be set"),
        ({}, {"device": "cuda:0"}, r"^device: must be cpu with this build of vLLM, got cuda:0$"),
        ({}, {"device": "cpu:1"}, r"^device: must be cpu .*, got cpu:1; choose the GPU by CUDA_VISIBLE"),
    ],
)
def test_what_vllm_could_not_serve_is_refused_before_it_starts(
    poisoned_dir: Path, given: dict[str, object], other: dict[str, object], message: str
) -> None:
    from services.target.engine.vllm.loading import load_core  # noqa: PLC0415

    with pytest.raises(ValueError, match=message):
        load_core(settings(poisoned_dir, **other), given)
