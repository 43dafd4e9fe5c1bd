"""Which tokens of an answer count, how fast they came, and how a goal is judged."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness import at_least, at_most
from galley.bench.answers import LOOP_GRAM, Answer, loop_start
from galley.bench.summary import Interval
from galley.bench.workloads import FIXED_SETS, fixed_workload


@pytest.mark.parametrize("name", FIXED_SETS)
def test_a_set_has_enough_prompts_all_different(name: str) -> None:
    prompts = fixed_workload(name).prompts
    assert len(prompts) >= 24
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert all(prompt.text.strip() for prompt in prompts)


def test_the_prompts_are_those_that_the_readme_names() -> None:
    readme = (files("galley.bench") / "prompts" / "README.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"`(\w+)\.jsonl` \| `([0-9a-f]{64})`", readme))
    assert named == {name: fixed_workload(name).sha256 for name in FIXED_SETS}


def test_an_answer_without_a_loop_counts_whole() -> None:
    assert loop_start(list(range(100))) == 100
    assert loop_start([]) == 0


def test_an_eight_gram_seen_twice_is_no_loop() -> None:
    gram = list(range(LOOP_GRAM))
    assert loop_start([*gram, 99, *gram, 98]) == 18


def test_a_loop_begins_where_its_gram_came_again() -> None:
    gram = list(range(LOOP_GRAM))
    assert loop_start([50, 51, *gram, 99, *gram, 98, *gram]) == 2 + LOOP_GRAM + 1


def test_one_token_over_and_over_is_a_loop() -> None:
    assert loop_start([7] * 9) == 9
    assert loop_start([1, 2, *[7] * 10]) == 3


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_counted_part_has_no_loop_and_the_answer_has_one_if_cut(tokens: list[int]) -> None:
    cut = loop_start(tokens)
    assert loop_start(tokens[:cut]) == cut
    grams = [tuple(tokens[at : at + LOOP_GRAM]) for at in range(len(tokens) - LOOP_GRAM + 1)]
    assert (cut < len(tokens)) == any(grams.count(gram) >= 3 for gram in grams)


def answer(tokens: list[int], token_s: float = 0.5) -> Answer:
    at_s = tuple(token_s * (at + 1) for at in range(len(tokens)))
    return Answer(tuple(tokens), at_s, wall_s=token_s * len(tokens))


def test_time_ends_with_the_last_counted_token() -> None:
    looping = answer([1, 2, *[7] * 18])
    assert (looping.counted, looping.counted_s) == (3, 1.5)


@pytest.mark.parametrize(
    ("median", "low", "met"),
    [(2.1, 2.0, True), (2.0, 1.93, True), (2.1, 1.91, False), (1.99, 1.98, False)],
)
def test_at_least(*, median: float, low: float, met: bool) -> None:
    assert at_least("g", "speed", Interval(median, low, 3.0, 7), 2.0).met is met


@pytest.mark.parametrize(
    ("median", "high", "met"), [(2.9, 3.0, True), (3.0, 3.11, True), (2.9, 3.2, False), (3.01, 3.02, False)]
)
def test_at_most(*, median: float, high: float, met: bool) -> None:
    assert at_most("g", "cost", Interval(median, 1.0, high, 7), 3.0).met is met
