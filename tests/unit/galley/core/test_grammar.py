"""The state of a session's output in its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.errors import Broken, UnsupportedModel
from galley.core.grammar.cache import GrammarCache
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.lexer import Lexer
from galley.core.grammar.limits import GrammarFailed, GrammarLimits
from galley.core.grammar.spec import GrammarSpec, Kind
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.trees import child_of, path_to, subtree
from tests.fakes.vocabularies import (
    END,
    OTHER_END,
    SIZE,
    allowed,
    bpe_vocabulary,
    byte_vocabulary,
    texts,
    tokens_of,
)

VOCABULARIES = (byte_vocabulary(), bpe_vocabulary())
VOCABULARY = VOCABULARIES[0]
ENDS = {END, OTHER_END}
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
THINK, THINK_END = b"@#"
SPECS = (
    GrammarSpec("json_schema", PERSON),
    GrammarSpec("json_object"),
    GrammarSpec("regex", "(ab|abc|12){1,6}x?"),
    GrammarSpec("choice", json.dumps(["abc", "abx", "true", ""])),
    GrammarSpec("grammar", 'start: "ab" start "12" | "name"'),
    GrammarSpec(
        "grammar", 'start: /[ab]{2}x/ endless | /[ab]+/ never | "abc"\nendless: "c" endless\nnever: never'
    ),
    GrammarSpec("regex", "(ab|12)+", after_token=THINK_END),
    GrammarSpec("regex", "(ab|12)+", after_token=THINK_END, opening_token=THINK),
)


def state(kind: Kind, text: str = "", after_token: int | None = None) -> GrammarState:
    return compile_grammar(VOCABULARY, GrammarSpec(kind, text, after_token)).start()


def rebuilt(compiled: CompiledGrammar, tokens: Sequence[int]) -> GrammarState:
    fresh = compiled.start()
    fresh.confirm(tokens)
    return fresh


def next_tokens(at: GrammarState) -> set[int]:
    return allowed(at.masks(())[0])


def test_a_mask_allows_what_may_follow_and_ends_only_where_the_text_may_end() -> None:
    at = state("regex", "ab|abc")
    assert next_tokens(at) == {ord("a"), *tokens_of(VOCABULARY, "ab"), *tokens_of(VOCABULARY, "abc")}
    at.confirm(tokens_of(VOCABULARY, "ab"))
    assert next_tokens(at) == {ord("c"), *ENDS}
    was_over = at.is_over
    at.confirm([ord("c")])
    assert next_tokens(at) == ENDS
    assert (was_over, at.is_over) == (False, True)
    assert (at.allowed_prefix([END]), at.allowed_prefix([97])) == (1, 0)
    assert (at.masks([END])[1] == 0xFFFFFFFF).all()
    assert at.length == 2


def test_rows_follow_the_draft_tokens_and_are_all_ones_after_a_wrong_one() -> None:
    at = state("regex", "ab|abc")
    a, b, c = b"abc"
    rows = at.masks([a, b, c, END, a])
    assert rows.shape == (6, (SIZE + 31) // 32)
    assert [allowed(row) for row in rows[1:4]] == [{b, *tokens_of(VOCABULARY, "b")}, {c, *ENDS}, ENDS]
    assert (rows[5] == 0xFFFFFFFF).all()
    wrong = at.masks([b, c])
    assert ord("a") in allowed(wrong[0])
    assert (wrong[1:] == 0xFFFFFFFF).all()
    assert at.allowed_prefix([a, b, END, a]) == 3
    assert at.allowed_prefix([b]) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS), vocabulary=st.sampled_from(VOCABULARIES))
def test_a_state_is_a_function_of_the_confirmed_tokens(
    data: st.DataObject, spec: GrammarSpec, vocabulary: Vocabulary
) -> None:
    """Trying draft tokens leaves no trace, and a state that was lost is rebuilt from the log."""
    compiled = compile_grammar(vocabulary, spec)
    at, output = compiled.start(), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        draft = list[int]()
        for _ in range(data.draw(st.integers(0, 4))):
            row = at.masks(draft)[-1]
            wild = data.draw(st.integers(0, 9)) == 0
            pool = range(SIZE) if wild else sorted(allowed(row) & set(range(SIZE)))
            draft.append(data.draw(st.sampled_from(pool)))
        fresh = rebuilt(compiled, output)
        rows = at.masks(draft)
        np.testing.assert_array_equal(rows, fresh.masks(draft))
        assert at.allowed_prefix(draft) == fresh.allowed_prefix(draft)
        assert at.forced(8) == fresh.forced(8)
        prefix = at.allowed_prefix(draft)
        for index in range(prefix):  # each row is the mask after the draft tokens before it
            after = rebuilt(compiled, [*output, *draft[:index]])
            np.testing.assert_array_equal(rows[index], after.masks(())[0])
            assert draft[index] in allowed(rows[index]) or after.forced(1)
            np.testing.assert_array_equal(at.mask_after(draft[:index]), rows[index])
            assert at.forced(8, draft[:index]) == after.forced(8)
            assert at.allowed_prefix(draft[index:], draft[:index]) == prefix - index
        if prefix < len(draft):
            assert (at.mask_after(draft) == 0xFFFFFFFF).all()
            assert at.forced(8, draft) == ()
            assert at.allowed_prefix([0], draft) == 0
        token = data.draw(st.sampled_from(sorted(next_tokens(at) & set(range(SIZE)))))
        at.confirm([token])
        output.append(token)
        assert at.length == len(output)
        if token in vocabulary.end_tokens:
            break


@pytest.mark.parametrize("spec", SPECS)
def test_rows_after_the_end_are_the_same_if_a_new_lexer_fills_them(spec: GrammarSpec) -> None:
    compiled = compile_grammar(VOCABULARY, spec)
    outputs = [
        text for text in (b"", b"{}", b"ab", b"abc") if compiled.start().allowed_prefix(text) == len(text)
    ]
    for output, draft in product(outputs, ([END], [END, END], [OTHER_END, *b"a"])):
        usual, state = rebuilt(compiled, list(output)).masks(draft), rebuilt(compiled, list(output))
        with patch.object(Lexer, "is_sound", new=False):
            np.testing.assert_array_equal(state.masks(draft), usual)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS), vocabulary=st.sampled_from(VOCABULARIES))
def test_each_row_of_a_tree_is_that_of_its_path(
    data: st.DataObject, spec: GrammarSpec, vocabulary: Vocabulary
) -> None:
    compiled = compile_grammar(vocabulary, spec)
    at, output = compiled.start(), list[int]()
    while (count := data.draw(st.integers(0, 12))) and not vocabulary.end_tokens.intersection(output):
        tokens, parents = list[int](), list[int]()
        for _ in range(count):
            parent = data.draw(st.integers(-1, len(tokens) - 1))
            path = [tokens[node] for node in path_to(parents, parent)]
            usual = sorted(allowed(at.masks(path)[-1]) & set(range(SIZE)))
            token = data.draw(st.sampled_from([*usual[:8], THINK, THINK_END, END, *usual]))
            if child_of(tokens, parents, parent, token) is None:
                tokens.append(token)
                parents.append(parent)
        rows = at.masks(tokens, tuple(parents))
        nodes = at.allowed_nodes(tokens, tuple(parents))
        fresh = rebuilt(compiled, output)
        np.testing.assert_array_equal(rows[0], fresh.masks(())[0])
        for node in range(len(tokens)):
            path = [tokens[other] for other in path_to(parents, node)]
            np.testing.assert_array_equal(rows[node + 1], fresh.masks(path)[-1])
            assert (node in nodes) == (fresh.allowed_prefix(path) == len(path))
            if len(path) == 1 and node in nodes and tokens[node] not in vocabulary.end_tokens:
                below, among = subtree(parents, len(tokens), node)
                rest = at.allowed_nodes([tokens[other] for other in below], among, path)
                assert [below[other] for other in rest] == [other for other in nodes if other in below]
        at.confirm([token := data.draw(st.sampled_from(sorted(next_tokens(at) & set(range(SIZE)))))])
        output.append(token)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_that_ends_belongs_to_the_language(data: st.DataObject) -> None:
    at, output = state("json_schema", PERSON), list[int]()
    while not output or output[-1] not in ENDS:
        assert len(output) < 200
        token = data.draw(st.sampled_from(sorted(next_tokens(at))))
        at.confirm([token])
        output.append(token)
    value = json.loads(texts(output))
    assert set(value) == {"name", "ok"}
    assert len(value["name"]) <= 5
    assert texts(output).decode() == json.dumps(value, ensure_ascii=False)


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    at = state("json_schema", PERSON)
    forced = at.forced(16)
    assert forced == tuple(tokens_of(VOCABULARY, '{"name": ')[: len(forced)])
    assert len(forced) >= 2
    assert at.forced(1) == forced[:1]
    assert at.allowed_prefix(forced) == len(forced)
    for index in range(len(forced)):
        assert allowed(at.masks(forced)[index]) == {forced[index]}


def test_a_grammar_begins_after_the_reasoning() -> None:
    at = state("regex", "[a-c]{2}", after_token=THINK_END)
    assert next_tokens(at) & set(range(SIZE)) == set(range(SIZE)) - ENDS
    ab = tokens_of(VOCABULARY, "ab")
    rows = at.masks([5, THINK_END, *ab, END])
    assert ord("a") in allowed(rows[2])
    assert 5 not in allowed(rows[2])
    assert allowed(rows[3]) == ENDS
    assert at.allowed_prefix([5, END]) == 1
    assert at.allowed_prefix([5, THINK_END, 5]) == 2
    assert at.allowed_prefix([5]) == 1
    assert at.forced(4) == ()
    at.confirm([5, 5, THINK_END])
    assert at.length == 3
    assert 5 not in next_tokens(at)
    at.confirm(ab)
    assert at.is_over


def test_an_output_may_open_with_reasoning_or_with_the_grammar() -> None:
    spec = GrammarSpec("regex", "[a-c]{2}", after_token=THINK_END, opening_token=THINK)
    compiled = compile_grammar(VOCABULARY, spec)
    at = compiled.start()
    assert next_tokens(at) == {ord("a"), ord("b"), ord("c"), *tokens_of(VOCABULARY, "ab"), THINK}
    assert at.forced(4) == ()
    rows = at.masks([THINK, 5, THINK_END, ord("a")])
    assert 5 in allowed(rows[1])
    assert END not in allowed(rows[1])
    assert 5 not in allowed(rows[3])
    assert at.allowed_prefix([THINK, 5, THINK_END, ord("a"), 5]) == 4
    assert at.allowed_prefix([ord("a"), THINK]) == 1
    at.confirm([ord("a")])
    assert THINK not in next_tokens(at)
    thinking = rebuilt(compiled, [THINK])
    assert THINK in next_tokens(thinking)
    assert 5 in next_tokens(thinking)


def test_what_was_tried_ahead_is_not_tried_again() -> None:
    compiled = compile_grammar(VOCABULARY, GrammarSpec("regex", "[ab]{40}"))
    at = compiled.start()
    with patch.object(GrammarState, "_copy", autospec=True, side_effect=GrammarState._copy) as copy:
        for length in range(1, 9):
            at.mask_after([97] * length)
        at.confirm([97, 97])  # as tried, which stays tried
        at.mask_after([97] * 8)
        assert copy.call_count == 1
        at.confirm([98])
        at.mask_after([97])
        assert copy.call_count == 2


def test_a_token_that_the_grammar_does_not_allow_cannot_be_confirmed() -> None:
    at = state("regex", "ab")
    with pytest.raises(Broken, match="output token 1"):
        at.confirm([ord("a"), ord("a")])


def test_an_answer_cannot_end_in_a_dead_end() -> None:
    """The rule `a` can never be finished, so after "x" nothing may follow."""
    at = state("grammar", 'start: "x" a | "y"\na: a')
    at.confirm(b"x")
    assert next_tokens(at) == ENDS
    assert not at.is_over
    with pytest.raises(GrammarFailed, match="got none after 1 output tokens"):
        at.confirm([END])


def test_a_text_that_is_certain_without_end_has_the_same_masks_in_each_way() -> None:
    """llguidance fails when it looks for all that is certain; a token at a time, it does not."""
    compiled = compile_grammar(VOCABULARY, GrammarSpec("grammar", 'start: /[a-f]{6}x/ dead\ndead: "c" dead'))
    at = rebuilt(compiled, b"abcdef")
    draft = list(b"xccc")
    rows = at.masks(draft)
    for index in range(len(draft) + 1):
        after = rebuilt(compiled, [*b"abcdef", *draft[:index]])
        np.testing.assert_array_equal(rows[index], after.masks(())[0])
        np.testing.assert_array_equal(rows[index], at.mask_after(draft[:index]))
    at.confirm(draft)
    assert next_tokens(at) == {ord("c")}


def test_states_of_one_grammar_are_apart() -> None:
    compiled = compile_grammar(VOCABULARY, GrammarSpec("regex", "[ab]{2}"))
    one, other = compiled.start(), compiled.start()
    one.confirm(b"ab")
    assert one.is_over
    assert other.length == 0
    assert ord("a") in next_tokens(other)


def test_a_lexer_that_is_full_is_made_anew() -> None:
    """The states of a lexer are shared by all sessions of a grammar, and live as long as it does."""
    spec = GrammarSpec("regex", "(a|b)*a(a|b){10}c")
    limits = GrammarLimits(most_lexer_states=400)
    compiled, generous = compile_grammar(VOCABULARY, spec, limits), compile_grammar(VOCABULARY, spec)
    for seed in range(30):
        walk = [97 + bit for bit in np.random.default_rng(seed).integers(0, 2, 30).tolist()]
        at, unbounded = compiled.start(), generous.start()
        for step in range(0, len(walk), 3):
            draft = walk[step : step + 3]
            np.testing.assert_array_equal(at.masks(draft), unbounded.masks(draft))
            at.confirm(draft)
            unbounded.confirm(draft)


def test_a_mask_that_takes_too_much_work_ends_the_answer_with_an_error() -> None:
    spec = GrammarSpec("regex", "(a|b)*a(a|b){10}c")
    at = compile_grammar(VOCABULARY, spec, GrammarLimits(most_lexer_states=60)).start()
    for bit in np.random.default_rng(0).integers(0, 2, 300).tolist():
        if next_tokens(at) == ENDS:
            break
        at.confirm([97 + bit])
    assert next_tokens(at) == ENDS
    with pytest.raises(GrammarFailed):
        at.confirm([END])


def test_the_cache_holds_the_grammars_used_last_by_content() -> None:
    cache = GrammarCache(VOCABULARY, most_bytes=3 * 140_000)
    specs = [GrammarSpec("regex", f"a{{{number}}}") for number in range(1, 5)]
    first = cache.compile(specs[0])
    assert cache.compile(GrammarSpec("regex", "a{1}")) is first
    assert cache.get(specs[0].content_hash) is first
    assert cache.get(specs[1].content_hash) is None
    for spec in specs[1:3]:
        cache.compile(spec)
    cache.get(specs[0].content_hash)
    cache.compile(specs[3])
    assert len(cache) == 3
    assert cache.get(specs[0].content_hash) is first
    assert cache.get(specs[1].content_hash) is None


def test_hashes_tell_grammars_apart() -> None:
    specs = [*SPECS, GrammarSpec("regex", "x", 1), GrammarSpec("regex", "x", 2), GrammarSpec("choice", "x")]
    hashes = {spec.content_hash for spec in specs}
    assert len(hashes) == len(specs)
    assert {len(it) for it in hashes} == {16}


@pytest.mark.parametrize(
    ("tokenizer", "ends"), [('{"version": "1.0"}', [1]), ("{", [1]), ("{}", [])], ids=["kind", "json", "end"]
)
def test_a_tokenizer_that_grammars_cannot_use_is_refused(tokenizer: str, ends: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape("structured output: ")):
        Vocabulary.of_tokenizer(tokenizer, 10, ends)
