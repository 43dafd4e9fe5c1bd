"""Sampling parameters and their bounds, validated once, where a request arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from galley.core.errors import InvalidField, check_length, check_range

MAX_SEED = 2**64 - 1
MAX_PENALTY = 2.0
# A logit divided by less could overflow to infinity. 0.01 in the wire's 32 bits, which is less than 0.01.
MIN_REPETITION_PENALTY = 0.009999999
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
    def is_greedy(self) -> bool:
        """Return True at temperature 0: the same code, without noise."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidField if a value is out of bounds."""
        check_range("sampling.temperature", self.temperature, least=0)
        check_range("sampling.top_p", self.top_p, above=0, most=1)
        check_range("sampling.min_p", self.min_p, least=0, most=1)
        check_range("sampling.top_k", self.top_k, least=0)
        check_range(
            "sampling.frequency_penalty", self.frequency_penalty, least=-MAX_PENALTY, most=MAX_PENALTY
        )
        check_range("sampling.presence_penalty", self.presence_penalty, least=-MAX_PENALTY, most=MAX_PENALTY)
        check_range(
            "sampling.repetition_penalty",
            self.repetition_penalty,
            least=MIN_REPETITION_PENALTY,
            most=MAX_REPETITION_PENALTY,
        )
        check_range("sampling.seed", self.seed, least=0, most=MAX_SEED)
        check_length("sampling.logit_bias", self.logit_bias, MAX_LOGIT_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            name = f"sampling.logit_bias[{token}]"
            if not 0 <= token < vocab_size:
                raise InvalidField(name, f"token id must be in [0, {vocab_size}), got {token}")
            check_range(name, bias, least=-MAX_LOGIT_BIAS, most=MAX_LOGIT_BIAS)
