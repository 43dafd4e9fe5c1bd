"""Logprobs of completions: by text, as OpenAI's older API has them."""

from __future__ import annotations

from galley.core.records import PositionLogprobs
from services.gateway.http.api.logprobs import completion_logprobs

BYTES = [b"a", b"b", b"\xf0\x9f", b"\xe4"]


def test_the_token_is_always_among_the_likeliest_and_no_text_hides_a_likelier_one() -> None:
    at = [
        PositionLogprobs(-4.0, ((2, -0.5), (3, -2.0))),
        PositionLogprobs(-0.5, ((0, -0.5), (1, -1.0))),
        PositionLogprobs(-4.0, ((2, -0.5), (1, -2.0))),
        PositionLogprobs(-4.0),
    ]
    entries = completion_logprobs([0, 0, 3, 1], at, BYTES.__getitem__)
    assert entries["top_logprobs"] == [
        {"\ufffd": -0.5, "a": -4.0},
        {"a": -0.5, "b": -1.0},
        {"\ufffd": -0.5, "b": -2.0},
        {"b": -4.0},
    ]
    assert entries["token_logprobs"] == [-4.0, -0.5, -4.0, -4.0]
