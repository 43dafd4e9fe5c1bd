"""Chats over HTTP whose answers must have a form: calls that are required, and schemas after reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx2

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.e2e.matrix import Case
from tests.structured.forms import Form, FormRequest, varied_schemas, with_variants
from tests.structured.suite import SchemaCase
from tests.structured.trial import FormAnswer

SCHEMAS = 8
MAX_TOKENS = 128
_MARKS = {
    "<issue_start>": "<think>",
    "<filename>": "</think>",
    "<jupyter_start>": "<tool_call>",
    "<jupyter_text>": "</tool_call>",
}
"""Control tokens that the default model hardly writes, and what they are called in its copy."""
_CLOSING, _CLOSING_BIAS = 6, 20.0
"""The token `</think>`, and a bias by which the model writes it after some tokens, but not as the first."""
_TEMPLATE = """
{%- if tools %}<|im_start|>system
Answer by calls: <tool_call>{"name": …, "arguments": …}</tool_call>. {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if 'Think' in messages[-1].content %}<think>
{% endif %}"""


def chat_model(directory: Path, out: Path) -> Path:
    """Copy the default model to `out` as one that calls tools like Hermes and can reason; return `out`."""
    shutil.copytree(directory, out)
    tokenizer = (out / "tokenizer.json").read_text(encoding="utf-8")
    for name, mark in _MARKS.items():
        tokenizer = tokenizer.replace(json.dumps(name), json.dumps(mark))
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (out / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return out


def chats(temperatures: Sequence[float], seeds: int) -> list[FormRequest]:
    """Return all requests; their options are fields of a body."""
    objects = [case for case in varied_schemas() if case.schema.get("type") == "object"][:SCHEMAS]
    forms = [form for case in objects for form in (_required(case), _named(case), _after_reasoning(case))]
    return with_variants(forms, temperatures, seeds, MAX_TOKENS)


async def read_chat(client: httpx2.AsyncClient, request: FormRequest, case: Case) -> FormAnswer:
    """Return the answer to a chat; its text is the message, as JSON."""
    modes = {"off": {"mode": "off"}, "auto": {"mode": "auto"}}
    fixed = {"mode": "fixed", "k": case.k, "strategy": case.strategy, "width": case.width}
    body = {
        "messages": [{"role": turn.role, "content": turn.content} for turn in request.prompt],
        "speculation": modes.get(case.strategy, fixed),
        "return_token_ids": True,
        "return_rounds": True,
        **request.options,
    }
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != httpx2.codes.OK:
        raise RuntimeError(f"{request}, {case}: {response.text}")
    [choice] = response.json()["choices"]
    is_cut = choice["finish_reason"] == "length"
    reason = pb.Finished.REASON_LENGTH if is_cut else pb.Finished.REASON_STOP
    return FormAnswer(
        tuple(choice["token_ids"]), json.dumps(choice["message"]), reason, _stats(choice["rounds"])
    )


def _stats(rounds: Sequence[dict[str, Any]]) -> pb.SpeculationStats:
    """Return what was verified and accepted; what was drafted in vain is not told."""
    sources: dict[str, int] = {}
    for each in rounds:
        for source, (accepted, _) in each["sources"].items():
            sources[source] = sources.get(source, 0) + accepted
    return pb.SpeculationStats(
        drafted=sum(each["verified"] for each in rounds),
        accepted=sum(each["accepted"] for each in rounds),
        sources=[pb.SourceStats(source=source, accepted=count) for source, count in sources.items()],
    )


def _required(case: SchemaCase) -> Form:
    body = {
        "tools": [_tool(case), {"type": "function", "function": {"name": "now"}}],
        "tool_choice": "required",
    }
    return _form(f"a call for {case.name}", body, _has_calls({"make": case.checker(), "now": "{}".__eq__}))


def _named(case: SchemaCase) -> Form:
    chosen = {"type": "function", "function": {"name": "make"}}
    body = {"tools": [_tool(case)], "tool_choice": chosen, "parallel_tool_calls": False}
    return _form(f"one call for {case.name}", body, _has_calls({"make": case.checker()}))


def _after_reasoning(case: SchemaCase) -> Form:
    schema = {"type": "json_schema", "json_schema": {"name": "form", "schema": case.schema}}
    body = {"response_format": schema}
    is_valid = case.checker()

    def is_right(text: str) -> bool:
        message = json.loads(text)
        return bool(message.get("reasoning_content")) and is_valid(message["content"])

    return _form(f"{case.name}. Think before", body, is_right)


def _form(name: str, body: dict[str, Any], is_right: Callable[[str], bool]) -> Form:
    bias = {str(_CLOSING): _CLOSING_BIAS}
    return Form(name, cast("Any", {**body, "logit_bias": bias}), None, is_right)


def _tool(case: SchemaCase) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "make", "parameters": case.schema}}


def _has_calls(checks: dict[str, Callable[[str], bool]]) -> Callable[[str], bool]:
    def is_right(text: str) -> bool:
        message = json.loads(text)
        calls = [call["function"] for call in message["tool_calls"]]
        return not message["content"] and all(checks[call["name"]](call["arguments"]) for call in calls)

    return is_right
