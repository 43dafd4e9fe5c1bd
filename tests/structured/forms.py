"""Requests whose answers must have a form: schemas of the set, regular expressions, choices and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from galley.client.options import GenerateOptions, Message
from galley.core.grammar.spec import GrammarSpec
from tests.structured.suite import SchemaCase, taken_cases

TEMPERATURES = (0.0, 0.7, 1.5)
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer, as the client's option and as what the target makes of it."""

    name: str
    option: GenerateOptions
    spec: GrammarSpec
    is_right: Callable[[str], bool]
    """Return True if a finished answer has the form. It uses nothing of llguidance."""


@dataclass(frozen=True, slots=True)
class FormRequest:
    form: Form
    prompt: tuple[Message, ...]
    options: GenerateOptions

    def __str__(self) -> str:
        return f"{self.form.name}, temperature {self.options['temperature']}, seed {self.options['seed']}"


def requests(count: int) -> list[FormRequest]:
    """Return requests of all forms, each at the temperatures by turns, and with a seed of its own."""
    forms = [*_other_forms(), *map(_of_schema, _most_varied_first(taken_cases()))]
    return [_request(forms[number % len(forms)], number) for number in range(count)]


def _request(form: Form, number: int) -> FormRequest:
    prompt = (Message("user", f"Make up an example: {form.name}. Write the example only."),)
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    options = GenerateOptions(temperature=temperature, seed=number, max_tokens=MAX_TOKENS, **form.option)
    return FormRequest(form, prompt, options)


def _most_varied_first(cases: Sequence[SchemaCase]) -> list[SchemaCase]:
    """Return the first case of each group, then the second of each, and so on."""
    groups: dict[str, list[SchemaCase]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    longest = max(map(len, groups.values()))
    return [group[at] for at in range(longest) for group in groups.values() if at < len(group)]


def _of_schema(case: SchemaCase) -> Form:
    return Form(case.name, {"schema": case.schema}, GrammarSpec("json_schema", case.text), case.checker())


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
