"""An output whose text takes a lexer too much work ends, at a place that its tokens alone decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.lexer import Lexer
from galley.core.grammar.limits import GrammarFailed, GrammarLimits, GrammarUnready
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.vocabularies import END, OTHER_END, allowed, byte_vocabulary

VOCABULARY = byte_vocabulary()
ENDS = {END, OTHER_END}
COUNTERS = GrammarSpec("regex", "g+x|([ab]*a[ab]{60}c|[ab]*b[ab]{50}d)")
LIMITS = GrammarLimits(output_fuel=12_000)
LETTERS = random.Random(3).choices(b"ab", k=600)


def end_of(at: GrammarState, letters: Sequence[int], seed: int) -> int:
    """Return after how many letters only the end may follow; drafts and steps are of random length."""
    draw = random.Random(seed)
    while at.length < len(letters):
        draft = letters[at.length : at.length + draw.choice([0, 1, 3, 20])]
        for index, row in enumerate(at.masks(draft)):
            if allowed(row) == ENDS:
                assert at.allowed_prefix(draft) == index
                return at.length + index
        assert at.allowed_prefix(draft) == len(draft)
        at.confirm(letters[at.length : at.length + 1 + draw.randrange(len(draft) + 1)])
    raise AssertionError("the limits are too wide")


def end_alone() -> int:
    return end_of(compile_grammar(VOCABULARY, COUNTERS, LIMITS).start(), LETTERS, 0)


def test_an_output_ends_at_the_same_place_however_it_came_there() -> None:
    ends = {end_alone()}
    compiled = compile_grammar(VOCABULARY, COUNTERS, LIMITS)
    for seed in range(1, 6):  # each after others, whose letters the lexer knows
        for other in range(seed):
            near = compiled.start()
            near.confirm(random.Random(other).choices(b"ab", k=120))
            near.masks(b"ab")
        ends.add(end_of(compiled.start(), LETTERS, seed))
    (end,) = ends
    assert 64 < end < 500
    for length in (end - 70, end - 1, end, end + 1):
        late = compile_grammar(VOCABULARY, COUNTERS, LIMITS).start()  # as after a failover
        late.confirm(LETTERS[:length])
        assert (allowed(late.masks(())[0]) == ENDS) == (length >= end)


def test_a_branch_of_a_tree_ends_where_the_output_does() -> None:
    end = end_alone()
    at = compile_grammar(VOCABULARY, COUNTERS, LIMITS).start()
    at.confirm(LETTERS[: end - 1])
    tokens, parents = b"abab", (-1, -1, 0, 1)
    assert [allowed(row) == ENDS for row in at.masks(tokens, parents)] == [False, True, True, True, True]
    assert at.allowed_nodes(tokens, parents) == [0, 1]


def test_what_follows_the_end_is_an_error_unless_the_text_is_complete() -> None:
    end = end_alone()
    at = compile_grammar(VOCABULARY, COUNTERS, LIMITS).start()
    at.confirm(LETTERS[:end])
    assert (at.allowed_prefix(b"ab"), at.allowed_prefix([END]), at.forced(4)) == (0, 0, ())
    with pytest.raises(GrammarFailed, match=f"after {end} output tokens"):
        at.confirm([END])
    whole = compile_grammar(VOCABULARY, GrammarSpec("regex", "[ab]*|[ab]*a[ab]{60}c"), LIMITS).start()
    end = end_of(whole, LETTERS, 1)
    whole.confirm(LETTERS[whole.length : end])
    assert whole.allowed_prefix([END]) == 1
    whole.confirm([END])


def test_what_an_output_takes_is_the_same_for_each_new_lexer() -> None:
    compiled = compile_grammar(VOCABULARY, COUNTERS)
    fuel = set[int]()
    for _ in range(3):
        compiled.drop()
        at = compiled.start()
        at.confirm(LETTERS)
        lexer = compiled.lexer(may_compile=True)
        assert lexer.has_spent_at_most(10**9)
        fuel.add(lexer.fuel)
    assert len(fuel) == 1


def test_a_state_that_may_not_compile_leaves_the_check_to_those_that_may() -> None:
    end = end_alone()
    compiled = compile_grammar(VOCABULARY, COUNTERS, LIMITS)
    at = compiled.start(may_compile=False)
    at.confirm(LETTERS[:end])
    with patch.object(CompiledGrammar, "_made", side_effect=AssertionError("compiled")):
        assert at.allowed_prefix(b"ab") == 0
        with pytest.raises(GrammarUnready):
            at.masks(())
    at.may_compile = True
    assert allowed(at.masks(())[0]) == ENDS


def test_an_output_that_counts_is_seldom_read_again() -> None:
    """A session compiles its grammar, and reads its output again, once for many masks."""
    compiled = compile_grammar(VOCABULARY, COUNTERS)
    at, made = compiled.start(), list[int]()
    original = CompiledGrammar._made

    def counted(grammar: CompiledGrammar) -> Lexer:
        made.append(at.length)
        return original(grammar)

    letters = random.Random(4).choices(b"ab", k=6000)
    with patch.object(CompiledGrammar, "_made", counted):
        while allowed(at.masks(())[0]) != ENDS:
            at.confirm([letters[at.length]])
    assert 500 < at.length < 2000
    assert len(made) < at.length / 10
