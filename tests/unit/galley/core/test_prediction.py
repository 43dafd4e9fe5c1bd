"""The place of an answer in its prediction: through edits, repetitions and texts that cost most to search."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.answer.answer import result_of
from galley.core.lookup.calibration import Calibration
from galley.core.lookup.prediction import (
    PRIOR,
    PredictionLookup,
    counting,
    prediction_calibration,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)
FEW = settings(max_examples=150)
TEXT = """
def area ( self ) :
    width = self . width
    height = self . height
    return width * height
def edge ( self ) :
    width = self . width
    height = self . height
    return 2 * ( width + height )
"""
CODE = TEXT.split()
WORDS = {word: token for token, word in enumerate(dict.fromkeys(CODE))}


def counted(prediction: list[int], output: list[int]) -> tuple[int, int]:
    return result_of(counting(prediction, output))


def ids(words: list[str]) -> list[int]:
    return [WORDS.setdefault(word, len(WORDS)) for word in words]


def lookup(prediction: list[int]) -> PredictionLookup:
    return PredictionLookup(prediction, prediction_calibration())


def proposed(prediction: list[int], output: list[int], count: int = 4) -> tuple[int, ...]:
    here = lookup(prediction)
    here.follow(output)
    return here.find((), count)[0]


def right_tokens(prediction: list[int], output: list[int]) -> int:
    here = lookup(prediction)
    here.follow(output)
    return here.accepted


def test_an_answer_that_is_its_prediction_is_proposed_from_the_first_token_to_the_last() -> None:
    prediction = ids(CODE)
    assert proposed(prediction, [], len(CODE)) == tuple(prediction)
    assert right_tokens(prediction, prediction) == len(prediction)
    assert proposed(prediction, prediction) == ()


def edit(change: Callable[[list[str]], object]) -> list[int]:
    words = list(CODE)
    change(words)
    return ids(words)


def test_after_a_replaced_token_the_next_one_is_proposed_at_once() -> None:
    at = CODE.index("area")
    output = edit(lambda words: words.__setitem__(at, "surface"))
    assert proposed(ids(CODE), output[: at + 1]) == tuple(ids(CODE)[at + 1 : at + 5])
    assert right_tokens(ids(CODE), output) == len(CODE) - 1


def test_an_edit_costs_its_own_tokens_and_one_to_find_the_place_again() -> None:
    middle = CODE.index("edge") - 1
    changes: list[tuple[Callable[[list[str]], object], int]] = [
        (lambda words: words.__setitem__(slice(1, 2), ["area", "of", "all"]), 1),  # two are inserted
        (lambda words: words.__delitem__(slice(middle, middle + 5)), 1),  # an inserted line is left out
        (lambda words: words.__setitem__(slice(middle, middle), ["a", "b", "c", "d", "e", "f"]), 1),
        (lambda words: words.insert(0, "Here"), 2),  # the first token finds its place, too
    ]
    for change, lost in changes:
        output = edit(change)
        common = min(len(output), len(CODE))
        assert right_tokens(ids(CODE), output) >= common - 6 - lost


def test_the_place_is_the_next_one_where_the_text_repeats() -> None:
    """The two methods share their first lines, and the first of them is renamed."""
    output = edit(lambda words: words.__setitem__(slice(1, 2), ["the", "surface", "area2"]))
    end = CODE.index("return") + 2
    assert proposed(ids(CODE), output[:end], 20) == tuple(ids(CODE)[end - 2 : end + 18])


def test_a_block_that_has_moved_is_found_by_its_longest_match() -> None:
    half = CODE.index("edge") - 1
    output = ids(CODE[half:] + CODE[:half])
    assert right_tokens(ids(CODE), output) >= len(CODE) - 6


@FEW
@given(TOKENS, TOKENS, TOKENS)
def test_looking_ahead_is_following(prediction: list[int], output: list[int], ahead: list[int]) -> None:
    here, followed = lookup(prediction), lookup(prediction)
    here.follow(output)
    before = here.find((), 8)
    tokens, survival = here.find(ahead, 8)
    assert here.find((), 8) == before, "looking ahead has changed the place"
    followed.follow(output)
    followed.follow(ahead)
    assert followed.find((), 8)[0][: len(tokens)] == tokens[: len(followed.find((), 8)[0])]
    assert list(survival) == sorted(survival, reverse=True)
    assert all(0 < chance <= 1 for chance in survival)


@FEW
@given(TOKENS, TOKENS, st.integers(0, 40))
def test_the_counts_are_a_function_of_the_tokens(prediction: list[int], output: list[int], cut: int) -> None:
    whole, pieces = lookup(prediction), lookup(prediction)
    whole.follow(output)
    pieces.follow(output[:cut])
    pieces.find([1, 2, 3], 5)
    pieces.follow(output[cut:])
    accepted, rejected = whole.counts
    assert pieces.counts == (accepted, rejected) == counted(prediction, output)
    assert accepted <= len(output)
    assert accepted + rejected == len(prediction)


def test_the_place_of_each_token_of_a_long_prediction_is_found() -> None:
    prediction = Random(1).sample(range(40_000), 9000)
    here = lookup(prediction)
    steps = sum(1 for _ in here.index())
    for at in [*range(0, 9000, 45), 8998]:
        tokens, _ = here.find([40_000, prediction[at]], 1)
        assert tokens == (prediction[at + 1],)
    assert steps >= 2 * 9000 // 2048, "others get a turn between them"


def test_the_index_of_a_prediction_takes_eight_bytes_a_token_and_four_an_id() -> None:
    here = lookup(Random(1).sample(range(20_000), 20_000))
    tracemalloc.start()
    for _ in here.index():
        pass
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20_000 * (8 + 4)


def test_a_short_prediction_of_a_large_vocabulary_is_indexed_in_few_steps_and_little_memory() -> None:
    prediction = Random(1).sample(range(100_000, 150_000), 50)
    here = lookup(prediction)
    tracemalloc.start()
    steps = sum(1 for _ in here.index())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps <= 4
    assert most < 16 * 1024
    for at in range(49):
        tokens, _ = here.find([0, prediction[at]], 1)
        assert tokens == (prediction[at + 1],)


def test_a_long_prediction_and_output_are_compared_in_steps() -> None:
    prediction = [1, 2] * 4096
    steps = sum(1 for _ in counting(prediction, [3, 2, 1] * 1024))
    assert steps >= 2 * 8192 // 2048 + 3072 // 64


def test_an_answer_that_repeats_itself_has_the_prediction_once() -> None:
    assert counted([1, 2, 3], [1, 2, 3] * 4) == (3, 0)
    assert counted([1, 2, 3, 4], [2, 3] * 4) == (1, 3), "a 2 is not predicted, but its 3 is"


def test_survival_is_measured() -> None:
    shared = Calibration(PRIOR, 10.0)
    prediction = list(range(50))
    before = PredictionLookup(prediction, shared).find((), 4)[1][-1]
    for _ in range(20):
        PredictionLookup(prediction, shared).follow([200 + i for i in range(20)])
    wrong = PredictionLookup(prediction, shared).find((), 4)[1]
    assert not wrong or wrong[-1] < before / 2
    for _ in range(40):
        PredictionLookup(prediction, shared).follow(prediction)
    assert PredictionLookup(prediction, shared).find((), 4)[1][-1] > before


def lines_run(prediction: list[int], output: list[int]) -> int:
    """Return how many lines of Python it takes to follow the output, once the prediction is indexed."""
    here = lookup(prediction)
    for _ in here.index():
        pass
    lines = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        here.follow(output)
    finally:
        sys.settrace(None)
    return lines


def test_the_work_for_a_token_does_not_grow_with_the_prediction() -> None:
    """Each token of the output differs, and stands at half of the places of the prediction."""
    output = [2, 2, 1, 1, 3, 2, 2, 3] * 8
    assert lines_run([1, 2] * 8_192, output) <= 1.1 * lines_run([1, 2] * 512, output)


@FEW
@given(TOKENS, TOKENS)
def test_an_index_made_by_the_first_difference_is_the_same(prediction: list[int], output: list[int]) -> None:
    late, early = lookup(prediction), lookup(prediction)
    for _ in early.index():
        pass
    for token in output:
        late.follow([token])
        early.follow([token])
        assert early.find((), 5) == late.find((), 5)
    assert early.counts == late.counts
