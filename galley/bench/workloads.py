"""The prompts of a benchmark: the four sets that Galley brings, or files of the user."""

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
    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def fixed_workload(name: str) -> Workload:
    """Return one of PROMPT_SETS. Raises ValueError for another name."""
    if name not in PROMPT_SETS:
        raise ValueError(f"must be one of {', '.join(PROMPT_SETS)}, got {name!r}")
    return own_workload(_PROMPTS / f"{name}.jsonl")


def mixed_workload() -> Workload:
    """Return the prompts of all PROMPT_SETS, one of each set in turn, as one workload."""
    sets = [fixed_workload(name).prompts for name in PROMPT_SETS]
    return Workload("mixed", tuple(prompt for group in zip(*sets, strict=True) for prompt in group), "")


def own_workload(path: Path) -> Workload:
    """Return the lines of a file, {"prompt": ...} each if `.jsonl`, named by its stem. Raises ValueError."""
    content = path.read_bytes()
    # Not splitlines: JSON may hold U+2028 and other separators as they are.
    lines = [line.removesuffix("\r") for line in content.decode("utf-8").split("\n") if line.strip()]
    prompts = tuple(_prompt(path, number, line) for number, line in enumerate(lines, 1))
    if not prompts:
        raise ValueError(f"{path}: must hold at least one prompt")
    return Workload(path.stem, prompts, hashlib.sha256(content).hexdigest())


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(f"{path.stem}-{number}", line)
    try:
        entry = json.loads(line)
        text = entry["prompt"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{path}, line {number}: must be an object {{"prompt": ...}}') from error
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{path}, line {number}: "prompt": must be text')
    return Prompt(str(entry.get("id", f"{path.stem}-{number}")), text)
