"""Patterns of schemas: an answer that has its form is valid by ECMA-262 and by Python's `re`."""

from __future__ import annotations

import json
import re
import warnings

import jsonschema_rs
import pytest

from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.vocabularies import END, byte_vocabulary, tokens_of

VOCABULARY = byte_vocabulary()
SAMPLES = (
    *map(chr, range(0x20, 0x7F)),
    *"\t\n\r\x85\xa0\xb2\xbd\xdfé\u0301\u0130\u0663\u1680\u2003\u2028\u2029\u202f\u212a\u3000\ufeff\u65e5\u203f\U0001f600",
)
CLASSES = (
    r"\d \D \w \W \s \S . [\d] [\D] [\w] [\W] [\s] [\S] [^\d] [^\D] [^\w] [^\W] [^\s] [^\S] "
    r"[\W\d] [^\W\d] [\s\d] [\S\t] [^\s,] [a.] [^a.] [\w\-.] [+\--/] [!--] [--/] [a-c-e] [^-a] [a-] "
    r"[a&&b] [a-z&&b-d] [a~~b] [[a] [^[a] [()[\]{}] [\[\]] [a^] [\^a] [#-&&] [\t-\r] [\x41-\x43] [\u00e9] "
    r"[^\x00-\x1f] (?i:[\W_]) (?s:.) \. \/ a|\d"
)


def compiled(pattern: str) -> CompiledGrammar:
    schema = {"type": "string", "pattern": pattern}
    return compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))


def accepts(grammar: CompiledGrammar, value: object) -> bool:
    tokens = [*tokens_of(VOCABULARY, json.dumps(value, ensure_ascii=False)), END]
    return grammar.start().allowed_prefix(tokens) == len(tokens)


@pytest.mark.parametrize("text", CLASSES.split(" "))
def test_a_class_takes_only_what_all_validators_do(text: str) -> None:
    pattern = f"^(?:{text})$"
    grammar = compiled(pattern)
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    with warnings.catch_warnings(action="ignore"):  # of classes that may once be nested
        python = re.compile(pattern)
    taken = [each for each in SAMPLES if accepts(grammar, each)]
    assert taken
    assert not [each for each in taken if not (validator.is_valid(each) and python.search(each))]


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"^[\s\S]+$", "a é\u0663\u2028\ufeff"),
        (r"^[\w\W]+$", "a é\u0663"),
        (r"^[^\d]+$", "Grüße"),
        (r"^\S+$", "日本"),
        (r"^.+$", "né ¿?"),
        (r"(?s)^.+$", "a\nb"),
        (r"^[&&~~]{4}$", "&&~~"),
        (r"^[()[\]{}]+$", "([]){}"),
        (r"^[\w.-]+@[\w-]+$", "a-b.c@d-e"),
        (r"^[--/]+$", "-./"),
        (r"^\\d[\\d]$", "\\dd"),
    ],
)
def test_an_answer_may_have_what_a_pattern_allows(pattern: str, value: str) -> None:
    assert accepts(compiled(pattern), value)


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"^[(?s].$", "sa", "s\u2028"),
        (r"^\(?s.$", "(sa", "s\u2028"),
        (r"^(?s:.).$", "\u2028a", "a\u2028"),
        (r"^(?s:(.)[)].).$", "\u2028)\u2028a", "a)a\u2028"),
        (r"^(?s:(?-s:.).)$", "a\u2028", "\u2028a"),
        (r"^(?:(?s).).$", "\u2028a", "a\u2028"),
        (r"^(?is:(?i:.)).$", "\u2028a", "a\u2028"),
        (r"^(?i:.)$", "a", "\u2028"),
        (r"(?is)^(a|.)$", "\u2028", "aa"),
    ],
)
def test_a_dot_is_a_line_end_only_where_its_group_says_so(pattern: str, taken: str, refused: str) -> None:
    grammar = compiled(pattern)
    assert accepts(grammar, taken)
    assert not accepts(grammar, refused)


@pytest.mark.parametrize("pattern", ["^[]a]$", "^[^]a]$", "^[]$", "^[^]$"])
def test_an_empty_class_is_refused(pattern: str) -> None:
    problem = f"must not have an empty class in a pattern, got {pattern!r}"
    with pytest.raises(InvalidGrammar, match=re.escape(problem)):
        compiled(pattern)


def test_names_by_a_pattern_are_of_ecma_262_too() -> None:
    schema = {
        "$ref": "#list",
        "$defs": {
            "list": {
                "$anchor": "list",
                "type": "object",
                "patternProperties": {r"^[a&&b]\s$": {"type": "null"}},
                "additionalProperties": False,
            }
        },
    }
    grammar = compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))
    assert accepts(grammar, {"& ": None})
    assert not accepts(grammar, {"&\x85": None})


LINE = {"type": "string", "pattern": "^.$"}
NAMED = {"z": {"$anchor": "q", "type": "null"}}
BASED = {"z": {"$id": "http://x/b", "type": "null"}}


def test_a_pattern_that_only_a_path_leads_to_is_of_ecma_262() -> None:
    schema = {
        "anyOf": [{"$ref": "#/components/A"}, {"$ref": "#q"}],
        "components": {"A": LINE},
        "$defs": NAMED,
    }
    grammar = compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))
    assert accepts(grammar, "a")
    assert not accepts(grammar, "\u2028")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "./#/components/A"},
        {"$id": "http://x/foo.json", "$ref": "foo.json#/components/A"},
        {"anyOf": [{"$ref": "#/components/A"}, {"$ref": "http://x/b"}], "$defs": BASED},
    ],
)
def test_a_pattern_that_may_be_part_of_a_constant_is_refused(schema: dict[str, object]) -> None:
    text = json.dumps({**schema, "components": {"A": LINE}})
    with pytest.raises(InvalidGrammar, match=r"must have patterns below \$defs"):
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", text))


def test_a_pattern_that_stands_twice_for_names_is_refused() -> None:
    schema = {"items": {"patternProperties": {r"^[&]$": {"type": "integer"}, r"^[\&]$": {"type": "string"}}}}
    with pytest.raises(
        InvalidGrammar, match=r"items: must not have a pattern twice in patternProperties, got"
    ):
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))


def test_a_constant_is_no_pattern() -> None:
    schema = {"const": {"pattern": ".", "patternProperties": {r"\d": 1}}}
    grammar = compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))
    assert accepts(grammar, schema["const"])
