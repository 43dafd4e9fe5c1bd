"""The options of a distillation; the defaults train a draft of the shipped draft's size on a CPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField, check_range

# Options that do not change the result.
_NOT_RECORDED = {"out", "work", "checkpoint_s", "named"}
_POSITIVE = ("layers", "head", "tokens", "batch", "answer", "evaluate_every", "threads", "collected")
# Options of drafts that read the target's states, and those that have no meaning for them.
_OF_FEATURES, _OF_TOKENS = ("features", "collected"), ("hardness", "scored")
_BOUNDS = dict.fromkeys(_POSITIVE, (1, math.inf)) | {
    "self_prompts": (0, math.inf),
    "seed": (0, math.inf),
    "hardness": (0, 1),
    "scored": (0, 1),
    "held_out_share": (0.001, 0.5),
    "rate": (1e-9, 1),
    "temperature": (0.01, 100),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a distillation; `target`, `against` and `start` (a draft to continue) are directories.

    `work` keeps answers, labels and checkpoints. Counts are of tokens unless named otherwise; `tokens` are
    answer tokens seen in training. `named` is the target's name, by default its directory's. `features`: the
    draft reads the target's states, collected over `collected` tokens of the training conversations.
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
    features: bool = False
    collected: int = 400_000

    def check(self) -> None:
        """Raise InvalidField, naming the option, for a value out of its bounds."""
        if bool(self.corpus) == bool(self.prompts or self.self_prompts):
            raise InvalidField("prompts", "must be set (or --self-prompts), unless --corpus is; not both")
        if self.held_out is not None and not self.corpus:
            raise InvalidField("held_out", "requires --corpus")
        for name, (low, high) in _BOUNDS.items():
            check_range(name, getattr(self, name), least=low, most=high)
        if self.dtype not in {"float32", "bfloat16"}:
            raise InvalidField("dtype", f"must be float32 or bfloat16, got {self.dtype!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; a file is given by its name only, since its place does not matter."""
        without = _NOT_RECORDED.union(_OF_TOKENS if self.features else _OF_FEATURES)
        values = {name: _plain(value) for name, value in asdict(self).items() if name not in without}
        return values | {"target": self.named or self.target.name}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return getattr(value, "name", value)
