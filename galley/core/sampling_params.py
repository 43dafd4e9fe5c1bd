"""Sampling parameters and their bounds, validated once, where a request arrives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from galley.core.errors import InvalidField

MAX_SEED = 2**64 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that turn logits into tokens; names and order of application as in the proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True at temperature 0: the same code, without noise."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidField if a value is out of bounds."""
        _check("sampling.temperature", self.temperature, low=0.0)
        _check("sampling.top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check("sampling.min_p", self.min_p, low=0.0, high=1.0)
        _check("sampling.top_k", self.top_k, low=0)
        _check("sampling.frequency_penalty", self.frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
        _check("sampling.presence_penalty", self.presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
        _check(
            "sampling.repetition_penalty",
            self.repetition_penalty,
            low=0.0,
            high=MAX_REPETITION_PENALTY,
            open_low=True,
        )
        _check("sampling.seed", self.seed, low=0, high=MAX_SEED)
        _check("sampling.logit_bias", len(self.logit_bias), high=MAX_LOGIT_BIAS_ENTRIES, what="entries")
        for token, bias in self.logit_bias.items():
            name = f"sampling.logit_bias[{token}]"
            if not 0 <= token < vocab_size:
                raise InvalidField(name, f"token id must be in [0, {vocab_size}), got {token}")
            _check(name, bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)


def _check(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    what: str = "",
) -> None:
    inside = low < value <= high if open_low else low <= value <= high
    if not math.isfinite(value) or not inside:
        raise InvalidField(
            name, f"must be {_interval(low, high, open_low=open_low)}, got {value} {what}".rstrip()
        )


def _interval(low: float, high: float, *, open_low: bool) -> str:
    if math.isinf(high):
        return f"finite and {'>' if open_low else '>='} {low:g}"
    if math.isinf(low):
        return f"<= {high:g}"
    return f"in {'(' if open_low else '['}{low:g}, {high:g}]"
