"""What a distillation is asked for; the defaults reproduce a version of the shipped draft on a CPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField

# Where a run lay, and how often it was stored, is not part of what it did.
_UNTOLD = {"out", "work", "checkpoint_s", "named"}
_MANY = math.inf
_BOUNDS = {
    "layers": (1, _MANY),
    "head": (1, _MANY),
    "tokens": (1, _MANY),
    "batch": (1, _MANY),
    "answer": (1, _MANY),
    "evaluate_every": (1, _MANY),
    "threads": (1, _MANY),
    "self_prompts": (0, _MANY),
    "seed": (0, _MANY),
    "hardness": (0, 1),
    "scored": (0, 1),
    "held_out_share": (0.001, 0.5),
    "rate": (1e-9, 1),
    "temperature": (0.01, 100),
}


@dataclass(frozen=True, slots=True)
class Options:
    """`target`, `against` and `start` (a draft to go on from, with its head) are directories; `work` keeps
    answers, labels and checkpoints of this run.

    Counts are of tokens unless named otherwise; `tokens` are answers' tokens seen in training, `checkpoint_s`
    seconds between checkpoints; `named` is what the target was called, its directory's name if empty.
    """

    target: Path
    out: Path
    work: Path
    prompts: tuple[Path, ...] = ()
    corpus: tuple[Path, ...] = ()
    held_out: Path | None = None
    self_prompts: int = 0
    against: Path | None = None
    start: Path | None = None
    layers: int = 2
    head: int = 8192
    tokens: int = 4_000_000
    batch: int = 2048
    rate: float = 1e-3
    hardness: float = 0.5
    scored: float = 0.25
    answer: int = 200
    temperature: float = 0.8
    held_out_share: float = 0.03
    evaluate_every: int = 1_000_000
    checkpoint_s: float = 60.0
    dtype: str = "bfloat16"
    threads: int = 1
    seed: int = 1
    named: str = ""

    def check(self) -> None:
        """Raise InvalidField, naming it, for a value that is out of its bounds."""
        if bool(self.corpus) == bool(self.prompts or self.self_prompts):
            raise InvalidField("prompts", "give prompts (or --self-prompts), or a corpus, and not both")
        if self.held_out is not None and not self.corpus:
            raise InvalidField("held_out", "goes with a corpus")
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise InvalidField(name, f"must be in [{low:g}, {high:g}], is {getattr(self, name)}")
        if self.dtype not in {"float32", "bfloat16"}:
            raise InvalidField("dtype", f"must be float32 or bfloat16, is {self.dtype!r}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, files by their names alone: where they lay is nobody's business."""
        told = {name: _plain(value) for name, value in asdict(self).items() if name not in _UNTOLD}
        return told | {"target": self.named or self.target.name}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return getattr(value, "name", value)
