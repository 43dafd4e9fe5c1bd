"""The sums and goals of `make bench-quantization`, and the answers that it compares."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import quantization
from bench.engine.sides import Case
from bench.quantization import CONTEXT, Quality, Text, answered, goals_of, parse_options, quality

VOCAB, END = 5, 4


class Counting:
    """Stands in for a model: after token t the likeliest is t + 1, with odds of 3 to 1 against each other."""

    info: Any = SimpleNamespace(eos_token_ids=(END,))

    def new_cache(self) -> Any:
        return None

    def forward(self, batch: Sequence[Any]) -> list[torch.Tensor]:
        return [self._logits(item.tokens[-item.want_logits :]) for item in batch]

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(tokens), VOCAB)
        for row, token in enumerate(tokens):
            logits[row, (token + 1) % VOCAB] = math.log(3)
        return logits


MODEL: Any = Counting()


def test_perplexity_is_of_the_words_and_agreement_of_the_answer() -> None:
    found = quality(MODEL, [Text((0, 1, 2), (7, 1), (2, 3)), Text((0, 3), (7, 1), (2, 4))])
    # Two words at 3 of 7 and one at 1 of 7; of four positions one differs, and so does one answer of two.
    assert found.perplexity == pytest.approx(math.exp((2 * math.log(7 / 3) + math.log(7)) / 3))
    assert (found.tokens, found.agreed, found.positions, found.whole, found.answers) == (3, 3, 4, 1, 2)
    assert found.agreement == 0.75


def test_an_answer_ends_with_its_end_token_or_the_longest_allowed() -> None:
    texts = [Text((0, 1), (0, 1)), Text((0, 1), (0, 0))]
    assert [text.answer for text in answered(MODEL, texts, 3)] == [(2, 3, 4), (1, 2, 3)]
    assert answered(MODEL, texts, 4)[1].answer == (1, 2, 3, 4)


def test_a_goal_is_met_by_the_time_without_over_the_time_with() -> None:
    one, many = Case(1, 1, CONTEXT), Case(64, 1, CONTEXT)
    found = {one: {"plain": [1.4] * 7, "int8": [1.0] * 7}, many: {"plain": [1.0] * 7, "int8": [1.0] * 7}}
    missed, met = goals_of(found, "bfloat16")
    assert (missed.measured, missed.bound, missed.met) == ("1.40 [1.40, 1.40]x", ">= 1.5x", False)
    assert met.met


def test_a_part_measured_later_keeps_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Quality(loss=1.0, tokens=2, agreed=3, positions=4, whole=1, answers=1)
    times = {Case(1, 1, CONTEXT): {"plain": (2.0,) * 7, "int8": (1.0,) * 7}}
    monkeypatch.setattr(quantization, "_measure_quality", lambda options: {"float32": found})
    monkeypatch.setattr(quantization, "_measure_speed", lambda options: times)
    for part in ("quality", "speed"):
        assert quantization.main(["--parts", part, "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "quantization.json").read_text())
    assert record["quality"]["arms"]["float32"]["agreement"] == 0.75
    assert record["speed"]["goals"][0]["met"]


@pytest.mark.parametrize("given", [["--parts", "size"], ["--arms", "int4"], ["--pairs", "3"]])
def test_options_that_measure_nothing_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(given)
