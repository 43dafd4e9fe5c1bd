"""A lexer is shared by the sessions of a grammar: none of them finds out what others have written."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from llguidance import LLMatcher

from galley.core.errors import Broken
from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.lexer import READ_TOKENS, Lexer
from galley.core.grammar.limits import GrammarFailed, GrammarLimits, GrammarUnready
from galley.core.grammar.spec import GrammarSpec
from galley.core.trees import path_to
from tests.fakes.vocabularies import allowed, of_bytes

WORDS = ["".join(letters).encode() for length in (2, 3, 4, 5) for letters in product("ab", repeat=length)]
END = 256 + len(WORDS)
TOKENS = [*(bytes([byte]) for byte in range(256)), *WORDS, b"<end>"]
VOCABULARY = of_bytes(TOKENS, [END])
TIMED = of_bytes(TOKENS, [END], time.monotonic_ns)
WORD_TOKENS = range(256, END)
COUNTERS = GrammarSpec("regex", "g+x|([ab]*a[ab]{60}c|[ab]*b[ab]{50}d)")
FEW_FUEL, FEW_STATES = GrammarLimits(mask_fuel=2500), GrammarLimits(most_lexer_states=230)
"""Limits that an output of COUNTERS reaches after 5 to 30 letters."""


def letters(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(b"ab", k=count)


def cold(limits: GrammarLimits, tokens: Sequence[int]) -> set[int]:
    """Return what may follow `tokens`, by a grammar that nobody has used before."""
    at = compile_grammar(VOCABULARY, COUNTERS, limits).start()
    at.confirm(tokens)
    return allowed(at.masks(())[0])


def ends_after(at: GrammarState, tokens: Sequence[int]) -> int:
    """Return after how many of `tokens` the grammar allows none any more."""
    for count, token in enumerate(tokens):
        if allowed(at.masks(())[0]) == {END}:
            with pytest.raises(GrammarFailed, match=f"after {count} output tokens"):
                at.confirm([END])
            return count
        at.confirm([token])
    raise AssertionError("the limits are too wide")


@pytest.mark.parametrize("limits", [FEW_FUEL, FEW_STATES], ids=["fuel", "states"])
@pytest.mark.parametrize("seed", range(2))
def test_what_may_follow_does_not_depend_on_other_sessions(limits: GrammarLimits, seed: int) -> None:
    compiled, draw = compile_grammar(TIMED, COUNTERS, limits), random.Random(seed)
    outputs: list[list[int]] = [[], []]
    states, has_failed = [compiled.start() for _ in outputs], False
    while not has_failed:
        index = draw.randrange(2)
        at, output = states[index], outputs[index]
        assert len(output) < 60
        draft = draw.choices(b"ab", k=draw.randrange(3))
        for length, row in enumerate(at.masks(draft)):
            expected = cold(limits, [*output, *draft[:length]])
            assert allowed(row) == expected
            if expected == {END}:
                break
        has_failed = allowed(at.masks(())[0]) == {END}
        if not has_failed:
            at.confirm([token := draw.choice(b"ab")])
            output.append(token)


@pytest.mark.parametrize("limits", [FEW_FUEL, FEW_STATES], ids=["fuel", "states"])
def test_branches_of_a_tree_do_not_find_out_about_each_other(limits: GrammarLimits) -> None:
    at, output, draw = compile_grammar(TIMED, COUNTERS, limits).start(), list[int](), random.Random(5)
    parents, is_failed = (-1, -1, 1, 1, 0, 3), False
    while not is_failed:
        assert len(output) < 60
        tokens = [*b"abab", draw.choice(WORD_TOKENS), draw.choice(WORD_TOKENS)]
        rows = [allowed(row) for row in at.masks(tokens, parents)]
        is_failed = rows[0] == {END}
        for node in range(-1, len(tokens)):
            path = path_to(parents, node)
            if all(rows[before + 1] != {END} for before in [-1, *path[:-1]][: len(path)]):
                assert rows[node + 1] == cold(limits, [*output, *(tokens[other] for other in path)])
        if not is_failed:
            at.confirm([token := draw.choice(b"ab")])
            output.append(token)


@pytest.mark.parametrize("limits", [FEW_FUEL, FEW_STATES], ids=["fuel", "states"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_a_session_that_reaches_a_limit_ends_alone(limits: GrammarLimits, is_first: bool) -> None:
    """The others of its grammar go on, new ones start, and it ends where it would have ended anyway."""
    alone = ends_after(compile_grammar(VOCABULARY, COUNTERS, limits).start(), letters(1, 60))
    cache = GrammarCache(TIMED, limits=limits)
    other, compiled = cache.compile(COUNTERS).start(), cache.compile(COUNTERS)
    other.confirm(b"gg")
    if not is_first:
        near = compiled.start()
        for token in letters(2, 8):
            near.masks(())
            near.confirm([token])
    assert ends_after(compiled.start(), letters(1, 60)) == alone
    assert allowed(other.masks(())[0]) == set(b"gx")
    other.confirm(b"gx")
    assert other.is_over
    new = cache.compile(COUNTERS).start()
    assert allowed(new.masks(())[0]) == cold(limits, ())


def living_lexers() -> int:
    # Not isinstance: it asks objects of other libraries for their class, and some warn.
    return sum(type(each) is Lexer for each in gc.get_objects())


def test_what_outputs_make_lexers_learn_is_counted_and_bounded() -> None:
    """Long outputs of grammars that count, by sessions that all live on."""
    most = 8 * 1024 * 1024
    cache, states = GrammarCache(TIMED, most), list[tuple[GrammarState, list[int]]]()
    before = living_lexers()
    grown = 0
    for number in range(12):
        compiled = cache.compile(GrammarSpec("regex", f"[ab]*a[ab]{{{14 + number}}}c"))
        small, at, output = compiled.held_bytes, compiled.start(), letters(number, 300)
        for token in output:
            at.masks(())
            at.confirm([token])
            assert cache.held_bytes <= most
        grown += compiled.held_bytes > 2 * small
        states.append((at, output))
    assert grown > 6
    assert len(cache) < len(states)
    assert living_lexers() - before <= len(cache)
    for at, output in states:  # those whose grammar was dropped go on as well
        rebuilt = compile_grammar(VOCABULARY, at.grammar.spec).start()
        rebuilt.confirm(output)
        np.testing.assert_array_equal(at.masks(()), rebuilt.masks(()))


@pytest.mark.parametrize("begin", ["", "only one text "])
def test_a_grammar_may_be_compiled_anew_before_it_must_be(begin: str) -> None:
    spec = GrammarSpec("regex", f"{begin}({COUNTERS.text})")
    compiled = compile_grammar(VOCABULARY, spec, GrammarLimits(mask_fuel=40_000))
    at, output = compiled.start(), iter([*begin.encode(), *letters(1, 300)])
    while compiled.is_ready:
        at.masks(())
        at.confirm([next(output)])
    worn = compiled.lexer(may_compile=False)
    assert not worn.is_spent
    compiled.prepare()
    fresh = compiled.lexer(may_compile=False)
    assert fresh is not worn
    assert not fresh.is_worn


def test_a_grammar_that_was_dropped_is_the_same_for_its_sessions_and_for_new_ones() -> None:
    cache = GrammarCache(VOCABULARY, most_bytes=1)
    first = cache.compile(COUNTERS)
    at = first.start()
    at.confirm(b"gg")
    cache.compile(GrammarSpec("regex", "other"))
    assert not first.is_ready
    assert cache.get(COUNTERS.content_hash) is first
    assert allowed(at.masks(())[0]) == set(b"gx")
    cache.compile(GrammarSpec("regex", "other"))
    assert cache.compile(COUNTERS) is first
    assert first.is_ready


def test_a_state_that_may_not_compile_knows_nothing_until_others_have() -> None:
    compiled = compile_grammar(VOCABULARY, COUNTERS)
    at = compiled.start(may_compile=False)
    at.confirm(b"gg")
    compiled.drop()
    with patch.object(CompiledGrammar, "_made", side_effect=AssertionError("compiled")):
        assert (at.allowed_prefix(b"gx"), at.allowed_prefix(b"x", ahead=b"g"), at.forced(4)) == (0, 0, ())
        with pytest.raises(GrammarUnready):
            at.masks(())
        at.confirm(b"gx")
        at.confirm([END])
    assert at.length == 5
    compiled.prepare()
    wrong = compiled.start(may_compile=False)
    compiled.drop()
    wrong.confirm(b"gz")
    compiled.prepare()
    assert (wrong.allowed_prefix(b"g"), wrong.forced(4)) == (0, ())
    with pytest.raises(GrammarFailed):
        wrong.confirm(b"g")


def test_a_long_output_is_read_at_once_and_ends_where_its_states_do() -> None:
    """One state for each character of a string whose length is bounded."""
    compiled = compile_grammar(
        TIMED, GrammarSpec("regex", "c{0,3000}"), GrammarLimits(most_lexer_states=2000)
    )
    at = compiled.start()
    at.confirm(b"c" * 1900)
    assert ord("c") in allowed(at.masks(())[0])
    with pytest.raises(GrammarFailed):
        compiled.start().confirm(b"c" * 2100)
    assert ord("c") in allowed(at.masks(())[0])


def count_read(read: list[int]) -> AbstractContextManager[object]:
    """Add the tokens that lexers read meanwhile to `read`."""
    original = Lexer.read

    def counted(lexer: Lexer, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        read.extend(tokens)
        return original(lexer, matcher, tokens)

    return patch.object(Lexer, "read", counted)


def state_of_a_new_lexer(output: bytes, unchecked: bytes = b"") -> GrammarState:
    """Return a state of `(ab)+` that may not compile, whose lexer has read nothing of its output yet."""
    compiled = compile_grammar(TIMED, GrammarSpec("regex", "(ab)+"))
    at = compiled.start(may_compile=False)
    at.confirm(output)
    compiled.drop()
    at.confirm(unchecked)
    compiled.prepare()
    return at


def test_a_new_lexer_reads_a_long_output_in_slices_where_it_may_not_compile() -> None:
    at, read, slices = state_of_a_new_lexer(2000 * b"ab"), list[int](), list[int]()
    while at.allowed_prefix(b"aba") == 0:
        before = len(read)
        with count_read(read):
            assert (at.allowed_prefix(b"a", ahead=b"ab"), at.forced(1)) == (0, ())
            with pytest.raises(GrammarUnready):
                at.masks(())
            at.confirm(b"ab")
        slices.append(len(read) - before)
    assert at.allowed_prefix(b"aba") == 3
    assert allowed(at.masks(())[0]) >= {ord("a"), END}
    assert 1 < max(slices) <= READ_TOKENS
    assert sum(slices) == at.length == 4000 + 2 * len(slices)


def test_whoever_may_compile_reads_the_rest_of_a_long_output_at_once() -> None:
    at, read = state_of_a_new_lexer(2000 * b"ab"), list[int]()
    with count_read(read):
        at.confirm(b"ab")
        at.may_compile = True
        assert allowed(at.masks(())[0]) >= {ord("a"), END}
    assert len(read) == 4002


def test_a_new_lexer_finds_a_wrong_token_of_a_long_output_in_slices() -> None:
    at, read, is_found = state_of_a_new_lexer(2000 * b"ab", unchecked=b"z"), list[int](), False
    while not is_found:
        before = len(read)
        with count_read(read):
            try:
                at.confirm(b"ab")
            except GrammarFailed:
                is_found = True
        assert len(read) - before <= READ_TOKENS
        assert len(read) < 5000


@pytest.mark.parametrize(
    ("spec", "begin", "more", "last"),
    [
        (GrammarSpec("regex", "(ab)+"), b"", b"ab", b""),
        (GrammarSpec("json_schema", '{"type":"array","items":{"type":"integer"}}'), b"[", b"1, ", b"2]"),
    ],
    ids=["may go on", "is complete"],
)
@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "followed"])
def test_the_end_of_a_long_output_reads_nothing_again(
    spec: GrammarSpec, begin: bytes, more: bytes, last: bytes, is_masked: bool
) -> None:
    at = compile_grammar(TIMED, spec).start()
    at.confirm(begin + 1000 * more)
    read: list[int] = []
    with count_read(read):
        if is_masked:
            at.masks(())
        at.confirm([*last, END])
    assert read == [*last]
    assert at.is_over


def test_an_end_token_within_a_text_is_refused_and_the_text_goes_on() -> None:
    at = compile_grammar(TIMED, GrammarSpec("regex", "(ab)+")).start()
    at.confirm(b"aba")
    with pytest.raises(GrammarFailed, match="after 3 output tokens"):
        at.confirm([END])
    assert at.length == 3
    at.confirm([*b"b", END])
    assert at.is_over


def test_a_state_at_which_a_trial_failed_forgets_it() -> None:
    at = compile_grammar(VOCABULARY, COUNTERS).start()
    with (
        patch.object(GrammarState, "allowed_prefix", return_value=1),
        patch.object(GrammarState, "confirm", side_effect=Broken("no")),
    ):
        assert (at.mask_after(b"g") == 0xFFFFFFFF).all()
    assert allowed(at.mask_after(b"g")) == set(b"gx")
