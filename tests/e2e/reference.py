"""transformers' own greedy decoding: what the stream must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-4
"""A difference is excused only where the reference's two best logits lie closer than this."""


class Reference:
    """The default model in float32, by transformers alone."""

    def __init__(self, directory: Path) -> None:
        self._model = cast("Any", AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
        self._model.eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """`generate` without sampling, end token included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=self._model.config.eos_token_id,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def gap_at(self, prefix: Sequence[int]) -> float:
        """The distance of the two best logits after `prefix`."""
        with torch.inference_mode():
            best = self._model(torch.tensor([list(prefix)])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    def excuse(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> str:
        """Empty if the answers are the same, words for a near tie; raises AssertionError otherwise."""
        if list(ours) == list(theirs):
            return ""
        at = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        gap = self.gap_at([*prompt, *theirs[:at]])
        if gap > TIE:
            raise AssertionError(f"token {at} differs and is no tie (gap {gap:.2e}): {ours} is not {theirs}")
        return f"token {at} differs at a tie of {gap:.2e}"
