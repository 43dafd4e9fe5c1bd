"""The options of learning from the traffic (docs/operate/learning.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField, check_range
from galley.core.versions.rule import DEFAULT_TRIAL_TOKENS
from galley.core.versions.split import MAX_SHARE
from galley.core.versions.state import check_version

_BOUNDS = {
    "cycle_tokens": (1, 1 << 40),
    "new_tokens": (1, 1 << 40),
    "batch": (1, 1 << 20),
    "rate": (1e-9, 1),
    "threads": (1, 1024),
    "seed": (0, 1 << 62),
    "every_s": (0, 86_400),
    "share": (1e-6, MAX_SHARE),
    "trial_tokens": (1, 1 << 40),
}
# Options that decide what is trained from the same inputs.
_TRAINING = ("cycle_tokens", "batch", "rate", "dtype", "threads")


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """`target` and `start` (the draft that the replicas began with) are directories; `work` keeps drafts.

    `start_version` is the name of its version at the replicas; empty: the digest of its files.

    A cycle trains on `cycle_tokens` answer tokens, and begins once there are `new_tokens` that the last
    cycle has not read. Conversations of `corpus` are mixed in. A canary gets `share` of the sessions, for
    `trial_tokens`.
    """

    work: Path
    target: Path
    start: Path
    start_version: str = ""
    corpus: tuple[Path, ...] = ()
    cycle_tokens: int = 100_000
    new_tokens: int = 10_000
    batch: int = 1024
    rate: float = 1e-3
    dtype: str = "bfloat16"
    threads: int = 1
    seed: int = 1
    every_s: float = 60.0
    share: float = 0.1
    trial_tokens: int = DEFAULT_TRIAL_TOKENS

    def check(self) -> None:
        """Raise InvalidField, naming the option, for a value out of its bounds."""
        for name, (low, high) in _BOUNDS.items():
            check_range(name, getattr(self, name), least=low, most=high)
        if self.dtype not in {"float32", "bfloat16"}:
            raise InvalidField("dtype", f"must be float32 or bfloat16, got {self.dtype!r}")
        if self.start_version:
            try:
                check_version(self.start_version)
            except ValueError as error:
                raise InvalidField("start_version", str(error)) from None

    def of_training(self) -> dict[str, Any]:
        """Return the options on which the weights depend, as the record keeps them."""
        values = asdict(self)
        return {name: values[name] for name in _TRAINING}
