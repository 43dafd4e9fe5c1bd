"""What the page on structured output says about keywords of schemas is what a gateway does with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from galley.bench.workloads import EXTRACT, fixed_workload
from galley.core.grammar.compiled import compile_grammar
from galley.core.grammar.limits import DEFAULT_LIMITS, InvalidGrammar
from galley.core.grammar.spec import GrammarSpec
from tests.fakes.vocabularies import byte_vocabulary

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "structured-output.md").read_text()
VOCABULARY = byte_vocabulary()
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
STRING, NUMBER, ARRAY = {"type": "string"}, {"type": "integer"}, {"type": "array"}
HELD: dict[str, Any] = {
    "type": STRING,
    "enum": {"enum": ["a", 1]},
    "const": {"const": "a"},
    "properties": OBJECT,
    "required": OBJECT | {"required": ["a"]},
    "additionalProperties": OBJECT | {"additionalProperties": False},
    "patternProperties": {"type": "object", "patternProperties": {"^a": STRING}},
    "items": ARRAY | {"items": STRING},
    "prefixItems": ARRAY | {"prefixItems": [STRING, NUMBER], "items": False},
    "minItems": ARRAY | {"minItems": 1},
    "maxItems": ARRAY | {"maxItems": 2},
    "minLength": STRING | {"minLength": 1},
    "maxLength": STRING | {"maxLength": 3},
    "pattern": STRING | {"pattern": "^a+$"},
    "minimum": NUMBER | {"minimum": 1},
    "maximum": NUMBER | {"maximum": 9},
    "exclusiveMinimum": NUMBER | {"exclusiveMinimum": 1},
    "exclusiveMaximum": NUMBER | {"exclusiveMaximum": 9},
    "multipleOf": NUMBER | {"multipleOf": 5},
    "anyOf": {"anyOf": [STRING, NUMBER]},
    "allOf": {"allOf": [OBJECT, {"required": ["a"]}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
}
REFUSED: dict[str, Any] = {
    "not": {"not": STRING},
    "if": {"if": STRING, "then": {"minLength": 2}},
    "then": {"if": STRING, "then": {"minLength": 2}},
    "else": {"if": STRING, "else": {"minimum": 2}},
    "contains": ARRAY | {"contains": STRING},
    "uniqueItems": ARRAY | {"uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": OBJECT}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "unevaluatedItems": ARRAY | {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$ref": {"$ref": "https://example.org/schema.json"},
}


def compile_schema(schema: Any) -> None:
    compile_grammar(VOCABULARY, GrammarSpec("json_schema", json.dumps(schema)))


def row(marker: str) -> set[str]:
    """Return the names in the first cell of the row that contains `marker`."""
    [line] = [line for line in PAGE.splitlines() if line.startswith("|") and marker in line]
    return set(re.findall(r"`([^`]+)`", line.split("|")[1]))


def test_the_page_names_the_keywords_that_are_tried_here() -> None:
    assert row("held by every answer") == HELD.keys()
    assert row("`unevaluatedItems`") == REFUSED.keys()


@pytest.mark.parametrize("keyword", HELD)
def test_a_keyword_that_the_page_promises_can_be_compiled(keyword: str) -> None:
    compile_schema(HELD[keyword])


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_the_page_rules_out_is_refused(keyword: str) -> None:
    with pytest.raises(InvalidGrammar):
        compile_schema(REFUSED[keyword])


def test_the_formats_of_the_page_are_known_and_others_of_json_schema_refused() -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith("| `format`")]
    for name in re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])[1:]:
        compile_schema(STRING | {"format": name})
    compile_schema(STRING | {"format": "password"})
    with pytest.raises(InvalidGrammar):
        compile_schema(STRING | {"format": "idn-email"})


def test_one_of_is_taken_if_no_value_fits_two() -> None:
    compile_schema({"oneOf": [STRING, NUMBER]})
    with pytest.raises(InvalidGrammar):
        compile_schema({"oneOf": [{"type": "number"}, NUMBER]})


def test_the_bounds_of_the_page_are_those_of_the_gateway() -> None:
    limits = DEFAULT_LIMITS
    assert f"| {limits.most_text_bytes // 1024} KiB, nested at most {limits.most_depth} levels |" in PAGE
    assert f"| {limits.most_regex_bytes // 1024} KiB |" in PAGE
    assert f"| 1 to {limits.most_choices:,} |" in PAGE
    assert f"| {limits.most_grammar_units:,} |" in PAGE


def test_the_schemas_of_the_benchmark_can_be_compiled() -> None:
    for prompt in fixed_workload(EXTRACT).prompts:
        compile_schema(prompt.schema)
