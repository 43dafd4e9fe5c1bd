"""Control tokens that messages spell out are broken by marks, at a price that their number hardly changes."""

from __future__ import annotations

import itertools
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from galley.common.models.control_tokens import MARK, ControlTokens

TOKENS = ["<s>", "</s>", "<s", "<<s>", "[A]", "[AB]", "a+a"]
SPELLED = st.lists(st.sampled_from([*TOKENS, *"<s>/[]ABa+ é\n"])).map("".join)


@given(SPELLED, st.text("<s>/[]ABa+", max_size=4))
def test_no_control_token_is_left(text: str, template: str) -> None:
    marked = ControlTokens(TOKENS).mark(text)
    assert marked.replace(MARK, "") == text
    for token in TOKENS:
        at = (marked + template).find(token)
        assert at < 0 or at >= len(marked), (token, marked)


@given(st.text("xyz<[ "))
def test_other_text_has_no_marks(text: str) -> None:
    control = ControlTokens(["<s>", "[A]"])
    assert control.mark(text + ".") == text + "."
    assert ControlTokens([]).mark(text) == text


def test_each_text_of_a_value_is_marked() -> None:
    value = {"<s>": ["<s>", 1, None, True, ({"a": "b<s>"},)], "c": "<"}
    broken = f"<{MARK}s>"
    assert ControlTokens(["<s>"]).mark(value) == {
        broken: [broken, 1, None, True, [{"a": "b" + broken}]],
        "c": "<" + MARK,
    }


def test_many_control_tokens_cost_as_much_as_one() -> None:
    parameters = {"enum": ["", "a", "<a>", "of some length"] * 5_000}
    one, many = (_marking_s(count, parameters) for count in (1, 1_000))
    assert many < 4 * one, f"{one:.3f} s with one token, {many:.3f} s with 1,000"


def test_texts_of_beginnings_cost_what_their_length_costs() -> None:
    long, short = (_marking_s(1_000, "<SPECIAL_" * count) for count in (40_000, 4_000))
    assert long < 40 * short, f"{short:.3f} s for 36 kB, {long:.3f} s for 360 kB"


def _marking_s(count: int, value: Any) -> float:
    control = ControlTokens(f"<SPECIAL_{index}>" for index in range(count))
    clock = [time.thread_time()]
    for _ in range(5):
        control.mark(value)
        clock.append(time.thread_time())
    return min(after - before for before, after in itertools.pairwise(clock))
