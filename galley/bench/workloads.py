"""The prompts of a benchmark: fixed sets of Galley, or files of yours.

A file has a prompt a line: text, or in `.jsonl` one of these objects:

- `{"prompt": "..."}`.
- `{"turns": ["...", ...], "category": "..."}`, as MT-bench, Spec-Bench and SPEED-Bench have it. Each turn is
  asked after the model's own answers to the turns before it.
- `{"messages": [{"role": "user", "content": "..."}, ...], "category": "..."}`, as SPEED-Bench is prepared.

Each object may also have `schema`, the JSON schema of the answer, and `prediction`, the text that the answer
is expected to repeat. Prompts of several categories come in turn, so that every block has some of each.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

PROMPT_SETS = ("chat", "code", "support", "rewrite")
TASKS = "tasks"
EXTRACT, EDITS = "extract", "edits"
FIXED_SETS = (*PROMPT_SETS, TASKS, EXTRACT, EDITS)
"""All sets; only PROMPT_SETS make up `mixed_workload`. `extract` has schemas, `edits` predictions."""
_PROMPTS = Path(__file__).parent / "prompts"
_TO_JSONL = "pandas.read_parquet(...).to_json(..., orient='records', lines=True)"
# SPEED-Bench has it in place of questions that may not be published again.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user turn, the turns before it with their answers (`history`), and those after it.

    `label` is its workload at the gateway; `max_tokens` 0 takes the bound of the load. It is asked no earlier
    than `arrives_s` after the beginning of its block. `schema` and `prediction` hold for the first turn only.
    """

    id: str
    text: str
    label: str = ""
    max_tokens: int = 0
    arrives_s: float = 0.0
    category: str = ""
    history: tuple[tuple[str, str], ...] = ()
    later_turns: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    prediction: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the messages of the request, in OpenAI's form."""
        before = chain.from_iterable((("user", turn), ("assistant", answer)) for turn, answer in self.history)
        return [{"role": role, "content": content} for role, content in (*before, ("user", self.text))]

    def next_turn(self, answer: str) -> Prompt | None:
        """Return the prompt that follows the answer to this one, None after the last turn."""
        if not self.later_turns:
            return None
        text, *later = self.later_turns
        history = (*self.history, (self.text, answer))
        return replace(
            self, text=text, history=history, later_turns=tuple(later), schema=None, prediction=None
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind; `streams` are the only numbers of streams that suit them, empty for any."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str
    streams: tuple[int, ...] = ()

    def suits(self, streams: int) -> bool:
        return not self.streams or streams in self.streams

    def by_category(self) -> list[Workload]:
        """Return a workload for each category; this one if it has none."""
        groups = _grouped(self.prompts)
        if len(groups) == 1:
            return [self]
        return [Workload(f"{self.name}.{name}", tuple(of), self.sha256) for name, of in groups.items()]

    def first_turns(self) -> Workload:
        """Return the prompts without their later turns."""
        return replace(self, prompts=tuple(replace(prompt, later_turns=()) for prompt in self.prompts))


def fixed_workload(name: str) -> Workload:
    """Return one of FIXED_SETS. Raises ValueError for another name."""
    if name not in FIXED_SETS:
        raise ValueError(f"must be one of {', '.join(FIXED_SETS)}, got {name!r}")
    return own_workload(_PROMPTS / f"{name}.jsonl")


def mixed_workload() -> Workload:
    """Return the prompts of all PROMPT_SETS, one of each set in turn, as one workload."""
    return Workload("mixed", _in_turn([fixed_workload(name).prompts for name in PROMPT_SETS]), "")


def own_workload(path: Path) -> Workload:
    """Return the prompts of a file (see this module). Raises ValueError, OSError."""
    if path.suffix == ".parquet":
        raise ValueError(f"{path}: must be .jsonl or text; convert it: {_TO_JSONL}")
    content = path.read_bytes()
    # Not splitlines: JSON may hold U+2028 and other separators as they are.
    lines = enumerate(content.decode("utf-8-sig").split("\n"), 1)
    prompts = [_prompt(path, number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: must hold at least one prompt")
    in_turn = _in_turn(list(_grouped(prompts).values()))
    return Workload(path.stem, in_turn, hashlib.sha256(content).hexdigest())


def _grouped(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    return groups


def _in_turn(groups: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    return tuple(prompt for one_each in zip_longest(*groups) for prompt in one_each if prompt is not None)


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(f"{path.stem}-{number}", line)
    where = f"{path}, line {number}"
    entry = _object_of(line, where)
    first, *later = _turns(entry, where)
    prompt_id = str(entry.get("id", entry.get("question_id", f"{path.stem}-{number}")))
    return Prompt(
        prompt_id,
        first,
        category=str(entry.get("category") or ""),
        later_turns=tuple(later),
        schema=_optional(entry, "schema", dict, "an object", where),
        prediction=_optional(entry, "prediction", str, "text", where),
    )


def _optional(
    entry: dict[str, Any], field: str, kind: type[_Value], expected: str, where: str
) -> _Value | None:
    value = entry.get(field)
    if value is None or isinstance(value, kind):
        return value
    raise ValueError(f"{where}: {field}: must be {expected}, got {type(value).__name__}")


def _object_of(line: str, where: str) -> dict[str, Any]:
    """Return the object that a line holds, an empty one if it holds another value."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: must be JSON: {error}") from None
    return entry if isinstance(entry, dict) else {}


def _turns(entry: dict[str, Any], where: str) -> list[str]:
    field = next((name for name in ("prompt", "turns", "messages") if name in entry), None)
    if field is None:
        raise ValueError(f"{where}: must be an object with prompt, turns or messages")
    found = [entry[field]] if field == "prompt" else entry[field]
    turns = found if isinstance(found, list) else []
    if field == "messages":
        turns = [_content_of_user(message) for message in turns]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: {field}: must be text of users, and not empty")
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise ValueError(f"{where}: {field}: must be a question, got the placeholder of a set to be prepared")
    return turns


def _content_of_user(message: Any) -> Any:
    """Return the content of a user's message, None of another."""
    return message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
