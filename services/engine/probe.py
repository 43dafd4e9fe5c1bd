"""What a model is asked once it is loaded: is our attention the model's own, and does it keep its bits?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from services.engine import attention
from services.engine.batch import Rows
from services.engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

    from services.engine.model import CausalModel

PROBE_TOKENS = 24
# Of the logits' norm: the model's own attention rounds differently (SmolLM2-135M in bfloat16: by 5 %).
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_CUTS = (1, 2, 3, 8, 13)


def probe_prompt(model: CausalModel) -> list[int]:
    """Token ids 0, 1, 2, ... modulo the vocabulary."""
    length = min(PROBE_TOKENS, model.info.context_window)
    return [index % model.info.vocab_size for index in range(length)]


def probe_logits(model: CausalModel) -> Tensor:
    """The logits at every position of the probe prompt: float32 [tokens, vocab_size]."""
    prompt = probe_prompt(model)
    return model.forward([Rows(model.new_cache(), prompt, len(prompt))])[0]


@torch.inference_mode()
def refuse_other_attention(model: CausalModel, module: Any) -> None:
    """Raise UnsupportedModel if `module` with its own eager attention says something else than we do."""
    ours = probe_logits(model)
    module.set_attn_implementation("eager")
    tokens = torch.tensor([probe_prompt(model)], device=ours.device)
    theirs = module(input_ids=tokens, use_cache=False).logits[0].float()
    module.set_attn_implementation(attention.NAME)
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= _TOLERANCE[module.dtype]:
        raise UnsupportedModel(
            f"{module.config.model_type}: its attention is not the one served here (logits {error:.1%} apart)"
        )


def keeps_bits(model: CausalModel) -> bool:
    """Does cutting the probe prompt, or giving it company, leave every bit of its logits?"""
    whole = probe_logits(model)
    prompt = probe_prompt(model)
    cache, company = model.new_cache(), model.new_cache()
    edges = [0, *(cut for cut in _CUTS if cut < len(prompt)), len(prompt)]
    parts = []
    for first, last in pairwise(edges):
        mine = Rows(cache, prompt[first:last], last - first)
        other = Rows(company, prompt[: last - first], 1)
        parts.append(model.forward([other, mine] if first % 2 else [mine])[first % 2])
    return torch.equal(torch.cat(parts), whole)
