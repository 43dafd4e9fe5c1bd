"""Structural tags: free text in which given beginnings start a part of a given form.

Both forms that vLLM takes: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and
`{"format": {"type": "triggered_tags", "triggers", "tags": [{"begin", "content", "end"}]}}`, whose contents
are of type json_schema or regex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from galley.core.grammar.limits import GrammarLimits, InvalidGrammar
from galley.core.grammar.pieces import regex_of, with_options
from galley.core.grammar.schema import check_schema
from galley.core.grammar.spec import Kind
from galley.core.grammar.vocabulary import Vocabulary

_KIND: Kind = "structural_tag"
_REST = "TEXT: /(?s:.*)/"


def tag_grammar(tag: Any, vocabulary: Vocabulary, limits: GrammarLimits) -> str:
    """Return the Lark grammar of a parsed structural tag. Raise InvalidGrammar."""
    form = _form(tag)
    triggers = _strings(form, "triggers")
    tags = form.get("tags")
    if not isinstance(tags, list) or not 1 <= len(tags) <= limits.most_choices:
        raise InvalidGrammar(_KIND, f"must have 1 to {limits.most_choices} tags")
    rules = [_rules(index, each, triggers, vocabulary) for index, each in enumerate(tags)]
    some = "(" + " | ".join(f"tag_{index}" for index in range(len(tags))) + ")"
    required = form.get("at_least_one", False)
    if form.get("stop_after_first", False):
        start = some if required else f"{some} | TEXT"
    else:
        start = f"{some}{'+' if required else '*'} TEXT"
    return "\n".join((f"start: {start}", _REST, *rules))


def _form(tag: Any) -> Mapping[str, Any]:
    """Return the second form of a tag in either."""
    if isinstance(tag, dict) and isinstance(structures := tag.get("structures"), list):
        return {"triggers": tag.get("triggers"), "tags": [_of_structure(each) for each in structures]}
    form = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(form, dict):
        raise InvalidGrammar(_KIND, "must be a JSON object with structures or format")
    if form.get("type") != "triggered_tags":
        raise InvalidGrammar(_KIND, "format.type must be triggered_tags")
    return form


def _of_structure(structure: Any) -> Any:
    if not isinstance(structure, dict):
        return structure
    content = {"type": "json_schema", "json_schema": structure.get("schema")}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


def _rules(index: int, tag: Any, triggers: list[str], vocabulary: Vocabulary) -> str:
    """Return the rules of one tag, which begins with one of the triggers."""
    place = f"tags[{index}]"
    if not isinstance(tag, dict):
        raise InvalidGrammar(_KIND, f"{place} must be a JSON object")
    begin, end = tag.get("begin"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise InvalidGrammar(_KIND, f"{place} must have begin and end, both strings")
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise InvalidGrammar(_KIND, f"{place}.begin must begin with a trigger")
    body = f"{_literal(begin[len(trigger) :])} {_content(place, tag.get('content'))} {_literal(end)}"
    special = vocabulary.special_token(trigger)
    if special is not None:
        return f"tag_{index}: TEXT <[{special}]> {body}"
    return f"trigger_{index}[lazy]: TEXT {_literal(trigger)}\ntag_{index}: trigger_{index} {body}"


def _content(place: str, content: Any) -> str:
    match content:
        case {"type": "json_schema", "json_schema": schema}:
            check_schema(_KIND, schema)
            return f"%json {with_options(schema)}"
        case {"type": "regex", "pattern": str(pattern)}:
            return f"/{regex_to_lark(pattern)}/"
    raise InvalidGrammar(_KIND, f"{place}.content.type must be json_schema or regex")


def _literal(text: str) -> str:
    return f"/{regex_of(text)}/" if text else ""


def _strings(form: Mapping[str, Any], name: str) -> list[str]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise InvalidGrammar(_KIND, f"{name} must be a list of strings that are not empty")
    return values
