"""Masks beside a forward pass: when they are computed, and whose error one is."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from galley.core.errors import Broken, GalleyError
from galley.core.grammar.compiled import GrammarState, compile_grammar
from galley.core.grammar.limits import GrammarFailed
from galley.core.grammar.spec import GrammarSpec
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepTrace
from galley.core.trees import CHAIN, Parents
from galley.engine.masking import Mask, MaskThread, confirmed_mask, without_early_end
from tests.fakes.vocabularies import STOP, allowed, ascii_vocabulary

GRAMMAR = compile_grammar(ascii_vocabulary(), GrammarSpec("regex", "ab+c?"))
PROMPT = [9, 9]
TIMEOUT_S = 20


def draw_of(
    output: bytes = b"", drafts: bytes = b"", state: GrammarState | None = None, parents: Parents = CHAIN
) -> Draw:
    history = [*PROMPT, *output]
    free = Draw(SamplingParams(), history, len(PROMPT), frozenset({STOP}), 0, tuple(drafts), parents)
    return replace(free, grammar=state or GRAMMAR.start())


def letters(mask: Mask | None) -> list[str]:
    assert isinstance(mask, np.ndarray)
    return ["".join(sorted(map(chr, allowed(row)))) for row in mask]


def test_without_a_grammar_no_thread_starts() -> None:
    draws = [replace(draw_of(), grammar=None)] * 3
    threads = threading.active_count()
    with MaskThread().beside(draws) as masks:
        pass
    assert masks == []
    assert threading.active_count() == threads


def test_each_draw_gets_the_mask_of_its_own_place() -> None:
    free = replace(draw_of(), grammar=None)
    draws = [draw_of(), free, draw_of(b"a"), draw_of(b"ab", b"bc")]
    with MaskThread().beside(draws) as masks:
        pass
    end = chr(STOP)
    assert masks[1] is None
    assert [letters(masks[i]) for i in (0, 2, 3)] == [["a"], ["b"], [f"{end}bc", f"{end}bc", end]]


def test_each_node_of_a_tree_gets_the_mask_of_its_path() -> None:
    tree = draw_of(b"a", b"bxbc\x01", parents=(-1, -1, 0, 0, 0))
    with MaskThread().beside([tree]) as masks:
        pass
    end, all_of_them = chr(STOP), "".join(map(chr, range(128)))
    assert letters(masks[0]) == ["b", f"{end}bc", all_of_them, f"{end}bc", end, end]


def test_a_state_is_brought_up_to_the_history() -> None:
    state = GRAMMAR.start()
    confirmed_mask(state, draw_of(b"a", b"bc", state))
    assert state.length == 1, "draft tokens are only tried"
    confirmed_mask(state, draw_of(b"abbb", state=state))
    assert state.length == 4
    with pytest.raises(Broken, match="output token 4"):
        confirmed_mask(state, draw_of(b"abbbx", state=state))


def test_a_grammar_is_slow_only_if_it_is_so_step_after_step(monkeypatch: pytest.MonkeyPatch) -> None:
    state, clock = GRAMMAR.start(), iter(range(0, 10**9, 4_000_000))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    seen = []
    for _ in range(8):
        confirmed_mask(state, draw_of(state=state))
        seen.append(state.row_ns)
    assert seen[0] < 100_000
    assert seen[-1] == 4_000_000
    confirmed_mask(state, draw_of(drafts=b"abc", state=state))
    assert state.row_ns == 1_000_000, "a row of four"


def test_masks_are_computed_while_the_body_runs() -> None:
    computing, running = threading.Event(), threading.Event()

    def compute(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
        computing.set()
        assert running.wait(TIMEOUT_S)
        return confirmed_mask(state, draw)

    with MaskThread().beside([draw_of()], compute) as masks:
        assert computing.wait(TIMEOUT_S)
        running.set()
    assert letters(masks[0]) == ["a"]


def test_a_watch_gets_the_time_of_waiting_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = StepTrace(b""), iter([1_000, 1_700])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    with MaskThread().beside([draw_of()], lambda state, _: state.masks(()), watch):
        pass
    assert watch.mask_wait_ns == 700


def test_a_step_that_fails_leaves_no_state_in_use() -> None:
    failing, finished = threading.Event(), threading.Event()

    def compute(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
        assert failing.wait(TIMEOUT_S)
        finished.set()
        return confirmed_mask(state, draw)

    def fail() -> None:
        with MaskThread().beside([draw_of()], compute):
            failing.set()
            raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        fail()
    assert finished.is_set()


class Panic(BaseException):
    """As pyo3 raises where llguidance panics."""


@pytest.mark.parametrize("error", [GrammarFailed(3), ValueError("out of range"), Panic("out of range")])
def test_an_error_is_that_of_its_own_draw(error: BaseException) -> None:
    bad = draw_of()

    def compute(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
        if draw is bad:
            raise error
        return confirmed_mask(state, draw)

    with capture_logs() as logs, MaskThread().beside([draw_of(), bad, draw_of(b"a")], compute) as masks:
        pass
    assert (letters(masks[0]), letters(masks[2])) == (["a"], ["b"])
    assert isinstance(masks[1], GalleyError)
    assert isinstance(masks[1], GrammarFailed if isinstance(error, GrammarFailed) else Broken)
    assert [entry["exc_info"] for entry in logs] == ([] if isinstance(error, GalleyError) else [error])


def sampled(tokens: bytes) -> Sampled:
    return Sampled(tuple(tokens), tuple(PositionLogprobs(-float(token), ()) for token in tokens))


@pytest.mark.parametrize("tokens", [b"ab\x01", b"abb", b"a", b"abc\x01"])
def test_a_text_may_end_where_it_is_complete(tokens: bytes) -> None:
    assert without_early_end(draw_of(drafts=tokens[:-1]), sampled(tokens)) == sampled(tokens)


@pytest.mark.parametrize("after", [b"", b"b", b"\x01"])
def test_what_was_confirmed_before_an_early_end_stays(after: bytes) -> None:
    draw = draw_of(drafts=b"a\x01b")
    assert without_early_end(draw, sampled(b"a\x01" + after)) == sampled(b"a")


def test_an_early_end_of_another_branch_is_not_judged() -> None:
    draw = draw_of(drafts=b"\x01ab", parents=(-1, -1, 1))
    assert without_early_end(draw, sampled(b"abb")) == sampled(b"abb")
    assert without_early_end(draw, sampled(b"a\x01")) == sampled(b"a")


def test_tokens_after_the_end_are_not_judged() -> None:
    """They are the rest of a draft, and the session ends before them."""
    assert without_early_end(draw_of(drafts=b"ab\x01x"), sampled(b"ab\x01xy")) == sampled(b"ab\x01xy")


def test_an_early_end_alone_fails() -> None:
    state = GRAMMAR.start()
    state.confirm(b"a")
    outcome = without_early_end(draw_of(b"a", state=state), sampled(b"\x01"))
    assert isinstance(outcome, GrammarFailed)
    assert "after 1 output tokens" in str(outcome)


def test_sessions_without_a_grammar_end_anywhere() -> None:
    draw = replace(draw_of(), grammar=None)
    assert without_early_end(draw, sampled(b"\x01")) == sampled(b"\x01")
