"""The cost model: the textbook case, and what must hold everywhere (Leviathan et al. 2023, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.cost.model import (
    FLAT,
    MAX_K,
    RowCostCurve,
    best_k,
    break_even_alpha,
    expected_confirmed,
    gain,
    plan,
    round_cost,
)
from galley.core.errors import InvalidField

alphas = st.floats(0.0, 1.0)
ks = st.integers(0, 24)
ratios = st.floats(0.5, 1e6) | st.just(math.inf)
session_counts = st.integers(1, 32)


@st.composite
def curves(draw: st.DrawFn) -> RowCostCurve:
    rows = sorted(draw(st.sets(st.integers(2, 300), max_size=5)))
    costs = [draw(st.floats(0.5, 50.0)) for _ in rows]
    return RowCostCurve(((1, 1.0), *zip(rows, costs, strict=True)))


def test_the_textbook_case() -> None:
    got = plan(tokens=12, k=4, confirmed_per_round=3, draft_cost_ratio=6)
    assert (got.passes, got.draft_steps) == (4, 16)
    assert got.cost == pytest.approx(20 / 3)
    assert got.gain == pytest.approx(1.8)


@pytest.mark.parametrize(("confirmed", "passes"), [(2.5, 8), (4, 5)])
def test_twenty_tokens_at_five(confirmed: float, passes: int) -> None:
    got = plan(tokens=20, k=5, confirmed_per_round=confirmed, draft_cost_ratio=6)
    assert (got.passes, got.draft_steps) == (passes, passes * 5)


def test_steps_are_rounded_up_but_not_for_a_float_s_last_bit() -> None:
    assert plan(13, 4, 3, 6).passes == 5
    assert 69 / 2.3 > 30
    assert plan(69, 4, 2.3, 6).passes == 30


@given(alphas.filter(lambda alpha: alpha < 0.999), ks)
def test_expected_confirmed_is_the_closed_form(alpha: float, k: int) -> None:
    assert expected_confirmed(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


@given(ks)
def test_expected_confirmed_at_the_ends(k: int) -> None:
    assert expected_confirmed(1.0, k) == k + 1
    assert expected_confirmed(0.0, k) == 1


@given(alphas, alphas, ks, ratios, curves(), session_counts)
def test_gain_rises_with_alpha(
    one: float, other: float, k: int, ratio: float, curve: RowCostCurve, sessions: int
) -> None:
    low, high = sorted((one, other))
    assert gain(low, k, ratio, curve, sessions) <= gain(high, k, ratio, curve, sessions)


@given(alphas, ratios, curves(), session_counts)
def test_k_zero_costs_what_plain_decoding_costs(
    alpha: float, ratio: float, curve: RowCostCurve, sessions: int
) -> None:
    assert gain(alpha, 0, ratio, curve, sessions) == 1


@given(alphas, ratios, curves(), session_counts, ks)
def test_best_k_is_the_first_peak(
    alpha: float, ratio: float, curve: RowCostCurve, sessions: int, max_k: int
) -> None:
    gains = [gain(alpha, k, ratio, curve, sessions) for k in range(max_k + 1)]
    assert best_k(alpha, ratio, curve, sessions, max_k) == gains.index(max(gains))


@given(ratios, curves(), session_counts, st.integers(1, 16))
def test_drafts_pay_above_break_even_only(
    ratio: float, curve: RowCostCurve, sessions: int, max_k: int
) -> None:
    alpha = break_even_alpha(ratio, curve, max_k, sessions)
    if alpha is None:
        assert best_k(1.0, ratio, curve, sessions, max_k) == 0
        return
    assert best_k(min(1.0, alpha + 1e-9), ratio, curve, sessions, max_k) > 0
    if alpha > 1e-9:
        assert best_k(alpha - 1e-9, ratio, curve, sessions, max_k) == 0


def test_break_even_of_one_draft_token_on_a_flat_curve_is_its_cost() -> None:
    # Section 3.3, Corollary 3.9: with passes of equal cost speculation pays iff alpha > 1 / ratio.
    assert break_even_alpha(6) == pytest.approx(1 / 6, abs=1e-9)
    assert break_even_alpha(math.inf) == 0
    assert break_even_alpha(0.9) is None


def test_expensive_rows_lower_the_best_k() -> None:
    dear = RowCostCurve.parse("1:1,9:9")
    assert best_k(0.8, 20) > best_k(0.8, 20, dear)
    assert best_k(0.8, 20, dear) == 0


def test_load_lowers_the_best_k() -> None:
    curve = RowCostCurve.parse("1:1,8:1.05,16:1.3,80:5")
    assert best_k(0.7, math.inf, curve, sessions=1) > best_k(0.7, math.inf, curve, sessions=8)


@given(curves())
def test_the_curve_goes_through_its_points(curve: RowCostCurve) -> None:
    for rows, cost in curve.points:
        assert curve(rows) == pytest.approx(cost)


@pytest.mark.parametrize("text", ["1:1", "1:1,8:1.05,16:1.3,80:5", "1:1,2:0.998"])
def test_a_curve_is_written_as_it_is_read(text: str) -> None:
    assert str(RowCostCurve.parse(text)) == text


def test_the_curve_between_and_beyond_its_points() -> None:
    curve = RowCostCurve.parse("1:1,5:1.4,7:2.4")
    assert curve(3) == pytest.approx(1.2)
    assert curve(6) == pytest.approx(1.9)
    assert curve(9) == pytest.approx(3.4)
    assert RowCostCurve.parse("1:1,5:1.4,7:1.2")(9) == pytest.approx(1.2)
    assert FLAT(100) == 1


def test_the_cost_of_a_round_of_two_sessions() -> None:
    curve = RowCostCurve.parse("1:1,2:1.5,8:3")
    # The target takes 2 * (3 + 1) rows; three draft steps over two rows cost a quarter of the target's.
    assert round_cost(3, 4.0, curve, sessions=2) == 3 + 3 * 1.5 / 4
    assert round_cost(3, math.inf, curve, sessions=2) == 3


@pytest.mark.parametrize(
    ("field", "bound", "call"),
    [
        ("tokens", ">= 1", lambda: plan(0, 4, 3, 6)),
        ("k", f"in [0, {MAX_K}]", lambda: plan(12, -1, 1, 6)),
        ("k", f"in [0, {MAX_K}]", lambda: expected_confirmed(0.5, MAX_K + 1)),
        ("confirmed_per_round", "in [1, 5]", lambda: plan(12, 4, 5.5, 6)),
        ("confirmed_per_round", "in [1, 5]", lambda: plan(12, 4, 0.5, 6)),
        ("draft_cost_ratio", "> 0", lambda: plan(12, 4, 3, 0)),
        ("draft_cost_ratio", "> 0", lambda: gain(0.5, 4, math.nan)),
        ("alpha", "in [0, 1]", lambda: gain(1.1, 4, 6)),
        ("alpha", "in [0, 1]", lambda: best_k(math.nan, 6)),
        ("sessions", ">= 1", lambda: round_cost(4, 6, FLAT, 0)),
        ("max_k", f"in [1, {MAX_K}]", lambda: break_even_alpha(6, max_k=0)),
        ("rows", ">= 1", lambda: FLAT(0)),
        ("row_costs", "start with 1:1", lambda: RowCostCurve.parse("1:34,5:35")),
        ("row_costs", "start with 1:1", lambda: RowCostCurve(())),
        ("row_costs", "rows must rise", lambda: RowCostCurve.parse("1:1,5:2,5:3")),
        ("row_costs", "finite and > 0", lambda: RowCostCurve.parse("1:1,5:-2")),
        ("row_costs", "finite and > 0", lambda: RowCostCurve.parse("1:1,5:inf")),
        ("row_costs", "must look like", lambda: RowCostCurve.parse("flat")),
        ("row_costs", "must look like", lambda: RowCostCurve.parse("1:1,")),
    ],
)
def test_bad_input_names_the_field_and_its_bound(field: str, bound: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidField) as caught:
        call()
    assert caught.value.field == field
    assert bound in caught.value.problem
