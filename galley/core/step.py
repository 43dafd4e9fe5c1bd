"""One step of a target replica, as the scheduler plans it and the engine carries it out: plain values.

The scheduler knows tokens, blocks and costs; the engine knows tensors. These values are all that passes
between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from galley.core.errors import GalleyError
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens after a chunk are sampled.

    `history` is all confirmed tokens from absolute position 0, of which `prompt_len` are the prompt. Row i of
    the wanted logits is for position len(history) + i, given guesses[:i]. `logprobs`: give this many of the
    likeliest; None: no logprobs.
    """

    params: SamplingParams
    history: Sequence[int]
    prompt_len: int
    stop_token_ids: frozenset[int]
    min_tokens: int
    draft_tokens: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StepChunk:
    """One sequence's part of a pass: feed `tokens` at positions [start, start + len(tokens)).

    Its keys and values lie in `blocks`: position p in block blocks[p // block_tokens]. The blocks cover
    [0, start + len(tokens)) at least and hold the KV of [0, start). Of the last `want_logits` rows the logits
    are wanted: none, or len(draw.guesses) + 1.
    """

    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    want_logits: int
    draw: Draw | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one pass, of different sequences; `copies` (from, to) of whole blocks come first."""

    chunks: tuple[StepChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> int:
        """Tokens fed."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model's own tokens, up to and with the first that differs from its guess; at least one.

    Where the logits after accepted guesses are bad, it ends with these: the next pass begins with the error.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(slots=True)
class StepTrace:
    """Has a pass say what its forward took; only of one that is traced, as span `span` (trace id, span id).

    The engine fills in `forward_ns`, and `rank_ns`: called once the pass is over, it gives what each rank
    computed in its forward, without waiting for the others.
    """

    span: bytes
    forward_ns: int = 0
    rank_ns: Callable[[], Sequence[int]] = tuple


# Of each chunk, in order: None where nothing was to be drawn; an error is that chunk's own.
StepOutcome: TypeAlias = "Sampled | GalleyError | None"
