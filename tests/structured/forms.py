"""Requests whose answers must have a form: schemas of the set, regular expressions, choices, grammars, tags.

Some schemas come with a prediction of the answer, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from galley.client.options import GenerateOptions, Message
from galley.core.grammar.spec import GrammarSpec
from tests.structured.suite import SchemaCase, taken_cases

TEMPERATURES, SEEDS = (0.0, 0.7, 1.0), 2
"""Each form is asked for at each temperature, above 0 with so many seeds."""
MAX_TOKENS = 64
PREDICTED, PREDICTED_CHARS = 4, 24
"""Schemas that are asked for with a prediction, too, and how long it is at least."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer, as the client's option and as what the target makes of it."""

    name: str
    option: GenerateOptions
    spec: GrammarSpec | None
    """None: unfinished answers are not checked."""
    is_right: Callable[[str], bool]
    """Return True if a finished answer has the form. It uses nothing of llguidance."""


@dataclass(frozen=True, slots=True)
class FormRequest:
    form: Form
    prompt: tuple[Message, ...]
    options: GenerateOptions

    def __str__(self) -> str:
        return f"{self.form.name}, temperature {self.options['temperature']}, seed {self.options['seed']}"


def requests(
    count: int | None = None, temperatures: Sequence[float] = TEMPERATURES, seeds: int = SEEDS
) -> list[FormRequest]:
    """Return the first `count` requests, or all: each form at one temperature, then each at the next one."""
    schemas = varied_schemas()
    predicted = [case for case in schemas if case.valid and len(case.valid[0]) >= PREDICTED_CHARS]
    forms = [*_other_forms(), *_tag_forms(), *map(_of_prediction, predicted[:PREDICTED])]
    forms += map(_of_schema, schemas)
    return with_variants(forms, temperatures, seeds, MAX_TOKENS)[:count]


def with_variants(
    forms: Sequence[Form], temperatures: Sequence[float], seeds: int, max_tokens: int
) -> list[FormRequest]:
    """Return requests of each form at each temperature, above 0 with `seeds` seeds; no two share a seed."""
    variants = [temperature for temperature in temperatures for _ in range(seeds if temperature else 1)]
    return [
        _request(form, variants[(at + turn) % len(variants)], at + turn * len(forms), max_tokens)
        for turn in range(len(variants))
        for at, form in enumerate(forms)
    ]


def _request(form: Form, temperature: float, seed: int, max_tokens: int) -> FormRequest:
    prompt = (Message("user", f"Make up an example: {form.name}. Write the example only."),)
    options = GenerateOptions(temperature=temperature, seed=seed, max_tokens=max_tokens, **form.option)
    return FormRequest(form, prompt, options)


def varied_schemas() -> list[SchemaCase]:
    """Return the first schema of each group, then the second of each, and so on."""
    groups: dict[str, list[SchemaCase]] = {}
    for case in taken_cases():
        groups.setdefault(case.group, []).append(case)
    longest = max(map(len, groups.values()))
    return [group[at] for at in range(longest) for group in groups.values() if at < len(group)]


def _of_schema(case: SchemaCase) -> Form:
    return Form(case.name, {"schema": case.schema}, GrammarSpec("json_schema", case.text), case.checker())


def _of_prediction(case: SchemaCase) -> Form:
    form, text = _of_schema(case), case.valid[0]
    return replace(form, name=f"{form.name}, such as {text}", option={**form.option, "prediction": text})


def _of_tag(name: str, tag: Mapping[str, Any], is_right: Callable[[str], bool]) -> Form:
    return Form(name, {"structural_tag": tag}, GrammarSpec("structural_tag", json.dumps(tag)), is_right)


def _of_regex(name: str, regex: str) -> Form:
    def is_right(text: str) -> bool:
        return re.fullmatch(regex, text) is not None

    return Form(name, {"regex": regex}, GrammarSpec("regex", regex), is_right)


def _of_choices(name: str, *choices: str) -> Form:
    spec = GrammarSpec("choice", json.dumps(choices))
    return Form(name, {"choice": choices}, spec, lambda text: text in choices)


def _of_grammar(name: str, lark: str, is_right: Callable[[str], bool]) -> Form:
    return Form(name, {"grammar": lark}, GrammarSpec("grammar", lark), is_right)


def _is_balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}[char]
        if depth < 0:
            return False
    return depth == 0


def _matches(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


_SUM = 'start: N (" + " N)+ " = " N\nN: /[0-9]{1,3}/\n'
_BRACKETS = 'start: "(" start* ")"\n'
_QUERY = """
start: "SELECT " COLUMN (", " COLUMN)* " FROM " TABLE (" WHERE " COLUMN " > " /[0-9]{1,4}/)?
COLUMN: "id" | "name" | "price"
TABLE: /[a-z]{3,10}/
"""
_COLUMN = "(id|name|price)"
_LIST = 'start: ("- " /[a-z ]{3,12}/ "\\n"){2,4}\n'


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [30, 40, 50]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_OBJECT = r'\{"name": "([^"\\]|\\.){0,12}", "age": [345]0\}'
_TAG = {"begin": "<person>", "content": {"type": "json_schema", "json_schema": _PERSON}, "end": "</person>"}
_STRUCTURE = {"begin": "<person>", "schema": _PERSON, "end": "</person>"}


def _tag_forms() -> list[Form]:
    people = {"type": "tags_with_separator", "tags": [_TAG], "separator": ", ", "at_least_one": True}
    word = {"type": "regex", "pattern": "[a-z]{2,8}"}
    colon = {"type": "const_string", "value": ": "}
    entry = {"type": "sequence", "elements": [word, colon, {"type": "tag", **_TAG}]}
    triggered = {"structures": [_STRUCTURE], "triggers": ["<person>"]}
    tag = f"<person>{_OBJECT}</person>"
    return [
        _of_tag("people", {"format": people}, _matches(f"{tag}(, {tag})*")),
        _of_tag("a word and a person", {"format": entry}, _matches(f"[a-z]{{2,8}}: {tag}")),
        _of_tag("a sentence, then <person>", triggered, _matches(f"(?s:((?!<person>).|{tag})*)")),
    ]


def _other_forms() -> list[Form]:
    return [
        _of_regex("a phone number", r"\+[0-9]{1,3} [0-9]{6,10}"),
        _of_choices("an animal", "cat", "caterpillar", "dog", "dogfish", "the whale"),
        _of_grammar("a sum", _SUM, _matches(r"\d{1,3}( \+ \d{1,3})+ = \d{1,3}")),
        _of_regex("a version", r"v[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,2})?(-(alpha|beta|rc)[1-9])?"),
        _of_choices("yes or no", "yes", "no"),
        _of_grammar("brackets", _BRACKETS, _is_balanced),
        _of_regex("a date of this century", r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
        _of_choices("a mood, in French", "très content", "content", "fâché", "triste"),
        _of_grammar(
            "a query",
            _QUERY,
            _matches(rf"SELECT {_COLUMN}(, {_COLUMN})* FROM [a-z]{{3,10}}( WHERE {_COLUMN} > \d{{1,4}})?"),
        ),
        _of_regex("one word after another", r"[A-Z][a-z]{1,8}( [a-z]{1,8}){2,6}\."),
        _of_choices("one of two sentences", "The sea is calm today.", "The sea is rough today."),
        _of_grammar("a list", _LIST, _matches(r"(- [a-z ]{3,12}\n){2,4}")),
    ]
