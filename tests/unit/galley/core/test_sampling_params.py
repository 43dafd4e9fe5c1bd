"""The bounds of sampling parameters; one token of a vocabulary of 100 is 99."""

from __future__ import annotations

from typing import Any

import pytest

from galley.core.errors import InvalidField
from galley.core.sampling_params import SamplingParams

VOCAB = 100
LEAST = {
    "temperature": 0.0,
    "top_p": 1e-9,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": -2.0,
    "presence_penalty": -2.0,
    "repetition_penalty": 0.01,
    "seed": 0,
    "logit_bias": {0: -100.0},
}
MOST = {
    "top_p": 1.0,
    "min_p": 1.0,
    "frequency_penalty": 2.0,
    "presence_penalty": 2.0,
    "repetition_penalty": 10.0,
    "seed": 2**64 - 1,
    "logit_bias": {99: 100.0},
}


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (0.01, False)])
def test_greedy_is_temperature_zero(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize("values", [LEAST, MOST], ids=["least", "most"])
def test_the_bounds_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values).validate(VOCAB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.01),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("presence_penalty", 2.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.01),
        ("seed", -1),
        ("seed", 2**64),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {VOCAB: 0.0}),
        ("logit_bias", {5: 100.01}),
        ("logit_bias", {5: -100.01}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ],
)
def test_a_value_beyond_its_bound_names_its_field(name: str, value: object) -> None:
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]  # the test's own
    with pytest.raises(InvalidField, match=f"sampling.{name}"):
        params.validate(VOCAB)
