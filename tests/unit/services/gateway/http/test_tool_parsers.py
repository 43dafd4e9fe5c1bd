"""Calls of tools in the text of answers: as real templates write them, and as models get them wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from galley.common.models.chat_template import ChatTemplate
from services.gateway.http.tools.deltas import (
    CallArguments,
    CallBegins,
    Content,
    Delta,
    Parser,
    PlainText,
    Reasoning,
    joined,
)
from services.gateway.http.tools.parsers import BareCalls, hermes_calls, mistral_calls
from services.gateway.http.tools.reasoning import ReasoningSplit

TEMPLATES = Path(__file__).parents[4] / "fakes" / "chat_templates"
HARD = {
    "text": 'a "quoted" {brace} [list] \\ \n é 😀 </tool_call> [TOOL_CALLS] ; <tag>',
    "deep": {"a": [{"b": {}}]},
}
CALLS = [("get_weather", {"city": "Paris", "days": 3}), ("add", {"x": -1.5e3, "y": None}), ("hard", HARD)]
PREAMBLE = "Let me look {that} up.\n[1] <b>"

Make = Callable[[], Parser]


def deltas_of(parser: Parser, pieces: Sequence[str]) -> list[Delta]:
    found = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*found, *parser.finish()])


def cuts_of(text: str) -> Iterator[list[str]]:
    """Yield the text cut in two at every place, into single characters, and into random pieces."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    random = Random(text)
    for _ in range(50):
        places = sorted(random.sample(range(len(text) + 1), min(len(text), random.randint(2, 12))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def must_parse(make: Make, text: str, expected: Sequence[Delta]) -> None:
    for pieces in cuts_of(text):
        assert deltas_of(make(), pieces) == list(expected), pieces


def as_deltas(calls: Sequence[tuple[str, Any]]) -> list[Delta]:
    """Return the deltas of calls whose arguments are written as Python writes JSON."""
    return [
        delta
        for index, (name, arguments) in enumerate(calls)
        for delta in (
            CallBegins(index, name),
            CallArguments(index, json.dumps(arguments, ensure_ascii=False)),
        )
    ]


def recorded(template: str, start: str, end: str, calls: Sequence[tuple[str, Any]], **message: Any) -> str:
    """Return the turn in which a model calls tools, as its own template writes it."""
    tool_calls = [
        {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    source = (TEMPLATES / f"{template}.jinja").read_text()
    conversation = [
        {"role": "user", "content": "Please."},
        {"role": "assistant", "content": "", **message, "tool_calls": tool_calls},
    ]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = ChatTemplate(source, variables).render(conversation)
    return rendered.rpartition(end)[0].rpartition(start)[2]


QWEN = ("<|im_start|>assistant\n", "<|im_end|>")
LLAMA = ("<|end_header_id|>\n\n", "<|eot_id|>")
MISTRAL = ("[/INST]", "</s>")


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("preamble", ["", PREAMBLE])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_as_qwens_templates_write_them(template: str, preamble: str, count: int) -> None:
    text = recorded(template, *QWEN, CALLS[:count], content=preamble)
    assert "<tool_call>" in text

    def make() -> Parser:
        return ReasoningSplit(hermes_calls(), "<think>", "</think>", is_open=False)

    must_parse(make, text, [*([Content(preamble)] if preamble else []), *as_deltas(CALLS[:count])])


def test_reasoning_before_calls_as_qwens_template_writes_it() -> None:
    text = recorded("qwen3", *QWEN, CALLS[:2], content=PREAMBLE, reasoning_content="First,\n\nthink.")
    assert text.startswith("<think>\n")
    expected = [Reasoning("First,\n\nthink."), Content(PREAMBLE), *as_deltas(CALLS[:2])]
    must_parse(lambda: ReasoningSplit(hermes_calls(), "<think>", "</think>", is_open=False), text, expected)
    opened = text.removeprefix("<think>\n")
    must_parse(lambda: ReasoningSplit(hermes_calls(), "<think>", "</think>", is_open=True), opened, expected)


@pytest.mark.parametrize("call", CALLS)
def test_calls_as_llamas_template_writes_them(call: tuple[str, Any]) -> None:
    text = recorded("llama3_1", *LLAMA, [call])
    assert text.startswith('{"name": ')
    must_parse(BareCalls, text, as_deltas([call]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_as_the_template_of_mistral_v3_writes_them(count: int) -> None:
    text = recorded("mistral_v3", *MISTRAL, CALLS[:count])
    assert text.startswith("[TOOL_CALLS] [")
    must_parse(mistral_calls, text, as_deltas(CALLS[:count]))


@pytest.mark.parametrize("preamble", ["", PREAMBLE])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_as_the_template_of_mistral_v11_writes_them(preamble: str, count: int) -> None:
    text = recorded("mistral_v11", *MISTRAL, CALLS[:count], content=preamble)
    assert "[CALL_ID]call00000[ARGS]{" in text
    must_parse(mistral_calls, text, [*([Content(preamble)] if preamble else []), *as_deltas(CALLS[:count])])
    newest = text.replace("[CALL_ID]call", "").replace("00000[ARGS]", "[ARGS]")
    must_parse(mistral_calls, newest.replace("00001[A", "[A").replace("00002[A", "[A"), [
        *([Content(preamble)] if preamble else []), *as_deltas(CALLS[:count])
    ])  # fmt: skip


F = CallBegins(0, "f")
EMPTY = [F, CallArguments(0, "{}")]
ONE = [F, CallArguments(0, '{"a": 1}')]
PYTHON = '{"a": True, "b": [False, None, NaN, -Infinity]}'


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        # Other orders and forms of one call.
        (hermes_calls, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ONE),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ONE),
        (hermes_calls, '<tool_call>{"name": "f"}</tool_call>', EMPTY),
        (
            hermes_calls,
            '<tool_call>{"arguments": {"a": "\\ud83d\\ude00 \\ud83d"}, "name": "f"}</tool_call>',
            [F, CallArguments(0, '{"a": "\U0001f600 \\ud83d"}')],  # no UTF-8 has half a pair
        ),
        (
            hermes_calls,
            '<tool_call>{"arguments": {"a": "\\udfff"}, "name": "f"}</tool_call>',
            [F, CallArguments(0, '{"a": "\\udfff"}')],
        ),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": null}</tool_call>', EMPTY),
        (hermes_calls, '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', EMPTY),
        (BareCalls, '{"type": "function", "name": "f", "parameters": {}}', EMPTY),
        (BareCalls, '<|python_tag|>{"name": "f", "parameters": {}}', EMPTY),
        (BareCalls, '[{"name": "f", "arguments": {}}]', EMPTY),
        (
            BareCalls,
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}',
            [*EMPTY, CallBegins(1, "g"), CallArguments(1, '{"x": 1}')],
        ),
        (mistral_calls, '[TOOL_CALLS]{"name": "f", "arguments": {}}', EMPTY),
        (mistral_calls, "[TOOL_CALLS]f{}", EMPTY),
        # What is written wrong, but can be read.
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {}}}</tool_call> A', [*EMPTY, Content(" A")]),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {}\n</tool_call>', EMPTY),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {}}\n\nDone.', [*EMPTY, Content("Done.")]),
        (
            hermes_calls,
            f'<tool_call>{{"name": "f", "arguments": {PYTHON}}}</tool_call> A',
            [F, CallArguments(0, PYTHON), Content(" A")],
        ),
        (mistral_calls, f"[TOOL_CALLS]f[ARGS]{PYTHON}", [F, CallArguments(0, PYTHON)]),
        (BareCalls, f'{{"name": "f", "parameters": {PYTHON}}}', [F, CallArguments(0, PYTHON)]),
        (
            hermes_calls,
            '<tool_call>{"name": "f", "arguments": {"a": Orl}}</tool_call>',
            [F, CallArguments(0, '{"a": '), Content("Orl}}</tool_call>")],
        ),
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {}\nNone.', [*EMPTY, Content("None.")]),
        # An answer that was cut off by its length.
        (hermes_calls, '<tool_call>{"name": "f", "arguments": {"a": "b', [F, CallArguments(0, '{"a": "b')]),
        (mistral_calls, '[TOOL_CALLS]f[ARGS]{"a', [F, CallArguments(0, '{"a')]),
        # What is no call is content, to the last character.
        *(
            (make, text, [Content(text)])
            for make, text in [
                (hermes_calls, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
                (hermes_calls, '<tool_call>{"arguments": {}, "name": "a\\nb"}</tool_call>'),
                (hermes_calls, "Use <tool_call> and </tool_call>."),
                (hermes_calls, "a  <tool_call>{}</tool_call>"),
                (hermes_calls, '<tool_call>{"name": "f", "argu'),
                (hermes_calls, "<tool_call"),
                (hermes_calls, " \n"),
                (BareCalls, '{"name": "Bob", "age": 3}'),
                (BareCalls, '{"name": "Bob"}'),
                (BareCalls, '{"name": "Bob"'),
                (BareCalls, ' {"a": {"name": "f", "parameters": {}}}'),
                (BareCalls, "[link](https://x.org)"),
                (BareCalls, "Hello {you}."),
                (BareCalls, "<|python_tag|>print(1)"),
                (BareCalls, "<|py"),
                (mistral_calls, "[TOOL_CALLS] not at all"),
                (mistral_calls, "[TOOL_CALLS]a name with spaces[ARGS]{}"),
                (mistral_calls, "[TOOL_CALLS]f[ARG]{}"),
                (mistral_calls, "[TOOL_CALLS]" + "f" * 200),
                (mistral_calls, "[TOOL"),
            ]
        ),
    ],
)  # fmt: skip
def test_forms_of_calls(make: Make, text: str, expected: list[Delta]) -> None:
    must_parse(make, text, expected)


