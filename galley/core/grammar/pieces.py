"""Parts of grammars: JSON of a request, schemas, and text that stands for itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from galley.core.grammar.limits import GrammarLimits, InvalidGrammar
from galley.core.grammar.schemas.patterns import rust_pattern
from galley.core.grammar.schemas.schema import GUIDANCE
from galley.core.grammar.schemas.subschemas import (
    as_dict,
    as_list,
    certain_subschemas,
    depth,
    refers_by_path,
    texts,
)
from galley.core.grammar.schemas.unions import Unions
from galley.core.grammar.spec import Kind

# Spaces stand where `json.dumps` writes them and nowhere else. Otherwise a model may write spaces without
# end, and fewer tokens are certain. Names have one form only: by `\u` escapes a model could write a property
# that the schema knows as if it did not.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


_LAST = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
_SAYS_NOTHING: Mapping[str, Sequence[Any]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
}
# Those of JSON Schema. A validator takes others, such as "password", for comments.
_FORMATS = re.compile(
    "date(-time)?|time|duration|(idn-)?(email|hostname)|ipv[46]|[ui]ri(-reference)?|uri-template|uuid"
    "|(relative-)?json-pointer|regex"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def read_json(kind: Kind, text: str, limits: GrammarLimits) -> Any:
    """Return the parsed text. Raise InvalidGrammar if it is no JSON or nested too deeply."""
    value, end = read_first_json(kind, text, len(text) - len(text.lstrip()), limits)
    if text[end:].strip():
        raise InvalidGrammar(kind, f"must be JSON, got more at character {end}")
    return value


def read_first_json(kind: Kind, text: str, start: int, limits: GrammarLimits) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and its end. Raise InvalidGrammar as `read_json`."""
    deep = f"must be nested at most {limits.most_depth} levels deep"
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise InvalidGrammar(kind, deep) from None
    except ValueError as error:
        raise InvalidGrammar(kind, f"must be JSON, got: {error}") from None
    if depth(value) > limits.most_depth:
        raise InvalidGrammar(kind, deep)
    if any(_SURROGATE.search(one) for one in texts(value)):
        raise InvalidGrammar(kind, "must be JSON in Unicode, got a lone surrogate")
    return value, end


def with_options(schema: dict[str, Any]) -> str:
    """Return a schema as it stands within a grammar.

    llguidance applies keywords in their order: those that combine schemas come last, so that what stands
    beside them is known, but where properties do: their order is that of the answer. Keywords that say
    nothing are left out, where it would refuse them. Patterns are written as it reads them. A oneOf whose
    references lead to schemas that exclude each other becomes an anyOf.
    """
    parts = certain_subschemas(schema)
    known, by_path = {id(part) for part in parts}, refers_by_path(schema, parts)
    unions = Unions(schema)

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(one) for one in value]
        if not isinstance(value, dict):
            return value
        names = list(value)
        if id(value) not in known:
            return {name: written(value[name]) for name in names}
        kept = [name for name in names if not _says_nothing(name, value[name])]
        names = kept if "properties" in value else sorted(kept, key=_LAST.__contains__)
        fields = {name: written(_with_patterns(name, value[name])) for name in names}
        if by_path and "anyOf" not in value and _has_exclusive_references(unions, value.get("oneOf")):
            # Beside it llguidance takes no references in a circle.
            fields.pop("discriminator", None)
            return {("anyOf" if name == "oneOf" else name): each for name, each in fields.items()}
        return fields

    return json.dumps({**written(schema), GUIDANCE: _JSON_OPTIONS})


def _says_nothing(name: str, value: Any) -> bool:
    if name == "format" and isinstance(value, str):
        return not _FORMATS.fullmatch(value)
    return value in _SAYS_NOTHING.get(name, ())


def _has_exclusive_references(unions: Unions, schemas: Any) -> bool:
    return any("$ref" in as_dict(each) for each in as_list(schemas)) and unions.are_exclusive(schemas)


def _with_patterns(name: str, value: Any) -> Any:
    """Return the value of a keyword, its patterns as Rust's `regex` writes them."""
    if name == "pattern" and isinstance(value, str):
        return rust_pattern(value)
    if name == "patternProperties" and isinstance(value, dict):
        return {rust_pattern(pattern): each for pattern, each in value.items()}
    return value


def regex_of(text: str) -> str:
    """Return a regular expression that matches `text` alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
