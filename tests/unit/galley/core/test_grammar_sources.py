"""Grammars of requests: what each kind means, and what is refused with its place named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.grammar.compiled import compile_grammar
from galley.core.grammar.limits import DEFAULT_LIMITS, InvalidGrammar
from galley.core.grammar.spec import GrammarSpec, Kind
from galley.core.grammar.vocabulary import Vocabulary
from tests.fakes import tokenizer_files
from tests.fakes.vocabularies import END, byte_vocabulary, tokens_of

VOCABULARY = byte_vocabulary()


def accepts(kind: Kind, text: str, output: str) -> bool:
    """Return True if `output` is a whole text of the grammar."""
    at = compile_grammar(VOCABULARY, GrammarSpec(kind, text)).start()
    tokens = [*tokens_of(VOCABULARY, output), END]
    return at.allowed_prefix(tokens) == len(tokens)


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.text(max_size=8), min_size=1, max_size=6), other=st.text(max_size=8))
def test_choices_are_taken_literally(choices: list[str], other: str) -> None:
    text = json.dumps(choices, ensure_ascii=False)
    assert all(accepts("choice", text, choice) for choice in choices)
    assert accepts("choice", text, other) == (other in choices)


def test_json_has_the_spaces_of_json_dumps_and_no_others() -> None:
    assert accepts("json_object", "", '{"a": [1, 2], "b": {}}')
    assert not accepts("json_object", "", '{"a":1}')
    assert not accepts("json_object", "", '{"a":  1}')
    assert not accepts("json_object", "", "[1]")


def test_a_schema_within_lark_has_the_same_spaces() -> None:
    grammar = 'start: "%json {" | "x" %json\n {"type": "array", "items": {"type": "integer"}} "%" # %json x'
    assert accepts("grammar", grammar, "%json {")
    assert accepts("grammar", grammar, "x[1, 2]%")
    assert not accepts("grammar", grammar, "x[1,2]%")


def test_gbnf_and_lark_are_told_apart() -> None:
    assert accepts("grammar", 'root ::= "a" [0-9]+\n', "a12")
    assert accepts("grammar", 'start: "a" /[0-9]+/', "a12")
    assert accepts("grammar", 'start: "::=" # ::=', "::=")


LEGACY_TAG = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<f=a>",
            "schema": {"type": "object", "required": ["x"], "properties": {"x": {}}},
            "end": "</f>",
        },
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "begin": "<f=b>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            },
            {"begin": "<f=c>", "content": {"type": "regex", "pattern": "a+/"}, "end": "</f>"},
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


@pytest.mark.parametrize(
    ("tag", "output", "is_accepted"),
    [
        (LEGACY_TAG, "plain text\n", True),
        (LEGACY_TAG, 'see <f=a>{"x": 1}</f> and <f=b>2</f> end', True),
        (LEGACY_TAG, "see <f=b>x</f>", False),
        (LEGACY_TAG, "see <f=c>2</f>", False),
        (NEW_TAG, "plain text", False),
        (NEW_TAG, "so <f=b>12</f>", True),
        (NEW_TAG, "so <f=c>aa/</f>", True),
        (NEW_TAG, "so <f=b>12</f> more", False),
    ],
)
def test_structural_tags(tag: object, output: str, *, is_accepted: bool) -> None:
    assert accepts("structural_tag", json.dumps(tag), output) is is_accepted


CALL = {
    "type": "tag",
    "begin": "<c>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": ["</c>", "."],
}
TEXT_FORM = {"type": "const_string", "value": "so"}


def separated(**more: object) -> dict[str, object]:
    return {"type": "tags_with_separator", "tags": [CALL], "separator": ", ", **more}


@pytest.mark.parametrize(
    ("form", "accepted", "refused"),
    [
        (TEXT_FORM, ["so"], ["", "soo", "s"]),
        ({"type": "const_string", "value": ""}, [""], ["a"]),
        ({"type": "any_text"}, ["", "a\n<c>"], []),
        ({"type": "sequence", "elements": [TEXT_FORM, CALL]}, ["so<c>1</c>", "so<c>1."], ["so", "<c>1."]),
        ({"type": "or", "elements": [TEXT_FORM, CALL]}, ["so", "<c>12</c>"], ["so<c>1.", ""]),
        ({"type": "optional", "content": TEXT_FORM}, ["", "so"], ["soso"]),
        ({"type": "plus", "content": TEXT_FORM}, ["so", "soso"], [""]),
        ({"type": "star", "content": TEXT_FORM}, ["", "so", "soso"], ["s"]),
        (separated(), ["", "<c>1.", "<c>1., <c>2</c>"], ["<c>1.<c>2.", "<c>1., ", "so"]),
        (separated(at_least_one=True), ["<c>1.", "<c>1., <c>2</c>, <c>3."], [""]),
        (separated(at_least_one=True, stop_after_first=True), ["<c>1."], ["", "<c>1., <c>2."]),
        (separated(stop_after_first=True, separator=""), ["", "<c>1."], ["<c>1.<c>2."]),
        (
            {"type": "or", "elements": [CALL, {"type": "json_schema", "json_schema": {"type": "object"}}]},
            ["<c>1.", '{"a": 1}'],
            ["1", "[]"],
        ),
    ],
)
def test_parts_of_structural_tags(form: object, accepted: list[str], refused: list[str]) -> None:
    tag = json.dumps({"type": "structural_tag", "format": form})
    assert [output for output in accepted if not accepts("structural_tag", tag, output)] == []
    assert [output for output in refused if accepts("structural_tag", tag, output)] == []


def test_a_text_may_spell_control_tokens(tmp_path: Path) -> None:
    tokenizer_files.write(tmp_path)
    end, user = 256, 257
    vocabulary = Vocabulary.of_tokenizer((tmp_path / "tokenizer.json").read_text(), 300, [end])
    for form in (
        {"type": "const_string", "value": "a<|user|>b<|no|>"},
        {"type": "sequence", "elements": [
            {"type": "const_string", "value": "a"}, {"type": "token", "token": user},
            {"type": "const_string", "value": "b<|no|>"},
        ]},
    ):  # fmt: skip
        at = compile_grammar(vocabulary, GrammarSpec("structural_tag", json.dumps({"format": form}))).start()
        output = [ord("a"), user, *b"b<|no|>", end]
        assert at.allowed_prefix(output) == len(output)
        assert at.allowed_prefix(list(b"a<|user|>")) == 1


def test_a_trigger_may_be_a_control_token(tmp_path: Path) -> None:
    tokenizer_files.write(tmp_path)
    end, user = 256, 257
    vocabulary = Vocabulary.of_tokenizer((tmp_path / "tokenizer.json").read_text(), 300, [end])
    assert vocabulary.size == 300
    structure = {"begin": "<|user|>x", "schema": {"type": "integer"}, "end": ""}
    tag = json.dumps({"structures": [structure], "triggers": ["<|user|>"]})
    at = compile_grammar(vocabulary, GrammarSpec("structural_tag", tag)).start()
    assert at.allowed_prefix([ord("a"), user, ord("x"), ord("1"), end]) == 5
    assert at.allowed_prefix([*b"<|user|>y", end]) == 10


def nested(lists: int) -> str:
    """Return the schema of a constant that is nested so deeply, in one object more."""
    return '{"const": ' + "[" * lists + "]" * lists + "}"


DEEP = '{"not_a_keyword": ' * 65 + "{}" + "}" * 65
WIDE = json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(600)}})
MULTIPLES = "multipleOf: numbers must come to at most 20000 together, but powers of ten"
MANY_PATTERNS = "must combine at most 8 patterns or formats of a value"
NEEDS_ITSELF = json.dumps(
    {"type": "object", "properties": {"a": {"items": [1], "$ref": "#"}}, "required": ["a"]}
)
RINGS = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{(i + 1) % 90}"}} for i in range(90)},
}
INHERITED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "entity": {"properties": {f"p{i}": {"type": "string", "format": "date"} for i in range(9)}},
        "node": {
            "allOf": [
                {"$ref": "#/$defs/entity"},
                {"properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
            ],
        },
    },
}
MULTIPLE = {"type": "json_schema", "json_schema": {"multipleOf": 19997}}
PATTERNS = {"allOf": [{"pattern": f"a{i}"} for i in range(5)]}
DRAFT_4 = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "$ref": "#/definitions/d",
        "x": {"q": {}},
        "definitions": {
            "d": {
                "id": "http://o/",
                "properties": {"p": {"$ref": "#/x/q"}},
                "x": {"q": {"type": "integer", "multipleOf": 200_003}},
            }
        },
    }
)
LONG_PATTERN = json.dumps({"format": {"type": "regex", "pattern": "a" * 8193}})
REFUSED: list[tuple[Kind, str, str]] = [
    ("json_schema", "[1]", "must be a JSON object"),
    ("json_schema", "{", "must be JSON, got: "),
    ("json_schema", '{"const": NaN}', "NaN is no number of JSON"),
    ("json_schema", '{"type": "number", "multipleOf": NaN}', "NaN is no number of JSON"),
    ("json_schema", '{"type": "number", "minimum": -Infinity}', "-Infinity is no number of JSON"),
    ("json_schema", '{"type": "number", "multipleOf": 1e400}', "1e400 is too large"),
    ("grammar", 'start: %json {"multipleOf": Infinity}', "Infinity is no number of JSON"),
    ("json_schema", '{"const": "\\ud800"}', "must be JSON in Unicode, got a lone surrogate"),
    (
        "json_schema",
        '{"const": 9007199254740993}',
        "must have integers of at most 2**53, got",
    ),
    ("json_schema", '{"enum": [1, {"a": [123456789012345678]}]}', "must have integers of at most 2**53"),
    ("json_schema", '{"type": "integer", "minimum": -9007199254740993}', "minimum must be at most 2**53"),
    ("json_schema", f'{{"const": {"9" * 400}}}', "must have integers of at most 2**53"),
    ("json_schema", '{"$ref": "#/x/a", "x": {"a": {"multipleOf": 200003}}}', MULTIPLES),
    ("json_schema", '{"$ref": "#/c/A", "c": {"A": {"const": "a\\u0001b"}}}', "control character"),
    ("json_schema", '{"$ref": "#/c/0", "c": [{"minProperties": 3}]}', "minProperties must be at most one"),
    ("json_schema", '{"$ref": "#/x", "x": {"allOf": [{"$ref": "#/x"}]}}', "must allow a finite answer"),
    ("json_schema", '{"$ref": "#a", "x": {"y": [{"$anchor": "a", "multipleOf": 200003}]}}', MULTIPLES),
    ("json_schema", '{"$ref": "#/allOf/' + "9" * 5000 + '"}', "must be a grammar that can be compiled"),
    ("json_schema", DEEP, "must be nested at most 64 levels deep"),
    ("json_schema", nested(64), "must be nested at most 64 levels deep"),
    ("json_schema", "[" * 60_000, "must be nested at most 64 levels deep"),
    ("json_schema", '{"x-guidance": {"lenient": true}}', "must not have x-guidance"),
    ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
    ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)"}', "look-around"),
    ("json_schema", '{"$ref": "http://example.com/x"}', "must be a grammar that can be compiled"),
    ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
    (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
        "must allow a finite answer",
    ),
    ("json_schema", '{"allOf": [{"$ref": "#"}]}', "must allow a finite answer"),
    ("json_schema", '{"type": "array", "minItems": 1, "items": {"$ref": "#"}}', "must allow a finite answer"),
    ("json_schema", NEEDS_ITSELF, "must allow a finite answer"),
    ("json_schema", '{"properties": {"a": {"x-guidance": {}}}}', "must not have x-guidance"),
    ("json_schema", '{"const": {"a\\u0000": 1}}', "must not have a control character, got 'a\\x00'"),
    ("json_schema", '{"enum": ["\\u007f"]}', "must not have a control character"),
    ("json_schema", '{"properties": {"a\\u0001": {}}}', "must not have a control character"),
    ("json_schema", '{"pattern": "^\\\\x01[ab]$"}', "control character in a pattern"),
    ("json_schema", '{"pattern": "[a\\u0001]"}', "control character in a pattern"),
    ("json_schema", '{"patternProperties": {"\\\\cA": {}}}', "control character in a pattern"),
    (
        "json_schema",
        '{"minProperties": 2}',
        "minProperties must be at most one more than the 0 required, got 2",
    ),
    ("json_schema", '{"title": "' + "x" * 65_536 + '"}', "must be at most 65536 bytes, got 65549"),
    (
        "json_schema",
        WIDE,
        "must allow quick masks, got",
    ),
    ("regex", "", "must not be empty"),
    ("regex", "(", "unclosed group"),
    ("regex", "a" * 8193, "must be at most 8192 bytes, got 8193"),
    ("choice", "{}", "must be a list of strings"),
    ("choice", "[1]", "must be a list of strings"),
    ("choice", "[]", "must have 1 to 1000 entries, got 0"),
    ("choice", json.dumps(["a"] * 1001), "must have 1 to 1000 entries, got 1001"),
    ("grammar", " \n", "must not be empty"),
    ("grammar", "start: x", 'unknown name: "x"'),
    ("grammar", "start: a\na: a", "must allow some text"),
    ("grammar", "start: x\nx[max_tokens=5]: /a+/", "must not have max_tokens="),
    ("grammar", "start: x\nx[temperature = 0.1]: /a+/", "must not have temperature="),
    ("grammar", 'start: x\nx[stop="b"]: /a+/', "must not have stop="),
    ("grammar", '%llguidance {"no_forcing": true}\nstart: "a"', "must not have %llguidance"),
    ("grammar", 'start: %json {"x-guidance": {}}', "must not have x-guidance"),
    ("grammar", 'start: %json {"not": {}}', 'Unimplemented keys: ["not"]'),
    ("grammar", "start: %json [1]", "must be a JSON object"),
    ("grammar", "start: %json {", "must be JSON, got: "),
    *(
        (
            "grammar",
            f"x: <{space}/>\nstart: a\na[max_tokens=5]: /[a-z]+/",
            "must have control tokens as <name>",
        )
        for space in ("\x1c", "\x1f", "\u00a0")
    ),
    ("grammar", 'start: a | b\na: %json {"multipleOf": 19997}\nb: %json {"multipleOf": 19993}', MULTIPLES),
    ("grammar", "start: T\nT: /a/ & /[a-z]/", "must not have intersections (&) or complements (~)"),
    ("grammar", "start: T\nT: /xy/ | ~(~/a/ | ~/[a-z]/)", "must not have intersections (&) or complements"),
    ("grammar", "start: /x\ny/ a\na[max_tokens=5]: /[a-z]+/ # /", "must not have max_tokens="),
    ("grammar", "start: </think> a\na[max_tokens=5]: /[a-z]+/", "must not have max_tokens="),
    ("grammar", 'start: /x\ny/ a # /\na: %json {"multipleOf": 20011}', MULTIPLES),
    ("json_schema", '{"multipleOf": 20011}', MULTIPLES),
    ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}', MULTIPLES),
    ("json_schema", '{"prefixItems": [{"multipleOf": 1.9973}, {"multipleOf": 29}]}', MULTIPLES),
    ("json_schema", '{"multipleOf": 9973, "anyOf": [{"multipleOf": 9967}]}', MULTIPLES),
    ("json_schema", json.dumps({"allOf": [{"pattern": f"a{i}"} for i in range(9)]}), MANY_PATTERNS),
    (
        "json_schema",
        json.dumps({**PATTERNS, "anyOf": [PATTERNS, {"type": "null"}], "oneOf": [{"type": "string"}]}),
        MANY_PATTERNS,
    ),
    ("json_schema", DRAFT_4, MULTIPLES),
    (
        "json_schema",
        json.dumps({"allOf": [{"properties": {"a": {"pattern": f"{i}"}}} for i in range(9)]}),
        MANY_PATTERNS,
    ),
    ("json_schema", "{} {}", "must be JSON, got more at character 2"),
    ("grammar", "root ::= x\n", "must be Lark or GBNF, got: Rule 'x' not found"),
    ("grammar", 'root ::= "a"\n' * 1501, "must have at most 1500 rules and groups together, got 1501"),
    ("structural_tag", "{}", "must be a JSON object with structures or format"),
    ("structural_tag", '{"format": {"type": "any"}}', "format.type must be one of const_string, any_text"),
    ("structural_tag", '{"format": {"type": []}}', "format.type must be one of const_string, any_text"),
    ("structural_tag", LONG_PATTERN, "format.pattern must be at most 8192 bytes, got 8193"),
    ("structural_tag", '{"format": {"type": "or", "elements": []}}', "format.elements must be a list of 1"),
    ("structural_tag", '{"format": {"type": "plus", "content": 1}}', "format.content must be a JSON object"),
    ("structural_tag", '{"format": {"type": "token", "token": "<no>"}}', "format.token must be a token id"),
    ("structural_tag", '{"format": {"type": "token", "token": true}}', "format.token must be a token id"),
    ("structural_tag", '{"format": {"type": "regex", "pattern": "\\ud800"}}', "a lone surrogate"),
    (
        "structural_tag",
        json.dumps({"format": {"type": "or", "elements": [MULTIPLE, MULTIPLE]}}),
        MULTIPLES,
    ),
    (
        "structural_tag",
        '{"format": {"type": "json_schema", "json_schema": {"multipleOf": 20011}}}',
        f"format.json_schema {MULTIPLES}",
    ),
    ("structural_tag", '{"format": {"type": "token", "token": 99999}}', "format.token must be a token id"),
    (
        "structural_tag",
        json.dumps({"format": {"type": "token", "token": VOCABULARY.size}}),
        "format.token must be a token id",
    ),
    ("structural_tag", '{"format": {"type": "regex"}}', "format.pattern must be a string"),
    ("structural_tag", '{"format": {"type": "json_schema"}}', "format must have json_schema"),
    ("structural_tag", '{"structures": [], "triggers": ["<"]}', "format.tags must be a list of 1 to 1000"),
    ("structural_tag", '{"structures": [1], "triggers": ["<"]}', "format.tags[0] must be a JSON object"),
    ("structural_tag", '{"structures": [{}], "triggers": []}', "format.triggers must be a list of 1 to 1000"),
    ("structural_tag", '{"structures": [{}], "triggers": ["<"]}', "format.tags[0].begin must be a string"),
    (
        "structural_tag",
        '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["<"]}',
        "format.tags[0].begin must begin with a trigger",
    ),
    (
        "structural_tag",
        '{"format":{"type":"triggered_tags","triggers":["<"],"tags":[{"begin":"<","end":"","content":{}}]}}',
        "format.tags[0].content.type must be one of",
    ),
]


@pytest.mark.parametrize(("kind", "text", "problem"), REFUSED, ids=[f"{it[0]}: {it[2]}" for it in REFUSED])
def test_a_grammar_out_of_bounds_is_refused_by_its_place(kind: Kind, text: str, problem: str) -> None:
    with pytest.raises(InvalidGrammar) as error:
        compile_grammar(VOCABULARY, GrammarSpec(kind, text))
    assert error.value.field == f"structured_output.{kind}"
    assert problem in error.value.problem
    assert len(error.value.problem) < 520


def test_a_schema_may_be_as_deep_as_the_bound() -> None:
    assert accepts("json_schema", nested(63), "[" * 63 + "]" * 63)


PATTERNED = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": "a"} for i in range(20)},
}
LIST = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        (LIST, '{"value": 1, "next": {"value": 2, "next": null}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a": null}'),
        ({"type": "string", "pattern": "^[^\\x00-\\x1f]+$"}, '"ab"'),
        ({"type": "string", "pattern": "^[\\x00-\\x7f]a$"}, '"xa"'),
        ({"const": "a\nb\t"}, '"a\\nb\\t"'),
        ({"anyOf": [{"type": "string", "pattern": f"^{i}$"} for i in range(20)]}, '"19"'),
        (PATTERNED, json.dumps({f"p{i}": f"{i}a" for i in range(20)})),
        ({"type": "number", "multipleOf": 0.01}, "1.25"),
        ({"type": "integer", "multipleOf": 1000000}, "3000000"),
        ({"type": "integer", "exclusiveMaximum": 1 << 63}, "7"),
        ({"type": "number", "maximum": 1e17}, "7.5"),
        (RINGS, "[[[]]]"),
        (
            {
                "properties": {
                    "a": {"multipleOf": 7},
                    "b": {"multipleOf": 30},
                    "c": {"anyOf": [{"type": "null"}]},
                }
            },
            '{"a": 14, "b": 60, "c": null}',
        ),
        (INHERITED, '{"p0": "2026-11-28", "children": [{"p1": "2026-11-28"}]}'),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a": 1}'),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {}}, "minProperties": 2},
            '{"a": 1, "b": 2}',
        ),
    ],
)
def test_a_schema_that_looks_alike_is_taken(schema: object, output: str) -> None:
    assert accepts("json_schema", json.dumps(schema), output)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"x": {"type": "string", "format": "regex"}}}, "properties.x.format"),
        ({"properties": {"x": {"items": {"not": {}}}}}, "properties.x.items.not"),
        ({"items": {"oneOf": [{"type": "integer"}, {"multipleOf": 2}]}}, "items.oneOf"),
        ({"properties": {"x": {"type": "text"}, "y": {"type": "string"}}}, "properties.x.type"),
        ({"allOf": [{}, {"pattern": "[]"}]}, "allOf[1]"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1 << 60}}}, "$defs.a"),
    ],
)
def test_a_refusal_names_the_place_in_the_schema(schema: object, place: str) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))
    assert str(refused.value).startswith(f"structured_output.json_schema: {place}: must ")


def test_a_refusal_advises_no_option_that_a_request_cannot_set() -> None:
    with pytest.raises(InvalidGrammar, match=r"got: oneOf constraints are not supported$"):
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 2}]}'))


@pytest.mark.parametrize("schema", [{"anyOf": [{"not": {}}, {"not": {}}]}, {"not": {}, "if": {}}])
def test_a_refusal_names_no_place_out_of_several(schema: object) -> None:
    with pytest.raises(InvalidGrammar, match=r"^structured_output.json_schema: must be .*not"):
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("part", [{"pattern": "[]"}, {"not": {}}])
def test_a_refusal_names_no_place_that_is_longer_than_a_message(part: object) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        compile_grammar(
            VOCABULARY, GrammarSpec("json_schema", json.dumps({"properties": {"k" * 30_000: part}}))
        )
    assert str(refused.value).startswith("structured_output.json_schema: must ")


@pytest.mark.parametrize("part", [{"pattern": "[]"}, {"not": {}}])
def test_a_refusal_beside_a_long_name_of_many_values_takes_little_memory(part: object) -> None:
    schema = {"properties": {"x": part}, "const": {"k" * 32_000 + "\U0001f600": [1] * 10_000}}
    tracemalloc.start()
    with pytest.raises(InvalidGrammar, match=r"properties\.x"):
        compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20


def test_the_classes_of_a_pattern_are_read_in_linear_time() -> None:
    with pytest.raises(InvalidGrammar, match="unclosed"):
        compile_grammar(
            VOCABULARY, GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": "[" * 8_000}))
        )


@pytest.mark.parametrize("unfinished", ['"' + '\\"' * 30_000, "/\\/" * 20_000, "\n" * 60_000, "#" * 60_000])
def test_text_that_never_ends_is_read_in_linear_time(unfinished: str) -> None:
    """Each takes minutes by an expression that starts again at each quote or line."""
    assert len(unfinished) <= DEFAULT_LIMITS.most_text_bytes
    with pytest.raises(InvalidGrammar):
        compile_grammar(VOCABULARY, GrammarSpec("grammar", unfinished))
