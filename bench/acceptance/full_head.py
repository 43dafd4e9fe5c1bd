"""The shipped draft as a model of transformers, with logits over the whole vocabulary.

A trained draft's head knows some of the target's tokens only (galley/engine/load/draft_directory.py), which
transformers cannot load. Here it is a LlamaForCausalLM whose head spreads its logits over all tokens; those
outside get LEAST, so that they are never proposed. Its products over int8 weights are in bfloat16 here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from galley.engine import attention
from galley.engine.load.draft_directory import draft_format, load_draft

# Finite, for processors of logits that cannot take minus infinity.
LEAST = -1e9


class SpreadHead(nn.Module):
    """Logits over `vocab` tokens, of a head that knows `tokens` [head_vocab], rising, only."""

    def __init__(self, head: nn.Module, tokens: Tensor, vocab: int) -> None:
        super().__init__()
        self.head = head
        self.tokens = tokens
        self.vocab = vocab

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of [..., hidden]."""
        known: Tensor = self.head(hidden)  # [..., head_vocab]
        logits = known.new_full((*known.shape[:-1], self.vocab), LEAST)
        logits[..., self.tokens] = known
        return logits


def load_assistant(draft_dir: Path, target_dir: Path, dtype: torch.dtype) -> Any:
    """Return the draft in `draft_dir` as a causal language model of the target's whole vocabulary.

    An ordinary model is loaded as it is. Raises UnsupportedModel for a trained draft of another target.
    """
    config = AutoConfig.from_pretrained(draft_dir)  # nosec B615  # a directory
    form = draft_format(config)
    if form is None:
        ordinary: Any = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=dtype)  # nosec B615  # a directory
        return ordinary.eval()
    attention.register()  # the draft is made with ours, and given torch's own below
    draft = load_draft(draft_dir, config, form, target=target_dir, dtype=dtype, device="cpu")
    model = draft.module
    model.set_attn_implementation("sdpa")
    model.lm_head = SpreadHead(model.lm_head, draft.tokens, config.vocab_size)
    return model
