"""One step of a target replica, as the scheduler plans it and the engine runs it: plain values.

The scheduler knows tokens, blocks and costs; the engine knows tensors. Only these values pass between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from galley.core.content import SessionKey
from galley.core.errors import GalleyError
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.trees import CHAIN, Parents
from galley.core.values import value

if TYPE_CHECKING:
    from galley.core.grammar.compiled import GrammarState  # llguidance is slow to import


@value
class Draw:
    """Sampling of the tokens after a chunk.

    `history` is all confirmed tokens from absolute position 0; the first `prompt_len` are the prompt. Row 0
    of the logits is for the position after it, row i + 1 for the one after draft token i and those before it
    on its path (`galley/core/trees.py`). `logprobs` is how many of the
    likeliest tokens to return with each token's own logprob; None returns no logprobs.

    The state of a `grammar` may lag behind the history; the engine brings it up, and computes `allowed` from
    it: for each row of logits the bits of the allowed tokens, 32 a word, [len(draft_tokens) + 1, words].
    """

    params: SamplingParams
    history: Sequence[int]
    prompt_len: int
    stop_token_ids: frozenset[int]
    min_tokens: int
    draft_tokens: tuple[int, ...] = ()
    parents: Parents = CHAIN
    logprobs: int | None = None
    grammar: GrammarState | None = field(default=None, compare=False)
    allowed: NDArray[np.uint32] | None = field(default=None, compare=False)


class GrowingTokens(list[int]):
    """A list of tokens that only grows. It is copied into arrays without converting each token anew."""

    __slots__ = ("_ids",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._ids = array("q")

    def copy_to(self, ids: NDArray[np.int64]) -> None:
        """Copy the first len(ids) tokens to `ids`."""
        self._ids.fromlist(self[len(self._ids) :])
        ids[:] = memoryview(self._ids)[: len(ids)]


class TokenRange(Sequence[int]):
    """Tokens [start, stop) of a list that only grows, and `more` after them; they are copied when read."""

    __slots__ = ("_more", "_start", "_stop", "_tokens")

    def __init__(self, tokens: Sequence[int], start: int, stop: int, more: Sequence[int] = ()) -> None:
        self._tokens, self._start, self._stop, self._more = tokens, start, stop, more

    def __len__(self) -> int:
        return self._stop - self._start + len(self._more)

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        held = self._stop - self._start
        if isinstance(index, int):
            at = range(len(self))[index]
            return self._tokens[self._start + at] if at < held else self._more[at - held]
        first, end, step = index.indices(len(self))
        if step != 1:
            return self[:][index]
        kept = self._tokens[self._start + min(first, held) : self._start + min(end, held)]
        return [*kept, *self._more[max(0, first - held) : max(0, end - held)]]

    def copy_to(self, ids: NDArray[np.int64]) -> None:
        """Copy all tokens to `ids` [len(self)]."""
        held = self._stop - self._start
        if isinstance(self._tokens, GrowingTokens) and self._start == 0:
            self._tokens.copy_to(ids[:held])
        else:
            ids[:held] = self._tokens[self._start : self._stop]
        ids[held:] = self._more


@value
class StepChunk:
    """One sequence's part of a step: feed `tokens` at positions [start, start + len(tokens)).

    Its keys and values lie in `blocks`: position p in block blocks[p // block_tokens]. The blocks cover at
    least [0, start + len(tokens)) and hold the KV of [0, start). Logits are wanted of the last `want_logits`
    rows: none, or len(draw.draft_tokens) + 1. `key` names the session, for engines that keep its KV by name.

    The last len(parents) tokens are a tree (`galley/core/trees.py`): they lie in slots [root, start +
    len(tokens)), one behind the other, and the position of one is `root` plus its depth. It sees the tokens
    before `root`, its ancestors and itself. A tree may begin before `start`: that part has KV already.

    The states of the last `feature_rows` rows are wanted after `feature_layers` (`galley/core/features.py`),
    possibly of more rows than logits. No layers: of none.
    """

    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    want_logits: int
    draw: Draw | None = None
    key: SessionKey = (b"", "")
    parents: Parents = CHAIN
    feature_layers: tuple[int, ...] = ()
    feature_rows: int = 0

    @property
    def root(self) -> int:
        """Return the position of the first token of its tree; its end if it has none."""
        return self.start + len(self.tokens) - len(self.parents)


class TokenMove(NamedTuple):
    """The keys and values of one token go from a slot of a block to another slot, mostly of the block."""

    from_block: int
    from_slot: int
    to_block: int
    to_slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one step, at most one per sequence.

    First the keys and values of single tokens are moved, in order, then whole blocks copied, (from, to).
    """

    chunks: tuple[StepChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    moves: tuple[TokenMove, ...] = ()

    @property
    def rows(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@value
class Sampled:
    """The model's own tokens, up to and including the first that no draft token has; at least one.

    If the logits after accepted draft tokens have no finite maximum, the last of `tokens` is the last of
    these draft tokens.

    `states` is of consecutive tokens, those of the wanted rows whose tokens are confirmed now; the last is of
    the token before the last of `tokens`. Empty if none were wanted.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    states: bytes = b""


@dataclass(frozen=True, slots=True)
class Computed:
    """The engine fed less of a chunk than planned, and drew nothing after it.

    The session's first `kv_len` confirmed tokens have KV now: never all, and fewer than before if the engine
    took the session's blocks for others.
    """

    kv_len: int


@dataclass(slots=True)
class StepTrace:
    """Measurements of a traced step; `span` is its span (trace id, span id).

    The engine fills in the times. `rank_ns()`, called after the step, returns each rank's own compute time.
    `mask_wait_ns` is how long the step waited for the masks of grammars after its forward pass.
    """

    span: bytes
    forward_ns: int = 0
    mask_wait_ns: int = 0
    rank_ns: Callable[[], Sequence[int]] = tuple


# One per chunk, in order: None where nothing was to be drawn. An error concerns its own chunk alone.
StepOutcome: TypeAlias = "Sampled | Computed | GalleyError | None"
