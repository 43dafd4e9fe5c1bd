"""An engine that keeps tokens in place of KV, and draws those of a known truth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from galley.core.content import token_bytes
from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError
from galley.core.records import PositionLogprobs
from galley.core.step import Computed, Draw, Sampled, StepChunk, StepOutcome, StepPlan, StepTrace
from galley.core.trees import ROOT, candidates_after, follow
from galley.engine import masking
from services.target.engine.paged.target import PagedTarget
from services.target.engine.protocol import EngineInfo, Limits
from tests.fakes.states import LAYERS, SIZE, state_of
from tests.fakes.truth import IDS, STOP_ID, true_id

_INFO = EngineInfo(
    model="known",
    tokenizer_hash="",
    context_window=1024,
    vocab_size=IDS,
    eos_token_ids=(STOP_ID,),
    fingerprint="build-1",
    deterministic=True,
    dtype="float32",
    device="none",
    ranks=1,
    kv_block_tokens=8,
    kv_blocks=1024,
    trees=True,
    feature_size=SIZE,
    feature_layers=LAYERS,
)


def tokens_of(row: NDArray[np.uint32]) -> list[int]:
    """Return the tokens whose bits are set in the words of a row of a mask."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


class KnownEngine:
    """It reads only the blocks: a wrong block table, or a wrong move, gives a wrong token."""

    def __init__(self, **info: Any) -> None:
        self.info = replace(_INFO, **info)
        self.passes = 0
        self._kv: dict[int, list[int]] = {}

    def serve(self, times: StepTimes, limits: Limits) -> PagedTarget:
        return PagedTarget(self, times, limits)

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        self.passes += 1
        for move in plan.moves:
            held = self._kv.get(move.from_block, [])
            token = held[move.from_slot] if move.from_slot < len(held) else -1
            self._put(move.to_block, move.to_slot, token)
        for source, copy in plan.copies:
            self._kv[copy] = list(self._kv.get(source, ()))
        return [self._compute(chunk) for chunk in plan.chunks]

    def _compute(self, chunk: StepChunk) -> StepOutcome:
        for i, token in enumerate(chunk.tokens):
            block, offset = divmod(chunk.start + i, self.info.kv_block_tokens)
            self._put(chunk.blocks[block], offset, token)
        if chunk.draw is None:
            return None
        seen: list[int] = []
        for block in chunk.blocks:
            seen += self._kv.get(block, ())
        outcome = self.draw(chunk, seen[: chunk.start + len(chunk.tokens)])
        if chunk.feature_layers and isinstance(outcome, Sampled):
            return replace(outcome, states=_states_of(chunk, chunk.draw, outcome.tokens[:-1]))
        return outcome

    def _put(self, block: int, slot: int, token: int) -> None:
        held = self._kv.setdefault(block, [])
        held.extend([-1] * (slot + 1 - len(held)))
        held[slot] = token

    def draw(self, chunk: StepChunk, seen: Sequence[int]) -> Sampled | GalleyError:
        """Return the tokens after what was `seen` in the blocks, where a token that is not there is -1.

        After a draft token, these are what lies in the slots of confirmed tokens and of its own path.
        """
        draw = chunk.draw
        assert draw is not None
        known = seen if -1 not in seen else [max(0, token) for token in seen]
        try:
            rows = None if draw.grammar is None else masking.confirmed_mask(draw.grammar, draw)
        except GalleyError as error:
            return error
        tokens: list[int] = []
        first = len(draw.history)
        context, node = list(known[:first]), ROOT
        while True:
            at = (draw.params.seed, len(context), context)
            token = self.token(*at) if rows is None else self.choose(*at, tokens_of(rows[node + 1]))
            tokens.append(token)
            after = candidates_after(draw.parents, len(draw.draft_tokens), node)
            right = [child for child in after if draw.draft_tokens[child] == token]
            if not right:
                break
            (node,) = right
            context.append(known[first + node])
        if draw.logprobs is None:
            return Sampled(tuple(tokens), ())
        top = tuple((token, -float(token)) for token in range(draw.logprobs))
        return Sampled(tuple(tokens), tuple(PositionLogprobs(-float(token), top) for token in tokens))

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_id(history)

    def choose(self, seed: int, position: int, history: Sequence[int], allowed: Sequence[int]) -> int:
        """Return the token of a session with a grammar: one of those that are `allowed`."""
        return allowed[crc32(token_bytes(history)) % len(allowed)]


def _states_of(chunk: StepChunk, draw: Draw, confirmed: Sequence[int]) -> bytes:
    """Return the states of the rows whose tokens are confirmed, among the rows whose states are wanted."""
    first_draft = len(chunk.tokens) - len(draw.draft_tokens)
    assert 1 + len(draw.draft_tokens) <= chunk.feature_rows <= len(chunk.tokens)
    before = range(len(chunk.tokens) - chunk.feature_rows, first_draft)
    path = [first_draft + node for node in follow(draw.draft_tokens, draw.parents, confirmed)]
    root = chunk.start + first_draft
    places = [(row, chunk.start + row) for row in before] + [(row, root + i) for i, row in enumerate(path)]
    return b"".join(state_of(chunk.tokens[row], at, chunk.feature_layers) for row, at in places)


class StrictEngine(KnownEngine):
    """It fails at a wrong block table, rather than draw a wrong token."""

    def draw(self, chunk: StepChunk, seen: Sequence[int]) -> Sampled | GalleyError:
        assert chunk.draw is not None
        assert chunk.want_logits == len(chunk.draw.draft_tokens) + 1
        assert chunk.parents == chunk.draw.parents
        assert not chunk.parents or chunk.root == len(chunk.draw.history)
        assert seen == [*chunk.draw.history, *chunk.draw.draft_tokens]
        return super().draw(chunk, seen)


class DividingEngine(StrictEngine):
    """It divides prompts over steps by itself, takes KV away, and verifies less than planned."""

    def __init__(self, rng: random.Random, **info: Any) -> None:
        super().__init__(**info)
        self._rng = rng

    def _compute(self, chunk: StepChunk) -> StepOutcome:
        confirmed = len(chunk.tokens) - max(0, chunk.want_logits - 1)
        chance = self._rng.random()
        if chance < 0.1:
            return Computed(self._rng.randint(0, chunk.start))
        if chance < 0.4:
            part = self._rng.randrange(confirmed)
            super()._compute(replace(chunk, tokens=chunk.tokens[:part], want_logits=0, draw=None))
            return Computed(chunk.start + part)
        outcome = super()._compute(chunk)
        if chance < 0.6 and isinstance(outcome, Sampled):
            return Sampled(outcome.tokens[: self._rng.randint(1, len(outcome.tokens))])
        return outcome
