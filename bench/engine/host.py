"""Measure what a step costs on the host beside arithmetic.

Sixteen sessions decode plainly, over a model with as many layers as the default one but so narrow that its
arithmetic is small. `pass` is the time of a whole step (plan, the engine's own Python, sampling, conclude,
responses). `python` is the same with the layers' products and compiled loops replaced by functions that do
nothing, so that only Python and its calls are left. `outside` is the part of `python` outside the engine:
scheduler and responses.
"""

# ruff: noqa: SLF001  # there is no seam for leaving the arithmetic out

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers.engine_alone import FREE_ROWS, EngineAlone
from galley.bench.summary import percentile
from galley.engine.cpu.kernels.compile import Kernels
from galley.engine.cpu.threaded import ThreadedForward
from galley.engine.model import MAX_ROWS, CausalModel
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits

SESSIONS = 16
# Attention over more would be arithmetic again.
CONTEXT = 16
_VOCAB = 512
_HIDDEN = 64
_PRODUCTS = ("qkv", "output", "gate_up", "down")
_BLOCKS = 512
_PASSES = 40


def host_time(layers: int, pairs: int) -> dict[str, Any]:
    """Return the seconds of a step by part: the median of each of `pairs` runs."""
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as scratch:
        model = narrow_model(Path(scratch), layers)
    run_steps_whole(model)
    whole, _ = _passes(model, pairs)
    take_arithmetic_out(model)
    python, outside = _passes(model, pairs)
    return {"sessions": SESSIONS, "pass": whole, "python": python, "outside": outside}


def _passes(model: CausalModel, runs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a step, whole and outside the engine: the median of each run."""
    whole, outside = [], []
    for run in range(runs):
        limits = Limits(max_sessions=2 * SESSIONS)
        engine = EngineAlone(PagedEngine(model, "bench").serve(FREE_ROWS, limits), ())
        for session in range(SESSIONS):
            prompt = [(7 * session + 3 * at + run) % (_VOCAB - 2) + 2 for at in range(CONTEXT)]
            engine.add(prompt, 4 * _PASSES, 0.0, 0)
        while engine.unheard:
            engine.step()
        times = [engine.step() for _ in range(_PASSES)]
        whole.append(percentile([one.whole_s for one in times], 50))
        outside.append(percentile([one.whole_s - one.engine_s for one in times], 50))
    return whole, outside


def run_steps_whole(model: CausalModel) -> None:
    """Run each step in one piece: with several threads, sessions may be shared out among them."""
    if isinstance(model._forward, ThreadedForward):
        model._forward = model._forward._whole


def take_arithmetic_out(model: CausalModel) -> None:
    """Replace the layers' products and compiled loops by functions that do nothing; answers mean nothing."""
    forward: Any = model._forward
    forward._layers = [
        replace(layer, **{name: _idle(getattr(layer, name)) for name in _PRODUCTS})
        for layer in forward._layers
    ]
    nothing = Kernels(**{field.name: lambda *_: None for field in fields(Kernels)})
    forward._kernels = forward.attention._kernels = nothing


def _idle(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    with torch.inference_mode():
        out = product(torch.zeros(MAX_ROWS, _HIDDEN, dtype=torch.bfloat16))
    return lambda rows: out[: len(rows)]


def narrow_model(directory: Path, layers: int) -> CausalModel:
    """Return a Llama of random weights, two heads wide."""
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    words = {f"w{token}": token for token in range(_VOCAB)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return CausalModel.load(directory, dtype=torch.bfloat16, device="cpu", kv_blocks=_BLOCKS)
