"""Grammars made to take long, or much memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from galley.core.grammar.spec import GrammarSpec


def _schema(schema: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def _chain(kind: str, length: int, copies: int) -> GrammarSpec:
    """Return a schema of definitions, each of which names the next one several times."""
    names = [f"d{index}" for index in range(length + 1)]
    links = {name: {kind: [{"$ref": f"#/$defs/{after}"}] * copies} for name, after in pairwise(names)}
    return _schema({"$defs": {**links, names[-1]: {"type": "string", "pattern": "a+"}}, "$ref": "#/$defs/d0"})


def _nested(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


def _intersection(kind: str, count: int) -> GrammarSpec:
    patterns = [f"[a-z]{{{index},}}x{index}" for index in range(1, count + 1)]
    if kind == "grammar":
        terminal = " & ".join(f"/.*{each}.*/" for each in patterns)
        return GrammarSpec("grammar", f"start: T\nT: /xy/ | {terminal}")
    return _schema({"allOf": [{"type": "string", "pattern": each} for each in patterns]})


def _options(levels: int, reference: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"$ref": reference}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def _eight(number: int) -> list[dict[str, str]]:
    return [{"pattern": f"[a-z]{{{number}{index},}}x{index}"} for index in range(8)]


def _one_of(options: Mapping[str, object], **others: object) -> GrammarSpec:
    return _schema({"oneOf": [{"$ref": f"#/{name}"} for name in options], **options, **others})


def _same_chain(objects: int, length: int) -> GrammarSpec:
    """Return a schema of objects that a constant tells apart, beside a property by a chain of references."""
    names = [f"c{index}" for index in range(length + 1)]
    links = {name: {"$ref": f"#/{after}"} for name, after in pairwise(names)}
    both = {"type": "object", "required": ["k", "z"]}
    kinds = {
        f"s{index}": {**both, "properties": {"k": {"$ref": "#/c0"}, "z": {"const": f"{index}"}}}
        for index in range(objects)
    }
    return _one_of(kinds, **links, **{names[-1]: {"type": "null"}})


_LAST = {"allOf": [{"$ref": place} for place in ("#/c", "#/c/$defs/c", "#/c/$defs/c/$defs/c")]}
_CONTAINED = {
    "$ref": "#/c/$defs/c/$defs/c/$defs/c",
    "c": {
        "allOf": _eight(1),
        "$defs": {"c": {"allOf": _eight(2), "$defs": {"c": {"allOf": _eight(3), "$defs": {"c": _LAST}}}}},
    },
}
_PROPERTIES = [f"p{index}" for index in range(1500)]
_WIDE = {"type": "object", "properties": {name: {"type": "string"} for name in _PROPERTIES}}
BOMBS: Mapping[str, GrammarSpec] = {
    "deep schema": GrammarSpec("json_schema", _nested(64)),
    "deeper schema": GrammarSpec("json_schema", _nested(5000)),
    "deep list": GrammarSpec("json_schema", '{"enum": ' + "[" * 30_000),
    "long circle of references": _schema(
        {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 1000}"} for i in range(1000)},
            "$ref": "#/$defs/d0",
        }
    ),
    "doubled all of": _chain("allOf", 60, 2),
    "doubled any of": _chain("anyOf", 60, 2),
    "doubled one of": _chain("oneOf", 60, 2),
    "product of any of": _schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(9)]} for i in range(40)]}
    ),
    "many optional properties": _schema(_WIDE),
    "many required properties": _schema({**_WIDE, "required": _PROPERTIES}),
    "huge enumeration": _schema({"enum": [f"value {index * 7919}" for index in range(3500)]}),
    "long constant": _schema({"const": "x" * 60_000}),
    "many items": _schema(
        {"type": "array", "minItems": 10**5, "items": {"type": "array", "minItems": 10**5}}
    ),
    "long string": _schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "large multiple": _schema({"type": "integer", "multipleOf": 999_983}),
    "multiples of primes": _schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    "patterns combined": _intersection("json_schema", 40),
    "the most patterns combined": _intersection("json_schema", 8),
    "patterns of one property": _schema(
        {"allOf": [{"properties": {"a": {"pattern": f"[a-z]{{{i},}}x{i}"}}} for i in range(1, 26)]}
    ),
    "many classes in a pattern": _schema({"pattern": "[" * 60_000}),
    "nested repetitions": GrammarSpec("regex", "(((((.{0,99}){0,99}){0,99}){0,99}){0,99})"),
    "catastrophic backtracking": GrammarSpec("regex", "(x+x+)+y"),
    "exponential states": GrammarSpec("regex", "(a|b)*a(a|b){500}"),
    "optional letters": GrammarSpec("regex", "(a?){4000}a{4000}"),
    "deep groups": GrammarSpec("regex", "(" * 4000 + "a" + ")*" * 2000),
    "many choices": GrammarSpec("choice", json.dumps(["abcdefghij" * 6 + str(i) for i in range(900)])),
    "one megabyte": GrammarSpec("grammar", 'start: "a"\n' + "#" * (1 << 20)),
    "doubled rules": GrammarSpec(
        "grammar",
        "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(60)) + '\nr60: "b"',
    ),
    "empty rules": GrammarSpec(
        "grammar",
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(300)) + '\na300: "" | "x"',
    ),
    "ambiguous rule": GrammarSpec("grammar", 'start: s\ns: s s | "a" | ""'),
    "repeated repetitions": GrammarSpec("grammar", 'start: (((("a" "b"){99}){99}){99}){99}'),
    "terminals combined": _intersection("grammar", 14),
    "terminals combined by complements": GrammarSpec(
        "grammar",
        "start: T\nT: /xy/ | ~("
        + " | ".join(f"~/.*[a-z]{{{index}00,}}x{index}[ab]{{200}}.*/" for index in range(1, 8))
        + ")",
    ),
    "a schema in a grammar after a regex of two lines": GrammarSpec(
        "grammar", 'start: /x\ny/ a # /\na: %json {"multipleOf": 999983}'
    ),
    "multiples beside each other": _schema({"multipleOf": 9973, "anyOf": [{"multipleOf": 9967}]}),
    "multiples in many schemas": GrammarSpec(
        "grammar",
        "start: " + " | ".join(f'%json {{"multipleOf": {number}}}' for number in range(18_001, 20_000)),
    ),
    "a multiple that only a reference leads to": _schema(
        {"$ref": "#/x/a", "x": {"a": {"type": "integer", "multipleOf": 200_003}}}
    ),
    "a schema in a grammar": GrammarSpec("grammar", f"start: %json {_intersection('json_schema', 30).text}"),
    "chain of rules": GrammarSpec(
        "grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
    ),
    "chain of groups": GrammarSpec(
        "grammar",
        "start: r0\n"
        + "\n".join(f'r{i}: ("x" | ("x" | ("x" | r{i + 1})))' for i in range(990))
        + '\nr990: "a"',
    ),
    "nested templates": GrammarSpec("grammar", "start: a\na: " + "a{" * 20_000),
    "chain of references": _schema(
        {"$ref": "#/d0"} | {f"d{i}": {"$ref": f"#/d{i + 1}"} for i in range(2400)} | {"d2400": {}}
    ),
    "chain of options": _schema(
        {"$ref": "#/d0"} | {f"d{i}": _options(12, f"#/d{i + 1}") for i in range(200)}
    ),
    "one of many references": _one_of({f"{index}": {"const": f"{index}"} for index in range(1400)}),
    "one of objects that share a chain of references": _same_chain(100, 400),
    "one of fewer objects that share a chain of references": _same_chain(64, 400),
    "many classes of letters": GrammarSpec("grammar", "start: /" + r"\pL" * 20_000 + "/i"),
    "many classes in a schema": _schema({"pattern": "(?i)" + r"\W" * 4_000}),
    "many letters in a schema": _schema({"pattern": "(?i)" + r"\pL" * 15_000}),
    "many optional groups": GrammarSpec("grammar", "start: /" + "(ab)?" * 11_000 + "/"),
    "multiple with a power of ten": _schema({"type": "integer", "multipleOf": 10_240_000}),
    "multiples with powers of ten": _schema({"allOf": [{"multipleOf": 16_384}, {"multipleOf": 10_000}]}),
    "multiples beyond 32 bits": _schema({"allOf": [{"multipleOf": 1_000_000}, {"multipleOf": 7000}]}),
    "many patterns of names": _schema({"patternProperties": {f"^{i:x}$": {} for i in range(1200)}}),
    "patterns that contain themselves": _schema(_CONTAINED),
    "groups in GBNF": GrammarSpec(
        "grammar",
        "root ::= r0\n"
        + "\n".join(f'r{i} ::= ("x" | ("y" | (r{i + 1} "z")))' for i in range(990))
        + '\nr990 ::= "a"',
    ),
    "chain of rules in GBNF": GrammarSpec(
        "grammar", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(998)) + '\nr998 ::= "a"'
    ),
    "more rules in GBNF": GrammarSpec("grammar", "root ::= r0\n" + "r ::= r\n" * 8000),
    "nested groups in GBNF": GrammarSpec("grammar", "root ::= " + "(" * 30_000),
    "quotes without an end": GrammarSpec("grammar", '"' + '\\"' * 30_000),
    "empty lines": GrammarSpec("grammar", "\n" * 60_000),
    "many tags": GrammarSpec(
        "structural_tag",
        json.dumps(
            {
                "structures": [{"begin": f"<{i}>", "schema": {}, "end": "</>"} for i in range(900)],
                "triggers": ["<"],
            }
        ),
    ),
}


def small_schema(number: int) -> GrammarSpec:
    """Return one of any number of schemas that differ."""
    return _schema({"type": "object", "properties": {f"field {number}": {"type": "integer"}}})
