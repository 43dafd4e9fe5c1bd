"""The seam behind which the target's engine can be replaced whole: plain values in, plain values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.common.batching import Unfinished
    from services.common.slices import Slice
    from services.core.content import Miss
    from services.core.errors import GalleyError
    from services.core.records import PositionLogprobs


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a target says of itself; `fingerprint` names the build that its bits depend on."""

    model: str
    tokenizer_hash: str
    context_window: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    deterministic: bool
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """A validated item: check `draft_tokens` after the slice; `logprobs` is how many of the likeliest."""

    slice: Slice
    draft_tokens: tuple[int, ...]
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Tokens from `position` on: `accepted` of the `verified` draft tokens, then at most one of the target's.

    `kv_len` is how far the cache reaches; `batch_sessions` shared the forward pass.
    """

    position: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    logprobs: tuple[PositionLogprobs, ...]
    kv_len: int
    batch_sessions: int


# An error is the outcome of its own job alone.
VerifyOutcome: TypeAlias = "Confirmed | Miss | GalleyError"


class VerifyEngine(Protocol):
    """Called from one thread, one step at a time."""

    @property
    def info(self) -> EngineInfo:
        """Fixed for the life of the engine."""

    def step(self, jobs: Sequence[VerifyJob]) -> list[VerifyOutcome | Unfinished]:
        """Verify the jobs, all of different sessions, together; the outcome of each, in order.

        An unfinished job is stepped again, before those that have come meanwhile.
        """
