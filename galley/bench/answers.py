"""The prompts of a benchmark (of Galley, or of a file), and the answers as it sees them.

An answer counts up to its first loop (`loop_start`): a small greedy model that repeats itself would favour
drafts that copy. The share that was cut is reported.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

PROMPT_SETS = ("chat", "code", "support", "rewrite")
_PROMPTS = Path(__file__).parent / "prompts"
LOOP_GRAM = 8
LOOP_TIMES = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn. `label` is its workload at the gateway; `max_tokens` 0 takes the bound of the load."""

    id: str
    text: str
    label: str = ""
    max_tokens: int = 0


def loop_start(tokens: Sequence[int]) -> int:
    """Return where the second of LOOP_TIMES equal n-grams of LOOP_GRAM tokens begins, else len(tokens)."""
    second: dict[tuple[int, ...], int] = {}
    seen: Counter[tuple[int, ...]] = Counter()
    for at in range(len(tokens) - LOOP_GRAM + 1):
        gram = tuple(tokens[at : at + LOOP_GRAM])
        seen[gram] += 1
        if seen[gram] == 2:
            second[gram] = at
        elif seen[gram] == LOOP_TIMES:
            return second[gram]
    return len(tokens)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The gateway's counts of the rounds of one or more answers, summed; times in nanoseconds.

    `proposed` draft tokens arrived, of which `drafted` went to the target; `cancelled` proposals did not
    arrive. `accepted_at[i]` counts the rounds in which draft token i was accepted, `verified_at[i]` those in
    which it was verified. `exposed_draft_ns` is the time in which the target waited for the draft.
    """

    rounds: int = 0
    proposed: int = 0
    cancelled: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    verified_at: tuple[int, ...] = ()
    round_ns: int = 0
    exposed_draft_ns: int = 0
    draft_compute_ns: int = 0
    target_compute_ns: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Return 1 + accepted / rounds, the mean accepted length; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Return the share of verified draft tokens that was accepted, by position."""
        pairs = zip_longest(self.accepted_at, self.verified_at, fillvalue=0)
        return tuple(accepted / verified for accepted, verified in pairs if verified)

    @property
    def exposed_share(self) -> float:
        return self.exposed_draft_ns / self.round_ns if self.round_ns else 0.0

    @property
    def wasted_draft(self) -> int:
        """Return the proposed tokens that were not accepted, sent to the target or not."""
        return self.proposed - self.accepted

    @property
    def wasted_verify(self) -> int:
        return self.verified - self.accepted


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its client saw it: tokens, and when each came, in seconds from the request."""

    tokens: tuple[int, ...]
    at_s: tuple[float, ...]
    wall_s: float
    rounds: Rounds | None = None

    @property
    def counted(self) -> int:
        return loop_start(self.tokens)

    @property
    def counted_s(self) -> float:
        """Return the seconds from the request to the last counted token."""
        return self.at_s[self.counted - 1] if self.counted else self.wall_s


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
    """Return the prompts of a file: a line each, in `.jsonl` {"prompt": ...}. Raises ValueError, OSError."""
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
