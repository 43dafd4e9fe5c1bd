"""Probe a loaded model: is our attention the model's own, and does it keep its bits?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine import attention
from galley.engine.batch import ModelInfo, Rows, SessionCache
from galley.engine.errors import UnsupportedModel

# Two and a half blocks.
PROBE_TOKENS = 80
# Blocks that the probes need at once: a prompt and another sequence beside it.
BLOCKS = 2 * -(-PROBE_TOKENS // BLOCK_TOKENS)
# Relative to the norm of the logits: eager attention rounds differently (SmolLM2-135M in bfloat16: 5 %).
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_STRIDE = 7919
_CUTS = (1, 2, 3, 8, 13, 32, 37, 70)


class Probed(Protocol):
    """The part of `galley.engine.model.CausalModel` that the probes use."""

    @property
    def info(self) -> ModelInfo: ...

    def new_cache(self) -> SessionCache: ...

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]: ...


def prompt_of(info: ModelInfo) -> list[int]:
    """Return the probe prompt: token ids from all over the vocabulary, always the same.

    Leaves out the first ids, which round badly in bfloat16, and the last, which may be padding.
    """
    length = min(PROBE_TOKENS, info.context_window)
    return [_STRIDE * (index + 1) % (info.vocab_size // 2) for index in range(length)]


def probe_logits(model: Probed) -> Tensor:
    prompt = prompt_of(model.info)
    return model.forward([Rows(model.new_cache(), prompt, len(prompt))])[0]


@torch.inference_mode()
def eager_logits(module: Any, prompt: list[int]) -> Tensor:
    """Return float32 [tokens, vocab_size] of transformers with the model's own eager attention."""
    module.set_attn_implementation("eager")
    tokens = torch.tensor([prompt], device=module.device)
    logits: Tensor = module(input_ids=tokens, use_cache=False).logits[0].float()
    module.set_attn_implementation(attention.NAME)
    return logits


def refuse_other_attention(name: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel if `ours` and `theirs` differ by more than rounding on the probe prompt."""
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= _TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"{name}: its attention differs from the one served here (logits {error:.1%} apart)"
        )


def keeps_bits(model: Probed, whole: Tensor) -> bool:
    """Return True if splitting the probe prompt, or batching it, leaves every bit of `whole`, its logits."""
    prompt = prompt_of(model.info)
    cache, other_cache = model.new_cache(), model.new_cache()
    edges = [0, *(cut for cut in _CUTS if cut < len(prompt)), len(prompt)]
    parts = []
    for first, last in pairwise(edges):
        mine = Rows(cache, prompt[first:last], last - first)
        other = Rows(other_cache, prompt[: last - first], 1)
        other_cache.truncate(0)
        parts.append(model.forward([other, mine] if first % 2 else [mine])[first % 2])
    return torch.equal(torch.cat(parts), whole)
