"""Answers that must be calls: the grammar of each form allows what real templates write, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from galley.core.errors import InvalidField
from galley.core.grammar.compiled import compile_grammar
from galley.core.grammar.spec import GrammarSpec
from services.gateway.http.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
    Form,
    ToolFormat,
    one_of,
    refused_tool,
    structural_tag,
)
from services.gateway.http.transport.encoding import UNICODE
from tests.fakes.vocabularies import END, byte_vocabulary
from tests.unit.services.gateway.http.test_tool_parsers import (
    LLAMA as LLAMA_TURN,
)
from tests.unit.services.gateway.http.test_tool_parsers import (
    MISTRAL as MISTRAL_TURN,
)
from tests.unit.services.gateway.http.test_tool_parsers import QWEN, as_deltas, deltas_of, recorded

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("get_weather", {"city": 'a "b" é'}), ("now", {})]
VOCABULARY = byte_vocabulary()

FORMATS = [
    pytest.param(HERMES, "qwen2_5", QWEN, id="Hermes"),
    pytest.param(LLAMA, "llama3_1", LLAMA_TURN, id="Llama"),
    pytest.param(MISTRAL_IDS, "mistral_v11", MISTRAL_TURN, id="Mistral v11"),
]


def accepts(form: Form, output: str) -> bool:
    state = compile_grammar(
        VOCABULARY, GrammarSpec("structural_tag", UNICODE.encode(structural_tag(form)))
    ).start()
    tokens = [*output.encode(), END]
    return state.allowed_prefix(tokens) == len(tokens)


def function(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def written(tool_format: ToolFormat, name: str, arguments: str) -> str:
    """Return an answer that is one call."""
    if tool_format.key:
        return f'{{"name": "{name}", "{tool_format.key}": {arguments}}}'
    begin = tool_format.begin.replace("%id", "abcdefghi").replace("%name", name)
    return tool_format.before + begin + arguments + tool_format.end + tool_format.after


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
def test_a_schema_may_refer_to_its_parts(tool_format: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "required": ["at"],
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    form = tool_format.calls([function("go", schema)], parallel=True)
    assert accepts(form, written(tool_format, "go", '{"at": {"x": 1}}'))
    assert not accepts(form, written(tool_format, "go", '{"at": {"x": "1"}}'))


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
@pytest.mark.parametrize("reference", ["#", "#/$defs/Tree", "#/properties/left"])
def test_a_schema_may_refer_to_itself(tool_format: ToolFormat, reference: str) -> None:
    tree: dict[str, Any] = {
        "type": "object",
        "properties": {"leaf": {"type": "integer"}},
        "additionalProperties": False,
    }
    nested = {**tree, "properties": {**tree["properties"], "kid": {"$ref": reference}, "left": tree}}
    form = tool_format.calls([function("f", {**nested, "$defs": {"Tree": tree}})], parallel=True)
    assert accepts(form, written(tool_format, "f", '{"leaf": 1, "kid": {"leaf": 2}}'))
    assert not accepts(form, written(tool_format, "f", '{"kid": {"name": "f"}}'))
    assert not accepts(form, written(tool_format, "f", '{"kid": {"leaf": "x"}}'))


ANY_TYPE: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "integer"}}},
    {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
    {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "integer"}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
@pytest.mark.parametrize("schema", ANY_TYPE, ids=str)
def test_arguments_are_an_object(tool_format: ToolFormat, schema: dict[str, Any]) -> None:
    form = tool_format.calls([function("f", schema)], parallel=True)
    assert accepts(form, written(tool_format, "f", '{"a": 1}'))
    for wrong in ('{"a": "x"}', "7", "null", "[1]"):
        assert not accepts(form, written(tool_format, "f", wrong)), wrong


@pytest.mark.parametrize(("tool_format", "template", "turn"), FORMATS)
def test_required_calls_are_what_the_template_writes(
    tool_format: ToolFormat, template: str, turn: tuple[str, str]
) -> None:
    forms = {parallel: tool_format.calls(TOOLS, parallel=parallel) for parallel in (True, False)}
    for call in CALLS:
        text = recorded(template, *turn, [call]).strip()
        assert all(accepts(form, text) for form in forms.values()), text
        assert deltas_of(tool_format.parser(tool_format.trigger), [text]) == as_deltas([call])
        assert not accepts(forms[True], text[:-1])
        assert not accepts(forms[True], "Well. " + text)
    if tool_format.may_repeat:
        both = recorded(template, *turn, CALLS).strip()
        assert accepts(forms[True], both)
        assert not accepts(forms[False], both)


def test_required_calls_of_mistrals_list() -> None:
    form = MISTRAL_LIST.calls(TOOLS, parallel=True)
    first, second = (
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in CALLS
    )
    for text, calls in ((f"[TOOL_CALLS][{first}]", CALLS[:1]), (f"[TOOL_CALLS][{first}, {second}]", CALLS)):
        assert accepts(form, text), text
        assert deltas_of(MISTRAL_LIST.parser(MISTRAL_LIST.trigger), [text]) == as_deltas(calls)
    assert not accepts(MISTRAL_LIST.calls(TOOLS, parallel=False), f"[TOOL_CALLS][{first}, {second}]")


def test_mistrals_list_amid_text_has_one_call_or_more() -> None:
    one = json.dumps({"name": "get_weather", "arguments": {"city": "x"}})
    many, once = (MISTRAL_LIST.optional_calls(TOOLS[:1], parallel=parallel) for parallel in (True, False))
    assert many is not None
    assert once is not None
    for form in (many, once):
        assert accepts(form, f"[TOOL_CALLS][{one}]")
        assert not accepts(form, "[TOOL_CALLS][]")
        assert accepts(form, f"[TOOL_CALLS][{one}, {one}]") == (form is many)


def test_required_calls_of_the_newest_mistral() -> None:
    form = MISTRAL.calls(TOOLS, parallel=True)
    assert accepts(form, '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "x"}')


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
def test_wrong_arguments_and_names_are_not_allowed(tool_format: ToolFormat) -> None:
    form = tool_format.calls(TOOLS[:1], parallel=True)

    def text(name: str, arguments: dict[str, Any]) -> str:
        return written(tool_format, name, json.dumps(arguments))

    assert accepts(form, text("get_weather", {"city": "x"}))
    assert not accepts(form, text("get_weather", {}))
    assert not accepts(form, text("get_weather", {"city": 1}))
    assert not accepts(form, text("now", {"city": "x"}))


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
def test_a_call_or_an_answer_by_a_schema(tool_format: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    form = one_of(tool_format.calls(TOOLS[:1], parallel=True), {"type": "json_schema", "json_schema": schema})
    assert accepts(form, written(tool_format, "get_weather", '{"city": "x"}'))
    assert accepts(form, '{"number": 3}')
    assert not accepts(form, '{"city": "x"}')
    assert not accepts(form, "Three.")


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
def test_calls_amid_text(tool_format: ToolFormat) -> None:
    form = tool_format.optional_calls(TOOLS[:1], parallel=True)
    assert form is not None
    call = written(tool_format, "get_weather", '{"city": "x"}')
    for text in ("", "No call.", call, f"Let me look. {call}", f"{call}\n{call} Done."):
        assert accepts(form, text), text
    assert not accepts(form, "Well. " + written(tool_format, "get_weather", '{"city": 1}'))
    assert not accepts(form, written(tool_format, "now", "{}"))
    once = tool_format.optional_calls(TOOLS[:1], parallel=False)
    assert once is not None
    assert accepts(once, "No call.")
    assert accepts(once, f"See. {call}")
    assert not accepts(once, f"{call}\n{call}")


def test_calls_that_stand_alone_have_no_form_amid_text() -> None:
    assert LLAMA.optional_calls(TOOLS, parallel=True) is None


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL_LIST, MISTRAL_IDS, MISTRAL])
def test_an_error_of_a_form_tells_which_tool_it_is_about(tool_format: ToolFormat) -> None:
    part = {"properties": {"parameters": {"minProperties": 5}}}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"minProperties": 5}, "minProperties must be"),
        (part, "properties.parameters: minProperties must be"),
        ({"not": {}}, 'not: must be a grammar that can be compiled, got: Unimplemented keys: ["not"]'),
        ({"oneOf": [{}, {}]}, "oneOf: must be a grammar that can be compiled, got: oneOf constraints"),
    ]
    for schema, expected in refusals:
        tools = [TOOLS[1], function("f", schema)]
        calls = tool_format.calls(tools, parallel=True)
        beside = one_of(calls, {"type": "json_schema", "json_schema": CITY})
        for form in (calls, beside, tool_format.optional_calls(tools, parallel=True)):
            if form is not None:
                with pytest.raises(InvalidField) as caught:
                    accepts(form, "")
                refused = refused_tool(caught.value.problem)
                assert refused is not None
                number, problem = refused
                assert (number, problem.startswith(expected)) == (1, True), problem
    assert refused_tool("must be a grammar that can be compiled") is None


def test_ids_of_calls() -> None:
    assert HERMES.call_id("s", 0) == HERMES.call_id("s", 0)
    ids = {HERMES.call_id(session, index) for session in "st" for index in range(3)}
    assert len(ids) == 6
    assert all(one.startswith("call_") for one in ids)
    assert MISTRAL_IDS.call_id("s", 0).isalnum()
    assert len(MISTRAL_IDS.call_id("s", 0)) == 9
