"""Check a grammar of a request, and write it as llguidance reads it."""

from __future__ import annotations

import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from galley.core.grammar.limits import GrammarLimits, InvalidGrammar
from galley.core.grammar.pieces import read_first_json, read_json, regex_of, with_options
from galley.core.grammar.schemas.costs import check_multiples
from galley.core.grammar.schemas.schema import check_schema
from galley.core.grammar.spec import GrammarSpec, Kind
from galley.core.grammar.tags import tag_grammar
from galley.core.grammar.vocabulary import Vocabulary

# Literals, comments and control tokens as llguidance's lexer of Lark reads them: a regular expression may
# have several lines. They may be unfinished, so that a search takes linear time.
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\])++/?|#[^\n]*|<[^<>\s]++>')
_JSON = "%json"
_LITERAL_OR_JSON = re.compile(rf"{_LITERALS.pattern}|{_JSON}\s*+")
# With `max_tokens` and `stop` a state depends on more than its tokens; a temperature is the request's.
_REFUSED_ATTRIBUTE = re.compile(r"\b(max_tokens|temperature|stop|stop_capture)\s*+=")
# llguidance bounds no work of intersections, A & B, which ~(~A | ~B) is too. `A ~ 3` repeats A.
_REFUSED_OPERATOR = re.compile(r"&|~(?!\s*+\d)")
_OPTIONS, _GBNF = "%llguidance", "::="
_MOST_MESSAGE_CHARS = 200


def native_grammar(spec: GrammarSpec, vocabulary: Vocabulary, limits: GrammarLimits) -> str:
    """Return the grammar as llguidance reads it. Raise InvalidGrammar if it is out of bounds."""
    most = limits.most_regex_bytes if spec.kind == "regex" else limits.most_text_bytes
    size = len(spec.text.encode())
    if size > most:
        raise InvalidGrammar(spec.kind, f"must be at most {most} bytes, got {size}")
    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(with_options({"type": "object"}))
        case "json_schema":
            schema = check_schema(spec.kind, read_json(spec.kind, spec.text, limits), limits)
            return LLMatcher.grammar_from_json_schema(with_options(schema))
        case "regex":
            return LLMatcher.grammar_from_regex(_given(spec))
        case "choice":
            return LLMatcher.grammar_from_regex(_choices(spec, limits))
        case "grammar":
            return LLMatcher.grammar_from_lark(lark(spec.kind, _given(spec), limits))
        case "structural_tag":
            return LLMatcher.grammar_from_lark(
                tag_grammar(read_json(spec.kind, spec.text, limits), vocabulary, limits)
            )


def lark(kind: Kind, text: str, limits: GrammarLimits) -> str:
    """Return a grammar in Lark or GBNF as Lark. Raise InvalidGrammar for what sessions cannot use."""
    if _GBNF in _LITERALS.sub('""', text):
        text = _lark_of_gbnf(kind, text, limits)
    bare = _LITERALS.sub('""', text)
    _check_expressions(kind, text, limits)
    if (found := _REFUSED_ATTRIBUTE.search(bare)) is not None:
        raise InvalidGrammar(kind, f"must not have {found[1]}=")
    if _OPTIONS in bare:
        raise InvalidGrammar(kind, f"must not have {_OPTIONS}")
    if "<" in bare:  # llguidance and Python know other spaces: what follows may not be what it seems
        raise InvalidGrammar(kind, "must have control tokens as <name>, without spaces")
    if _REFUSED_OPERATOR.search(bare) is not None:
        raise InvalidGrammar(kind, "must not have intersections (&) or complements (~)")
    return _with_checked_schemas(kind, text, limits)


def _with_checked_schemas(kind: Kind, text: str, limits: GrammarLimits) -> str:
    """Return a Lark grammar whose schemas (`%json {...}`) are checked and have our options."""
    written, pieces, schemas, end = list[str](), list[str](), list[dict[str, Any]](), 0
    while (found := _LITERAL_OR_JSON.search(text, end)) is not None:
        pieces.append(text[end : found.end()])
        written.append(pieces[-1])
        end = found.end()
        if found[0].startswith(_JSON):
            schema, end = read_first_json(kind, text, end, limits)
            schemas.append(check_schema(kind, schema, limits))
            written.append(with_options(schema))
    check_multiples(kind, schemas)
    pieces.append(text[end:])
    bare = _LITERALS.sub('""', "".join(pieces))
    _check_units(kind, sum(map(bare.count, ":([{")), limits)
    return "".join((*written, text[end:]))


def _check_units(kind: Kind, units: int, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar for many rules and groups: llguidance recurses through them."""
    most = limits.most_grammar_units
    if units > most:
        raise InvalidGrammar(kind, f"must have at most {most} rules and groups together, got {units}")


def _check_expressions(kind: Kind, text: str, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar if the regular expressions are too long together."""
    literals = (found[0] for found in _LITERALS.finditer(text))
    size = sum(len(one.encode()) for one in literals if one[0] == "/" and not one.startswith("//"))
    most = limits.most_regex_bytes
    if size > most:
        raise InvalidGrammar(kind, f"regular expressions must have at most {most} bytes together, got {size}")


def _lark_of_gbnf(kind: Kind, text: str, limits: GrammarLimits) -> str:
    _check_units(kind, text.count(_GBNF) + text.count("("), limits)  # the conversion takes quadratic time
    try:
        return str(gbnf_to_lark(text)).removeprefix(f"{_OPTIONS} {{}}\n")
    except Exception as error:  # it raises nothing narrower
        reason = " ".join(str(error).split())[:_MOST_MESSAGE_CHARS]
        raise InvalidGrammar(kind, f"must be Lark or GBNF, got: {reason}") from error


def _given(spec: GrammarSpec) -> str:
    if not spec.text.strip():
        raise InvalidGrammar(spec.kind, "must not be empty")
    return spec.text


def _choices(spec: GrammarSpec, limits: GrammarLimits) -> str:
    choices = read_json(spec.kind, spec.text, limits)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidGrammar(spec.kind, "must be a list of strings")
    if not 1 <= len(choices) <= limits.most_choices:
        raise InvalidGrammar(spec.kind, f"must have 1 to {limits.most_choices} entries, got {len(choices)}")
    return "|".join(regex_of(choice) for choice in choices)
