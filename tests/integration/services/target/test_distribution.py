"""Tokens of a whole engine follow the model's distribution, whatever the draft.

The logits of the model here are the same after every token, those of TARGET, so that tokens are independent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.tiny_model import VLLM_HEAD_SIZE, VOCAB, random_llama, save
from tests.integration.galley.engine.test_distribution import (
    DRAFT,
    TARGET,
    Draws,
    check_distribution,
    check_match_rate,
    gumbel_argmax,
)

SEEDS, LENGTH = 120, 100
TOGETHER = 32
# Of draft tokens a step: 0 to 4.
DRAFT_LENGTHS = 5
_PROMPT = [20, 30, 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model to which all tokens are one: its hidden states, and so its logits, never change."""
    llama = random_llama(hidden_size=4 * VLLM_HEAD_SIZE, spread=0.4, seed=0)
    llama.config.eos_token_id = llama.generation_config.eos_token_id = VOCAB - 1
    with torch.inference_mode():
        llama.model.embed_tokens.weight[:] = llama.model.embed_tokens.weight[0].clone()
        hidden = llama.model(torch.tensor([_PROMPT])).last_hidden_state[0, -1]
        logits = torch.full((VOCAB,), -40.0)
        logits[: len(TARGET)] = torch.tensor(np.log(TARGET))
        llama.lm_head.weight[:] = logits[:, None] * hidden / hidden.square().sum()
    return save(llama, tmp_path_factory.mktemp("constant"))


@pytest.fixture(scope="module", params=["paged", pytest.param("vllm", marks=pytest.mark.vllm)])
def draws(request: pytest.FixtureRequest, model: Path) -> Draws:
    """Return the tokens of many seeds, each with another number of draft tokens a step."""
    drafts = [
        [_draft(seed, at, seed % DRAFT_LENGTHS) for at in range(len(_PROMPT), len(_PROMPT) + LENGTH)]
        for seed in range(SEEDS)
    ]
    block = {
        "streams": TOGETHER,
        "prompts": [_PROMPT] * SEEDS,
        "max_tokens": [LENGTH] * SEEDS,
        "temperature": 1.0,
        "seed": 0,
        "drafts": drafts,
    }
    answers = _answers(request.param, model, block)
    # Of one draft token in a step it is known that it was compared; of several the later ones may not be.
    counts = (sum(answer[key] for answer in answers[1::DRAFT_LENGTHS]) for key in ("verified", "accepted"))
    return Draws(np.array([answer["tokens"] for answer in answers]), *counts)


def _draft(seed: int, at: int, k: int) -> list[int]:
    tokens: list[int] = gumbel_argmax(DRAFT, seed, np.arange(at, at + k)).tolist() if k else []
    return tokens


def _answers(engine: str, model: Path, block: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer a block of prompts by an engine in a process of its own; vLLM's can be made once in each."""
    flags = ("--model", str(model), "--engine", engine, "--dtype", "float32", "--kv-memory-mb", "64")
    command = (sys.executable, "-m", "bench.peers.peer_galley", *flags)
    done = subprocess.run(
        command, input=json.dumps(block) + "\n", check=True, stdout=subprocess.PIPE, text=True
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["answers"]
    return answers


def test_tokens_follow_the_models_distribution(draws: Draws) -> None:
    check_distribution(draws.tokens)


def test_tokens_are_the_formula_of_seed_and_position(draws: Draws) -> None:
    positions = np.arange(len(_PROMPT), len(_PROMPT) + LENGTH)
    for seed, tokens in enumerate(draws.tokens):
        assert tokens.tolist() == gumbel_argmax(TARGET, seed, positions).tolist()


def test_draft_tokens_are_accepted_as_often_as_the_closed_form_says(draws: Draws) -> None:
    """Daliri, Musco, Suresh (arXiv 2408.07978)."""
    assert draws.verified > SEEDS / DRAFT_LENGTHS * LENGTH / 2
    check_match_rate(draws)