@pytest.mark.parametrize("make", [hermes_calls, mistral_calls, BareCalls])
def test_any_pieces_give_the_same_deltas(make: Make) -> None:
    """Texts that models do not write: made of parts of calls, in any order."""
    parts = [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<tool",
            "[TO",
        ),
        *('{"name": "f", ', '"arguments": ', '"parameters": {', '"name"', ": ", "1", "null", "é", "f"),
        *'{}[]"\\,; \n',
    ]
    random = Random(22)
    for _ in range(1500):
        text = "".join(random.choices(parts, k=random.randint(1, 14)))
        whole = deltas_of(make(), [text])
        assert deltas_of(make(), list(text)) == whole, text
        places = sorted(random.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert deltas_of(make(), pieces) == whole, (text, pieces)
        numbers = [delta.number for delta in whole if isinstance(delta, CallBegins)]
        assert numbers == list(range(len(numbers))), text


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", False, [Reasoning("Why?"), Content("So.")]),
        ("\n<think>Why?</think>So.", False, [Reasoning("Why?"), Content("So.")]),
        ("Why?\n</think>\n\nSo.", True, [Reasoning("Why?"), Content("So.")]),
        ("<think>\nWhy?</think>So.", True, [Reasoning("Why?"), Content("So.")]),
        ("<think>\n\n</think>\n\nSo.", False, [Content("So.")]),
        ("So.\n", False, [Content("So.\n")]),
        ("So <think>no</think>.", False, [Content("So <think>no</think>.")]),
        ("\n\n So.", False, [Content("\n\n So.")]),
        ("<think>Cut off </th", False, [Reasoning("Cut off </th")]),
        ("Cut off", True, [Reasoning("Cut off")]),
        ("<thi", False, [Content("<thi")]),
        (" \n", True, [Reasoning(" \n")]),
        ("", False, []),
    ],
)
def test_reasoning_is_split(text: str, is_open: bool, expected: list[Delta]) -> None:
    must_parse(lambda: ReasoningSplit(PlainText(), "<think>", "</think>", is_open=is_open), text, expected)
