"""What a pass costs on the host beside arithmetic.

Measured is a whole pass (plan, the engine's own Python, sampling, conclude, answers) of sixteen sessions
that decode plainly, over a model with as many layers as the default one but so narrow that its arithmetic
is all but nothing. So it counts every Python statement, every dispatch into torch and every call of a
compiled kernel: an upper bound of the host's work. `outside` is the part outside the engine: scheduler and
answers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engine_alone import EngineAlone
from bench.stats import percentile
from services.core.kv_table import KvTable
from services.engine.model import CausalModel
from services.target.paged_engine import PagedEngine

SESSIONS = 16
CONTEXT = 256
_VOCAB = 512
_BLOCKS = 512
_PASSES = 40


def host_time(layers: int, pairs: int) -> dict[str, Any]:
    """Seconds of a pass, median of each of `pairs` runs of passes: whole, and outside the engine."""
    whole, outside = [], []
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as scratch:
        model = narrow_model(Path(scratch), layers)
    for run in range(pairs):
        engine = EngineAlone(
            PagedEngine(model, "bench"), KvTable(model.kv.blocks, model.kv.block_tokens, 2 * SESSIONS), ()
        )
        for session in range(SESSIONS):
            prompt = [(7 * session + 3 * at + run) % (_VOCAB - 2) + 2 for at in range(CONTEXT)]
            engine.ask(prompt, 4 * _PASSES, 0.0, 0)
        while engine.unheard:
            engine.step()
        times = [engine.step() for _ in range(_PASSES)]
        whole.append(percentile([one.whole_s for one in times], 50))
        outside.append(percentile([one.whole_s - one.engine_s for one in times], 50))
    return {"sessions": SESSIONS, "pass": whole, "outside": outside}


def narrow_model(directory: Path, layers: int) -> CausalModel:
    """A Llama of random weights, two heads wide."""
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=64,
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
