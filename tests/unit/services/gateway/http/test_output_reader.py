"""Any tokens of a model give one message, however they arrive, and one that JSON and UTF-8 can have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from galley.common.models.tokenizer import Tokenizer
from galley.core.answer.answer import Answer, SessionSpec
from galley.core.records import NOT_DRAFTED
from galley.core.sampling_params import SamplingParams
from services.gateway.http.api.format import Format
from services.gateway.http.tools.output import OutputReader
from tests.fakes import tokenizer_files
from tests.unit.services.gateway.http.test_tool_parsers import TEMPLATES

ROUNDS = 120
THINK = ("<think>", "</think>")
HERMES = ("<tool_call>", "</tool_call>")
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
TEXTS = [
    *(*THINK, *HERMES, *MISTRAL, "<|python_tag|>", "<tool", "</think", "[TO", ">"),
    *(
        '<tool_call>{"name": "f", "arguments": {',
        '<tool_call>{"arguments": {"a": "',
        '{"name": "f", "parameters": {',
    ),
    *(
        '[TOOL_CALLS]f[ARGS]{"a": "',
        '[TOOL_CALLS][{"name": "f", "arguments": {',
        '"}}</tool_call>',
        "<think>a",
    ),
    *('{"name": "f", ', '"arguments": ', '{"arguments": {"a": "', '"}, "name": "g"}', '"parameters": {'),
    *('"\\ud83d\\ude00"', '"\\ud800"', "\ud7ff", "😀", "é", " \n", "f", "null", "}}", "]", "; ", *'{}[]",:'),
]


def a_tokenizer(path: Path, template: str, added: Sequence[str], control: Sequence[str]) -> Tokenizer:
    tokenizer_files.write(path, template, added=added, control=control)
    return Tokenizer.load(str(path))


def recorded(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(params=["visible", "hidden", "no tokens", "mistral_v3", "mistral_v11", "llama3_1"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    hermes = tokenizer_files.TOOLS_TEMPLATE
    match request.param:
        case "visible":
            return a_tokenizer(tmp_path, hermes, (*THINK, *HERMES), ())
        case "hidden":
            return a_tokenizer(tmp_path, hermes, (), (*THINK, *HERMES))
        case "no tokens":
            return a_tokenizer(tmp_path, hermes, (), ())
        case "llama3_1":
            return a_tokenizer(tmp_path, recorded("llama3_1"), (), ("<|python_tag|>",))
        case template:
            return a_tokenizer(tmp_path, recorded(template), ("[THINK]", "[/THINK]"), MISTRAL)


def tokens_of(tokenizer: Tokenizer, random: Random) -> list[int]:
    """Return tokens that often begin marks and calls, spelled or not, and sometimes are no UTF-8."""
    tokens: list[int] = []
    for text in random.choices(TEXTS, k=random.randint(1, 16)):
        tokens += list(text.encode()) if random.random() < 0.3 else tokenizer.encode_output(text)
        if random.random() < 0.05:
            tokens.append(random.choice((0xF0, 0x9F, 0xC3, 0x28)))
    return tokens


def answered(tokenizer: Tokenizer, tokens: Sequence[int], stops: tuple[str, ...]) -> Answer:
    spec = SessionSpec("s", (97,), SamplingParams(), len(tokens) + 1, 300, stop_strings=stops)
    answer = Answer(spec, tokenizer.decode)
    for token in tokens:
        if not answer.append(token, NOT_DRAFTED):
            break
    return answer


def message_of(tokenizer: Tokenizer, answer: Answer, cuts: Sequence[int]) -> dict[str, Any]:
    """Return the message that the deltas come to, of an answer that arrives in pieces."""
    reader = OutputReader(Format("chat", tools=True, reasoning=True), tokenizer, answer)
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    deltas = [reader.delta(reader.push(end)) for end in (*cuts, answer.output_len)]
    for delta in [*deltas, reader.delta(reader.finish())]:
        for name in delta.keys() - {"tool_calls"}:
            message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, **({"tool_calls": calls} if calls else {})}


async def test_any_tokens_give_one_message_in_any_pieces(tokenizer: Tokenizer) -> None:
    random = Random(22)
    seen: set[str] = set()
    for _ in range(ROUNDS):
        stops = random.choice(((), (), (">>",), ("call>{", "\n\n\n")))
        answer = answered(tokenizer, tokens_of(tokenizer, random), stops)
        reader = OutputReader(Format("chat", tools=True, reasoning=True), tokenizer, answer)
        whole = reader.message([*await reader.read(len(answer.output)), *reader.finish()])
        json.dumps(whole, ensure_ascii=False).encode()
        seen |= {name for name, value in whole.items() if value}
        expected = {name: value for name, value in whole.items() if value and name not in {"role", "refusal"}}
        tokens = len(answer.output)
        for cuts in ([], range(1, tokens), sorted(random.choices(range(tokens + 1), k=3))):
            assert message_of(tokenizer, answer, list(cuts)) == expected, answer.output
    assert {"content", "tool_calls"} <= seen


@pytest.mark.parametrize("tokenizer", ["visible", "hidden"], indirect=True)
async def test_a_text_without_marks_is_content(tokenizer: Tokenizer) -> None:
    """Marks that are tokens are spelled here, so that all of the text is content, to the last character."""
    random = Random(23)
    for _ in range(ROUNDS):
        text = "".join(random.choices(TEXTS, k=random.randint(1, 16)))
        answer = answered(tokenizer, list(text.encode()), ())
        reader = OutputReader(Format("chat", tools=True, reasoning=True), tokenizer, answer)
        message = reader.message([*await reader.read(len(answer.output)), *reader.finish()])
        assert message == {"role": "assistant", "content": text, "refusal": None}


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
JSON = '{"a": 1}'
HELD: dict[str, tuple[list[str | bytes], str, dict[str, Any]]] = {
    "before a call": ([f"I know it, EUROPE{CALL}"], "END", {"content": "I know it, EUROPE", "tool_calls": 1}),
    "reasoning": ([f"[THINK]EUROPE[/THINK]{JSON}"], "END", {"reasoning_content": "EUROPE", "content": JSON}),
    "before the end of a call": ([f"{CALL}ok"], "}}\n]", {"content": "ok", "tool_calls": 1}),
    "before calls": ([f"E{CALL}{CALL}"], "END", {"content": "E", "tool_calls": 2}),
    "at the end": (["[THINK]E[/THINK]E"], "END", {"reasoning_content": "E", "content": "E"}),
    "in a stop string": (["[THINK]E[/THINK]E"], "EE", {"reasoning_content": ""}),
    "in a stop string, a call": (["I E<tool_call>ND"], "END", {"content": "I "}),
    "an unfinished character": (
        ["[THINK]caf", b"\xc3", f"[/THINK]{JSON}"],
        "END",
        {"reasoning_content": "caf\ufffd", "content": JSON},
    ),
    "an unfinished character and a stop": (
        ["[THINK]E", b"\xf0\x9f", f"[/THINK]{JSON}"],
        "E\ufffd\n",
        {"reasoning_content": "E\ufffd", "content": JSON},
    ),
    "a character around a mark": (
        ["[THINK]caf", b"\xc3", "[/THINK]", b"\xa9", JSON],
        "END",
        {"reasoning_content": "café", "content": JSON},
    ),
}


@pytest.mark.parametrize(("parts", "stop", "expected"), HELD.values(), ids=HELD)
async def test_text_that_is_held_back_stays_before_a_control_token(
    tmp_path: Path, parts: Sequence[str | bytes], stop: str, expected: dict[str, Any]
) -> None:
    control = ("[THINK]", "[/THINK]", *HERMES)
    tokenizer = a_tokenizer(tmp_path, tokenizer_files.TOOLS_TEMPLATE, (), control)
    tokens = [
        token
        for part in parts
        for token in (part if isinstance(part, bytes) else tokenizer.encode_output(part))
    ]
    answer = answered(tokenizer, tokens, (stop,))
    for size in (1, 2, 3, 7, len(tokens)):
        message = message_of(tokenizer, answer, range(size, answer.output_len, size))
        if calls := message.get("tool_calls"):
            assert [call["function"] for call in calls] == [{"name": "f", "arguments": "{}"}] * len(calls)
            message["tool_calls"] = len(calls)
        assert message == {name: value for name, value in expected.items() if value}, size


async def test_a_stop_string_that_does_not_come_changes_no_message(tokenizer: Tokenizer) -> None:
    random = Random(24)
    for _ in range(ROUNDS):
        tokens = tokens_of(tokenizer, random)
        stops = tuple(f"{text}\0" for text in random.sample(TEXTS, 8))
        expected = message_of(tokenizer, answered(tokenizer, tokens, ()), ())
        assert message_of(tokenizer, answered(tokenizer, tokens, stops), ()) == expected, (tokens, stops)


@pytest.mark.parametrize("tokenizer", ["hidden"], indirect=True)
async def test_a_stop_string_that_does_not_come_changes_no_count(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_output("<think>ca.E</think>\n\nNX")
    counts = {}
    for stops in ((), (".\n\nX",), ("END",), ("\n\n\n",)):
        answer = answered(tokenizer, tokens, stops)
        reader = OutputReader(Format("chat", tools=True, reasoning=True), tokenizer, answer)
        reader.push(answer.output_len)
        counts[stops] = reader.reasoning_tokens
    assert set(counts.values()) == {5}, counts


@pytest.mark.parametrize("tokenizer", ["visible", "hidden"], indirect=True)
async def test_a_spelled_mark_that_is_held_back_is_text(tokenizer: Tokenizer) -> None:
    tokens = [*b"<tool_call>", *tokenizer.encode_output(CALL)]
    message = message_of(tokenizer, answered(tokenizer, tokens, ("<tool_call>\0",)), ())
    assert (message["content"], len(message["tool_calls"])) == ("<tool_call>", 1)


@pytest.mark.parametrize("tokenizer", ["hidden"], indirect=True)
async def test_many_control_tokens_behind_text_that_is_held_back(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_output("aE" + "<tool_call>" * 300 + "b")
    answer = answered(tokenizer, tokens, ("END",))
    reader = OutputReader(Format("chat", tools=True, reasoning=True), tokenizer, answer)
    texts = [reader.delta(reader.push(end)).get("content", "") for end in range(1, len(tokens) + 1)]
    assert "".join(texts).replace("<tool_call>", "") == "aEb"
    assert "".join(texts).count("<tool_call>") == 300
    assert max(map(len, texts)) < 70 * len("<tool_call>")
