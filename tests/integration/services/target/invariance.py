"""Logits and states of a position have the same bits however they are computed: a world that tries otherwise.

Each sequence's logits and states are computed once alone, from nothing, in one chunk. Then sequences are fed
side by side: chunks of random lengths in random company, draft tokens that turn out wrong, trees that hold
some of the next tokens among others, cuts, losses of all blocks and refills into others, blocks copied
elsewhere. Every row of logits on the way must equal the first, bit by bit, as must the states that some
chunks want.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from galley.core.kv.compaction import compaction
from galley.core.step import StepChunk, TokenMove
from galley.core.trees import CHAIN
from galley.engine.model import CausalModel
from galley.engine.states import wanted_layers
from tests.fakes.random_trees import RandomTree, tree_around

_CHUNKS = (1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64)
_MAX_DRAFTS = 8
_MAX_PATH, _MAX_OTHERS = 6, 9


@dataclass(slots=True)
class InvarianceCounts:
    rows: int = 0
    differing: int = 0
    passes: int = 0
    evictions: int = 0
    copied_blocks: int = 0
    drafts_fed: int = 0
    trees_fed: int = 0
    moved_tokens: int = 0
    states: int = 0
    first_difference: str = ""


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    alone: torch.Tensor  # [len(tokens), vocab]
    states: torch.Tensor  # [len(tokens), layers, hidden]
    blocks: list[int] = field(default_factory=list)
    done: int = 0


class InvarianceTrial:
    def __init__(self, model: CausalModel, sequences: int, longest: int, seed: int) -> None:
        self._model = model
        self._random = random.Random(seed)
        self._wishes = random.Random(seed + 1)
        self._layers = tuple(sorted({max(1, model.info.layers // 2), model.info.layers}))
        self._free = list(range(model.kv.blocks))
        self._random.shuffle(self._free)
        self._copies: list[tuple[int, int]] = []
        self._moves: list[TokenMove] = []
        self.counts = InvarianceCounts()
        self._sequences = [self._sequence(longest) for _ in range(sequences)]

    def run(self, passes: int) -> InvarianceCounts:
        for _ in range(passes):
            for sequence in self._sequences:
                self._disturb(sequence)
            company = [s for s in self._sequences if self._random.random() < 0.6] or self._sequences[:1]
            self._random.shuffle(company)
            self._pass(company)
        return self.counts

    def _sequence(self, longest: int) -> _Sequence:
        tokens = self._some(self._random.randint(longest // 4, longest))
        blocks = self._free[: self._needed(len(tokens))]
        count = len(tokens)
        chunk = StepChunk(0, tokens, blocks, count, feature_layers=self._layers, feature_rows=count)
        logits, states = self._model.run_with_states([chunk])
        return _Sequence(tokens, logits.clone(), states)

    def _disturb(self, sequence: _Sequence) -> None:
        kind = self._random.random()
        if sequence.done == len(sequence.tokens) or kind < 0.03:
            self._give_back(sequence, 0)
            self.counts.evictions += 1
        elif kind < 0.08:
            self._give_back(sequence, self._random.randint(0, sequence.done))
        elif kind < 0.13 and sequence.blocks:
            at = self._random.randrange(len(sequence.blocks))
            # Freed after the step, which copies it.
            old, sequence.blocks[at] = sequence.blocks[at], self._free.pop()
            self._copies.append((old, sequence.blocks[at]))
            self.counts.copied_blocks += 1

    def _give_back(self, sequence: _Sequence, length: int) -> None:
        kept = self._needed(length)
        # The target block of a copy in this step must not go to another sequence.
        held_back = {into for _, into in self._copies}
        for block in sequence.blocks[kept:]:
            if block not in held_back:
                self._free.insert(self._random.randrange(len(self._free) + 1), block)
        del sequence.blocks[kept:]
        sequence.done = length

    def _pass(self, company: list[_Sequence]) -> None:
        chunks, fed_chunks = [], []
        for sequence in company:
            count = min(self._random.choice(_CHUNKS), len(sequence.tokens) - sequence.done)
            fed = sequence.tokens[sequence.done : sequence.done + count]
            tree = self._tree(sequence.tokens[sequence.done + count :])
            while len(sequence.blocks) < self._needed(sequence.done + count + len(tree.tokens)):
                sequence.blocks.append(self._free.pop())
            fed += tree.tokens
            want = self._random.choice((0, len(fed), len(fed), min(len(fed), 1 + len(tree.tokens))))
            layers, rows = self._wish(want, len(fed))
            chunks.append(
                StepChunk(
                    sequence.done,
                    fed,
                    list(sequence.blocks),
                    want,
                    parents=tuple(tree.parents),
                    feature_layers=layers,
                    feature_rows=rows,
                )
            )
            fed_chunks.append((sequence, count, tree))
        logits, states = self._model.run_with_states(chunks, self._copies, moves=self._moves)
        self._free += [old for old, _ in self._copies]
        self._copies, self._moves = [], []
        self.counts.passes += 1
        row, first, wanted = 0, 0, [self._layers.index(layer) for layer in wanted_layers(chunks)]
        for (sequence, count, tree), chunk in zip(fed_chunks, chunks, strict=True):
            mine = logits[row : row + chunk.want_logits]
            row += chunk.want_logits
            skipped = len(chunk.tokens) - chunk.want_logits
            true_rows = [*range(count), *(count + node for node in tree.path)]
            for position, true_row in enumerate(true_rows, chunk.start):
                if true_row >= skipped:
                    self.counts.rows += 1
                    self._compare("logits", mine[true_row - skipped], sequence.alone[position], position)
                state = true_row - (len(chunk.tokens) - chunk.feature_rows)
                if state >= 0:
                    self.counts.states += 1
                    expected = sequence.states[position][wanted]
                    self._compare("states", states[first + state], expected, position)
            first += chunk.feature_rows
            sequence.done += count
            self._accept(sequence, tree)

    def _tree(self, following: list[int]) -> RandomTree:
        """Return draft tokens: a chain that is wrong, or a tree that holds tokens that follow."""
        if self._random.random() < 0.6:
            drafts = self._some(self._random.choice((0, 0, 1, 4, _MAX_DRAFTS)))
            self.counts.drafts_fed += len(drafts)
            return RandomTree(drafts, CHAIN, [])
        self.counts.trees_fed += 1
        path = following[: self._random.randint(0, _MAX_PATH)]
        return tree_around(self._random, path, self._some(self._random.randint(1, _MAX_OTHERS)))

    def _accept(self, sequence: _Sequence, tree: RandomTree) -> None:
        accepted = tree.path[: self._random.randint(0, len(tree.path))]
        moves = compaction(sequence.blocks, self._model.kv.block_tokens, sequence.done, accepted)
        self._moves += moves
        self.counts.moved_tokens += len(moves)
        sequence.done += len(accepted)

    def _wish(self, want_logits: int, rows: int) -> tuple[tuple[int, ...], int]:
        """Return the layers after which a chunk wants states, and of how many rows: mostly none."""
        if self._wishes.random() < 0.6:
            return (), 0
        layers = self._wishes.sample(self._layers, self._wishes.randint(1, len(self._layers)))
        return tuple(layers), self._wishes.randint(want_logits, rows)

    def _compare(self, kind: str, numbers: torch.Tensor, expected: torch.Tensor, position: int) -> None:
        if torch.equal(numbers, expected):
            return
        self.counts.differing += 1
        if not self.counts.first_difference:
            error = float((numbers - expected).abs().max())
            place = f"pass {self.counts.passes}, {kind} of position {position}"
            self.counts.first_difference = f"{place}, by {error:.3g}"

    def _needed(self, length: int) -> int:
        return -(-length // self._model.kv.block_tokens)

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._model.info.vocab_size) for _ in range(count)]
