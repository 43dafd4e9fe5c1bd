"""The forms in which models write calls, chosen by what the model's chat template says of tools.

A format reads calls (`parser`) and describes them as a structural tag, for answers that must be calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from galley.common.models.tokenizer import Tokenizer
from services.gateway.http.tools.deltas import Parser
from services.gateway.http.tools.parsers import BareCalls, hermes_calls, mistral_calls

Form: TypeAlias = dict[str, Any]
"""A part of a structural tag."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One form of calls.

    `parser` takes how calls begin amid text, the `trigger`. `marks` are texts of the form that may be
    control tokens, which decoded text leaves out. A call is described as `begin`, its arguments, and `end`;
    `%name` and `%id` in `begin` stand for its name and id. With a `key`, a call is a JSON object that has its
    arguments there.
    """

    parser: Callable[[str], Parser]
    begin: str = ""
    key: str = ""
    end: str = ""
    before: str = ""
    separator: str = ""
    after: str = ""
    marks: tuple[str, ...] = ()
    may_repeat: bool = True
    trigger: str = ""
    """How a call begins amid text; empty if calls stand alone."""
    id_chars: int = 0
    """Length of an id that the model's template takes; 0: any."""

    def call_id(self, session_id: str, index: int) -> str:
        """Return the id of a call, the same at each gateway."""
        digest = blake2b(f"{session_id}/{index}".encode(), digest_size=12, person=b"galley.call").hexdigest()
        return digest[: self.id_chars] if self.id_chars else f"call_{digest}"

    def calls(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Form:
        """Return the form of an answer that is one call of `tools`, or with `parallel` one or more."""
        if self.key:
            return one_of(*(self._object(tool["function"]) for tool in tools))
        calls: Form = {
            "type": "tags_with_separator",
            "tags": [self._call(tool["function"]) for tool in tools],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not (parallel and self.may_repeat),
        }
        return _sequence(_text(self.before), calls, _text(self.after))

    def optional_calls(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Form | None:
        """Return the form of a text in which all calls are of `tools`; None if calls stand alone."""
        if not self.trigger:
            return None
        tags = [self._call(tool["function"]) for tool in tools]
        once = {"stop_after_first": not parallel}
        if self.before:
            inner: Form = {"type": "tags_with_separator", "tags": tags, "separator": self.separator}
            inner |= {"at_least_one": True, **once}
            tags = [{"type": "tag", "begin": self.before, "content": inner, "end": self.after}]
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, **once}

    def _call(self, function: Mapping[str, Any]) -> Form:
        begin, _, rest = self.begin.partition("%id")
        identified = [{"type": "regex", "pattern": f"[A-Za-z0-9]{{{self.id_chars}}}"}, *_text(rest)]
        arguments = {"type": "json_schema", "json_schema": _parameters(function)}
        return {
            "type": "tag",
            "begin": begin.replace("%name", function["name"]),
            "content": _sequence(identified if rest else [], arguments),
            "end": self.end,
        }

    def _object(self, function: Mapping[str, Any]) -> Form:
        arguments = _moved(_parameters(function), f"#/properties/{self.key}")
        call = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.key: arguments},
            "required": ["name", self.key],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": call}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the arguments, which are an object; a function without one takes none."""
    return {**(function.get("parameters") or _NONE), "type": "object"}


def refused_tool(problem: str) -> tuple[int, str] | None:
    """Return the number of the tool that an error of a form of calls is about, and what is wrong.

    None if the error does not tell.
    """
    found = _REFUSED.match(problem)
    return found and (int(found[1] or found[2]), problem[found.end() :])


def _moved(schema: Any, place: str) -> Any:
    """Return a schema as a part of another, at `place`: its references lead to its own parts."""
    if isinstance(schema, list):
        return [_moved(part, place) if isinstance(part, list | dict) else part for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    reference = str(schema.get("$ref"))
    return {**moved, "$ref": place + reference[1:]} if reference.startswith("#") else moved


# The calls of Llama are objects that have the schema of the arguments as a part.
_REFUSED = re.compile(
    r"format\S*?(?:\.tags\[(\d+)\]\.content(?:\.elements\[\d+\])?\.json_schema "
    r"|\.elements\[(\d+)\]\.json_schema (?:properties\.parameters(?:\.|: ))?)"
)
_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
_JSON_CALL = '{"name": "%name", "arguments": '
_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
HERMES = ToolFormat(
    hermes_calls,
    begin=f"<tool_call>\n{_JSON_CALL}",
    end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(lambda _: BareCalls(), key="parameters", marks=("<|python_tag|>",), may_repeat=False)
"""One call at most: the template takes no turn with two."""
MISTRAL_LIST = ToolFormat(
    mistral_calls,
    before="[TOOL_CALLS][",
    begin=_JSON_CALL,
    end="}",
    separator=", ",
    after="]",
    trigger="[TOOL_CALLS]",
    marks=_MARKS,
    id_chars=9,
)
MISTRAL = replace(MISTRAL_LIST, before="", begin="[TOOL_CALLS]%name[ARGS]", end="", separator="", after="")
MISTRAL_IDS = replace(MISTRAL, begin="[TOOL_CALLS]%name[CALL_ID]%id[ARGS]")


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """Return the form in which a model calls tools.

    A template that names none of these forms is taken to ask for JSON, as Llama's does.
    """
    template = "" if tokenizer.template is None else tokenizer.template.tools_source
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return MISTRAL_IDS if "[CALL_ID]" in template else MISTRAL
        is_spaced = "[TOOL_CALLS] [" in template
        return replace(MISTRAL_LIST, before="[TOOL_CALLS] [") if is_spaced else MISTRAL_LIST
    return HERMES if "<tool_call>" in template and "<function=" not in template else LLAMA


def structural_tag(form: Form) -> Form:
    return {"type": "structural_tag", "format": form}


def one_of(*forms: Form) -> Form:
    return {"type": "or", "elements": list(forms)}


def _text(text: str) -> list[Form]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(*parts: Form | Sequence[Form]) -> Form:
    elements = [one for part in parts for one in ([part] if isinstance(part, dict) else part)]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
