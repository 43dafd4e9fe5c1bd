"""The sampling and the length of answers that a model's own generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from galley.core.errors import InvalidField
from galley.core.sampling_params import SamplingParams

RECOMMENDED_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Recommended(NamedTuple):
    """The fields of SamplingParams that are set, and the most output tokens; None: not set."""

    sampling: Mapping[str, Any]
    max_tokens: int | None


def recommended(config: Mapping[str, Any]) -> Recommended:
    """Return what a generation_config.json recommends, as vLLM reads it: `do_sample` is ignored.

    Raise InvalidField if a value is out of bounds.
    """
    values = {name: config[name] for name in RECOMMENDED_SAMPLING if _is_number(config.get(name))}
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))
    SamplingParams(**values).validate(vocab_size=0)
    most = config.get("max_new_tokens")
    if most is not None and not (type(most) is int and most >= 1):
        raise InvalidField("max_new_tokens", f"must be an integer >= 1, got {str(most)[:32]!r}")
    return Recommended(values, most)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
