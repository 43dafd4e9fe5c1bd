"""Measure how near the two tokens were between which an answer differs, by transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from galley.core.noise import gumbel, words


class Scores:
    def __init__(self, model_dir: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)  # nosec B615  # a directory
        self._model = model.eval()

    def gap(self, prefix: Sequence[int], pair: tuple[int, int], temperature: float, seed: int) -> float:
        """Return how far apart the scores of two tokens after `prefix` are, in logits, noise included."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(prefix)])).logits[0, -1, list(pair)].double().numpy()
        noise = gumbel(words(seed, len(prefix), pair)) if temperature else 0.0
        first, second = logits + temperature * noise
        return abs(float(first - second))
