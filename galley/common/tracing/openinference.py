"""OpenInference attributes, by which Arize Phoenix shows spans; set if GALLEY_OPENINFERENCE is true.

They say again what the attributes of the GenAI conventions say. Messages are among them only with
`--trace-content`. Names are those of the package openinference-semantic-conventions 0.1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.util.types import AnyValue

from galley.core import names

KIND, CHAIN = "openinference.span.kind", "CHAIN"
_PARAMETERS = (
    *(names.MAX_TOKENS, names.TEMPERATURE, names.TOP_P, names.TOP_K),
    *(names.FREQUENCY_PENALTY, names.PRESENCE_PENALTY, names.REQUEST_SEED),
)


def is_openinference() -> bool:
    return os.environ.get("GALLEY_OPENINFERENCE", "").lower() == "true"


def openinference_of(attributes: Mapping[str, AnyValue]) -> dict[str, AnyValue]:
    """Return the attributes of a span that has `attributes`: an LLM call if it is a request, else a step."""
    if names.OPERATION not in attributes:
        return {KIND: CHAIN}
    tokens = [attributes.get(key) for key in (names.INPUT_TOKENS, names.OUTPUT_TOKENS)]
    prompt, completion = (count if isinstance(count, int) else 0 for count in tokens)
    parameters = {key.rpartition(".")[2]: attributes[key] for key in _PARAMETERS if key in attributes}
    return {
        KIND: "LLM",
        "llm.provider": names.GALLEY,
        "llm.model_name": attributes.get(names.REQUEST_MODEL, ""),
        "llm.token_count.prompt": prompt,
        "llm.token_count.completion": completion,
        "llm.token_count.total": prompt + completion,
        "llm.invocation_parameters": json.dumps(parameters),
        **_content("input", attributes.get(names.INPUT_MESSAGES)),
        **_content("output", attributes.get(names.OUTPUT_MESSAGES)),
    }


def _content(side: str, messages: AnyValue) -> dict[str, AnyValue]:
    """Return the messages of a side; nothing if the span holds none."""
    if not isinstance(messages, str):
        return {}
    turns = list(_turns(json.loads(messages)))
    attributes: dict[str, AnyValue] = {f"{side}.value": "\n".join(text for _, text in turns)}
    for index, (role, text) in enumerate(turns):
        attributes[f"llm.{side}_messages.{index}.message.role"] = role
        attributes[f"llm.{side}_messages.{index}.message.content"] = text
    return attributes


def _turns(messages: Sequence[Mapping[str, object]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        parts: Any = message["parts"]
        yield str(message["role"]), "".join(str(part["content"]) for part in parts)
