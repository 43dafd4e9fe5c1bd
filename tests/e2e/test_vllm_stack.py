"""A stack whose target runs its model in vLLM, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from galley.client.client import AsyncClient
from galley.client.options import Speculation
from galley.core.names import NGRAM
from galley.stack.parts import find_vllm_python
from galley.stack.stack import Stack, StackOptions
from tests.fakes.tiny_model import VLLM_HEAD_SIZE, greedy, save_tiny_model

PROMPT, COUNT = [5, 9, 2, 33, 5, 9], 40


@pytest.fixture
def vllm_python() -> str:
    try:
        return find_vllm_python(None)
    except ValueError:
        pytest.skip("vLLM is not installed")


async def test_answers_are_the_same_with_and_without_speculation(vllm_python: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", head_size=VLLM_HEAD_SIZE)
    options = StackOptions(
        model=str(model),
        draft_model="none",
        strategy=NGRAM,
        dtype="float32",
        engine="vllm",
        vllm_args='{"block_size": 32}',
        target_python=vllm_python,
    )
    async with Stack(options) as stack, AsyncClient(stack.address("gateway")) as client:
        for temperature in (0.0, 0.8):
            off, drafted = [
                await client.generate(
                    PROMPT,
                    max_tokens=COUNT,
                    temperature=temperature,
                    seed=7,
                    ignore_eos=True,
                    speculation=speculation,
                )
                for speculation in ("off", Speculation(k=4, strategy=NGRAM))
            ]
            assert off.tokens == drafted.tokens
            assert len(off.tokens) == COUNT
            if not temperature:
                assert list(off.tokens) == greedy(model, PROMPT, COUNT)
