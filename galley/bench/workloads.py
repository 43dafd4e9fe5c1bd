"""What a benchmark asks: the four fixed sets that come with Galley, or files of the user's own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from galley.bench.answers import Prompt

PROMPT_SETS = ("chat", "code", "support", "rewrite")
_PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def fixed_workload(name: str) -> Workload:
    """One of PROMPT_SETS; ValueError if there is none of that name."""
    if name not in PROMPT_SETS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(PROMPT_SETS)}")
    return own_workload(_PROMPTS / f"{name}.jsonl")


def mixed_workload() -> Workload:
    """Return the prompts of all PROMPT_SETS, one of each set in turn, as one workload."""
    sets = [fixed_workload(name).prompts for name in PROMPT_SETS]
    return Workload("mixed", tuple(prompt for group in zip(*sets, strict=True) for prompt in group), "")


def own_workload(path: Path) -> Workload:
    """The prompts of a file, named by its stem: `.jsonl` holds an object {"prompt": ...} a line, else text.

    A text file is one prompt a line; empty lines are skipped. ValueError if it is not so, or holds no prompt.
    """
    content = path.read_bytes()
    # Not splitlines: JSON may hold U+2028 and other separators as they are.
    lines = [line.removesuffix("\r") for line in content.decode("utf-8").split("\n") if line.strip()]
    prompts = tuple(_prompt(path, number, line) for number, line in enumerate(lines, 1))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return Workload(path.stem, prompts, hashlib.sha256(content).hexdigest())


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(f"{path.stem}-{number}", line)
    try:
        found = json.loads(line)
        text = found["prompt"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{path}, line {number}: not an object {{"prompt": ...}}') from error
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{path}, line {number}: "prompt" is no text')
    return Prompt(str(found.get("id", f"{path.stem}-{number}")), text)


def load_prompts(name: str) -> list[Prompt]:
    """The prompts of one of PROMPT_SETS, in the order of its file."""
    return list(fixed_workload(name).prompts)


def prompt_hash(name: str) -> str:
    """The sha256 of the file of one of PROMPT_SETS."""
    return fixed_workload(name).sha256
