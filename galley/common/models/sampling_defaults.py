"""The sampling that a model's own generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from galley.core.sampling_params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling in a generation_config.json, as vLLM reads it: `do_sample` is ignored.

    Raise InvalidField if a value is out of bounds.
    """
    values = {name: config[name] for name in _NAMES if _is_number(config.get(name))}
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))
    SamplingParams(**values).validate(vocab_size=0)
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
