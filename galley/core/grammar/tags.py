"""Structural tags: JSON that describes text by parts, such as calls of tools between given marks.

Both forms that vLLM takes: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and
`{"format": {"type": ...}}`, whose parts are nested. A text that spells a control token of the model
stands for that token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from llguidance import regex_to_lark

from galley.core.grammar.limits import GrammarLimits, InvalidGrammar
from galley.core.grammar.pieces import regex_of, with_options
from galley.core.grammar.schemas.costs import check_multiples
from galley.core.grammar.schemas.schema import check_schema
from galley.core.grammar.spec import Kind
from galley.core.grammar.vocabulary import Vocabulary

_KIND: Kind = "structural_tag"
_REST = "TEXT: /(?s:.*)/"
_FIRST_RULE = 3
"""The line of the first rule of a part."""
_Form: TypeAlias = Mapping[str, Any]


def tag_grammar(tag: Any, vocabulary: Vocabulary, limits: GrammarLimits) -> str:
    """Return the Lark grammar of a parsed structural tag. Raise InvalidGrammar."""
    rules = _Rules(vocabulary, limits)
    start = rules.part(_form(tag), "format")
    check_multiples(_KIND, [schema for _, schema in rules.schemas.values()])
    return "\n".join((f"start: {start}", _REST, *rules.lines))


def schema_of_line(
    tag: Any, vocabulary: Vocabulary, limits: GrammarLimits, line: int
) -> tuple[str, dict[str, Any]] | None:
    """Return the place in a tag, and the schema, of a line of its grammar, from 1; None if it has none."""
    rules = _Rules(vocabulary, limits)
    rules.part(_form(tag), "format")
    return rules.schemas.get(line - _FIRST_RULE)


def _form(tag: Any) -> Any:
    """Return the second form of a tag in either."""
    if isinstance(tag, dict) and isinstance(structures := tag.get("structures"), list):
        tags = [_of_structure(each) for each in structures]
        return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    form = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(form, dict):
        raise InvalidGrammar(_KIND, "must be a JSON object with structures or format")
    return form


def _of_structure(structure: Any) -> Any:
    if not isinstance(structure, dict):
        return structure
    content = {"type": "json_schema", "json_schema": structure.get("schema")}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


class _Rules:
    """The rules of a grammar; each part of a tag becomes one, and is named where it is used."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.lines: list[str] = []
        self.schemas: dict[int, tuple[str, dict[str, Any]]] = {}
        """By the index of its line, each with its place."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._writers: dict[str, Callable[[_Form, str], str]] = {
            "const_string": lambda form, place: self._literal(_string(form, "value", place)),
            "any_text": lambda _form, _place: "TEXT",
            "regex": self._regex,
            "json_schema": self._json,
            "token": self._token,
            "sequence": lambda form, place: " ".join(self._parts(form, "elements", place)),
            "or": lambda form, place: " | ".join(self._parts(form, "elements", place)),
            "optional": lambda form, place: f"{self._content(form, place)}?",
            "plus": lambda form, place: f"{self._content(form, place)}+",
            "star": lambda form, place: f"{self._content(form, place)}*",
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def part(self, form: Any, place: str) -> str:
        """Add the rule of a part; return its name."""
        if not isinstance(form, dict):
            raise InvalidGrammar(_KIND, f"{place} must be a JSON object")
        kind = form.get("type")
        write = self._writers.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise InvalidGrammar(_KIND, f"{place}.type must be one of {', '.join(self._writers)}")
        return self._add(write(form, place))

    def _add(self, expression: str, options: str = "") -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {expression}")
        return name

    def _parts(self, form: _Form, name: str, place: str) -> list[str]:
        forms = self._list(form, name, place)
        return [self.part(each, f"{place}.{name}[{index}]") for index, each in enumerate(forms)]

    def _content(self, form: _Form, place: str) -> str:
        return self.part(form.get("content"), f"{place}.content")

    def _list(self, form: _Form, name: str, place: str) -> list[Any]:
        values = form.get(name)
        most = self._limits.most_choices
        if not isinstance(values, list) or not 1 <= len(values) <= most:
            raise InvalidGrammar(_KIND, f"{place}.{name} must be a list of 1 to {most} entries")
        return values

    def _regex(self, form: _Form, place: str) -> str:
        pattern = _string(form, "pattern", place)
        size, most = len(pattern.encode()), self._limits.most_regex_bytes
        if size > most:
            raise InvalidGrammar(_KIND, f"{place}.pattern must be at most {most} bytes, got {size}")
        return f"/{regex_to_lark(pattern)}/"

    def _json(self, form: _Form, place: str) -> str:
        if "json_schema" not in form:
            raise InvalidGrammar(_KIND, f"{place} must have json_schema")
        try:
            schema = check_schema(_KIND, form["json_schema"], self._limits)
        except InvalidGrammar as error:
            raise InvalidGrammar(_KIND, f"{place}.json_schema {error.problem}") from None
        self.schemas[len(self.lines)] = f"{place}.json_schema", schema
        return f"%json {with_options(form['json_schema'])}"

    def _token(self, form: _Form, place: str) -> str:
        token = form.get("token")
        if isinstance(token, str):
            token = self._vocabulary.special_token(token)
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocabulary.size:
            raise InvalidGrammar(_KIND, f"{place}.token must be a token id, or the text of a control token")
        return f"<[{token}]>"

    def _tag(self, form: _Form, place: str) -> str:
        return f"{self._mark(form, 'begin', place)} {self._content(form, place)} {self._ends(form, place)}"

    def _mark(self, form: _Form, name: str, place: str) -> str:
        value = form.get(name)
        return (
            self.part(value, f"{place}.{name}")
            if isinstance(value, dict)
            else self._literal(_string(form, name, place))
        )

    def _ends(self, form: _Form, place: str) -> str:
        ends = form.get("end")
        if not isinstance(ends, list):
            return self._mark(form, "end", place)
        literals = [
            self._literal(_string({"end": end}, "end", place)) for end in self._list(form, "end", place)
        ]
        return self._add(" | ".join(literals))

    def _separated(self, form: _Form, place: str) -> str:
        tag = self._tags(form, place, self._tag)
        separator = self._literal(_string(form, "separator", place))
        many = tag if form.get("stop_after_first", False) else f"{tag} ({separator} {tag})*"
        return many if form.get("at_least_one", False) else self._add(many) + "?"

    def _triggered(self, form: _Form, place: str) -> str:
        triggers = [
            _string({"trigger": each}, "trigger", place) for each in self._list(form, "triggers", place)
        ]
        tag = self._tags(form, place, lambda each, at: self._triggered_tag(each, at, triggers))
        required = form.get("at_least_one", False)
        if form.get("stop_after_first", False):
            return tag if required else f"{tag} | TEXT"
        return f"{tag}{'+' if required else '*'} TEXT"

    def _tags(self, form: _Form, place: str, write: Callable[[_Form, str], str]) -> str:
        """Add the rule of one of the tags; return its name."""
        names = []
        for index, tag in enumerate(self._list(form, "tags", place)):
            at = f"{place}.tags[{index}]"
            if not isinstance(tag, dict):
                raise InvalidGrammar(_KIND, f"{at} must be a JSON object")
            names.append(self._add(write(tag, at)))
        return self._add(" | ".join(names))

    def _triggered_tag(self, tag: _Form, place: str, triggers: list[str]) -> str:
        begin = _string(tag, "begin", place)
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            raise InvalidGrammar(_KIND, f"{place}.begin must begin with a trigger")
        rest = self._literal(begin[len(trigger) :])
        body = f"{rest} {self._content(tag, place)} {self._ends(tag, place)}"
        special = self._vocabulary.special_token(trigger)
        if special is not None:
            return f"TEXT <[{special}]> {body}"
        text = self._add(f"TEXT {self._literal(trigger)}", "[lazy]")
        return f"{text} {body}"

    def _literal(self, text: str) -> str:
        """Return the expression of a text; one that is empty matches nothing but the empty text."""
        pieces = self._vocabulary.split_control_tokens(text)
        return " ".join(f"<[{one}]>" if isinstance(one, int) else f"/{regex_of(one)}/" for one in pieces)


def _string(form: _Form, name: str, place: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise InvalidGrammar(_KIND, f"{place}.{name} must be a string")
    return value
