"""vLLM's core with the default model: the tokens of a plain forward pass, and what a start finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from galley.common.models.files import DEFAULT_MODEL
from galley.core.sampling_params import SamplingParams
from tests.fakes.core_runs import PROPOSALS, Reference, continue_all, sequence_of
from tests.integration.services.target.vllm.conftest import MARKS, started_core

pytestmark = [*MARKS, pytest.mark.model, pytest.mark.proof]

COUNT = 12
PROMPT_TOKENS = (504, 3575, 282, 4649, 314, 253, 1789, 351, 260, 2090, 28)


def test_tokens_do_not_depend_on_drafts(default_model_dir: Path) -> None:
    reference = Reference(default_model_dir)
    sequences = [
        sequence_of("warm", PROMPT_TOKENS[:7], SamplingParams(temperature=0.8, seed=4)),
        sequence_of("penalized", PROMPT_TOKENS[2:], SamplingParams(0.7, repetition_penalty=1.2, seed=5)),
    ]
    truths = {one.id: reference.continue_(one.draw, COUNT).tokens for one in sequences}
    with started_core(DEFAULT_MODEL, max_model_len=256) as core:
        for arm, propose in PROPOSALS.items():
            made = continue_all(core, sequences, COUNT, propose, truths)
            assert {name: run.tokens for name, run in made.items()} == truths, arm
