"""vLLM's engine core in plain Python: blocks, prefix cache, divided prompts, preemption, and known tokens.

It schedules as vLLM does: sequences that hold blocks first, the oldest first, then those that wait. Where
blocks run short, paused sequences lose theirs first, then the youngest. A token is a pure function of how it
is drawn and of all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from zlib import crc32

from galley.core.content import block_hashes, next_block_hash, token_bytes
from galley.core.errors import Broken, GalleyError
from galley.core.kv.blocks import BlockPool
from galley.core.records import PositionLogprobs
from galley.core.step import Draw, Sampled
from services.target.engine.protocol import EngineInfo
from services.target.engine.vllm.protocol import (
    CoreFacts,
    CoreLost,
    DroppedBlocks,
    NewSequence,
    SequenceStep,
    StoredBlocks,
)

STUB_VOCAB = 12
STUB_STOP = STUB_VOCAB - 1
# A token beyond the vocabulary; after it the logits are NaN.
STUB_POISON = STUB_VOCAB


def stub_token(draw: Draw, tokens: Sequence[int]) -> int | None:
    """Return the token after `tokens`; None where the logits are NaN."""
    if STUB_POISON in tokens:
        return None
    banned = draw.stop_token_ids if len(tokens) - draw.prompt_len < draw.min_tokens else frozenset()
    start = crc32(f"{draw.params.seed} {draw.params.temperature}".encode())
    word = crc32(token_bytes(tokens), start)
    if word % 23 == 0 and STUB_STOP not in banned:
        return STUB_STOP
    return next(token for i in count(word >> 8) if (token := i % STUB_STOP) not in banned)


def stub_outcome(draw: Draw) -> Sampled | Broken:
    """Return what a step draws that verifies `draw.draft_tokens`."""
    tokens: list[int] = []
    for draft in (*draw.draft_tokens, -1):
        token = stub_token(draw, [*draw.history, *tokens])
        if token is None:
            return Sampled(tuple(tokens)) if tokens else Broken("the logits are NaN")
        tokens.append(token)
        if token != draft:
            break
    logprobs = [PositionLogprobs(-float(token), ()) for token in tokens] if draw.logprobs is not None else ()
    return Sampled(tuple(tokens), tuple(logprobs))


class _Pool(BlockPool):
    """A pool that reports what its prefix cache stores and drops."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.events: list[StoredBlocks | DroppedBlocks | None] = []

    def _unregister(self, block: int) -> None:
        dropped = self._hashes[block]
        super()._unregister(block)
        if dropped is not None:
            self.events.append(DroppedBlocks((dropped,)))


@dataclass(slots=True)
class _Sequence:
    number: int
    given: NewSequence
    record: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    copies: list[bytes] = field(default_factory=list)  # of its blocks, those that others have cached too
    has_begun: bool = False
    is_over: bool = False

    @property
    def age(self) -> tuple[int, int, int]:
        """Return the sort key of sequences, the oldest first."""
        return -self.given.priority, self.given.arrival_ns, self.number


@dataclass(frozen=True, slots=True)
class _Share:
    """A sequence's share of a step: rows of its record, draft tokens after them, and tokens found cached."""

    sequence: _Sequence
    rows: int
    drafts: tuple[int, ...]
    cached: int = 0


class StubCore:
    """A `SteppedCore`; `step` fails once with `failure`, if that is set, and for ever with a CoreLost.

    With `cuts` set, the next outcome of several tokens lacks the last, which was drawn.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_tokens: int = 4,
        max_rows: int = 32,
        max_sequences: int = 16,
        max_draft_tokens: int = 8,
        context_window: int = 1024,
        draw: Callable[[Draw], Sampled | GalleyError] = stub_outcome,
    ) -> None:
        self.info = EngineInfo(
            model="stub",
            tokenizer_hash="",
            context_window=min(context_window, blocks * block_tokens),
            vocab_size=STUB_VOCAB,
            eos_token_ids=(STUB_STOP,),
            fingerprint="stub-1",
            deterministic=True,
            dtype="float32",
            device="none",
            ranks=1,
            kv_block_tokens=block_tokens,
            kv_blocks=blocks,
        )
        self.max_draft_tokens = max_draft_tokens
        self.max_sequences = max_sequences
        self.failure: Exception | None = None
        self.cuts = False
        self.steps = 0
        self.rows = 0
        self.preempted = 0
        self._draw = draw
        self._added = 0
        self._max_rows = max_rows
        self._pool = _Pool(blocks)
        self._sequences: dict[str, _Sequence] = {}
        self._constrained: Mapping[str, Draw] = {}
        self._chains: dict[bytes, bytes] = {}

    @property
    def ids(self) -> set[str]:
        return set(self._sequences)

    @property
    def cached_prefixes(self) -> set[bytes]:
        """Return the blocks in the prefix cache, as `content.block_hashes` names them."""
        copies = [name for sequence in self._sequences.values() for name in sequence.copies]
        return {self._chains[name] for name in (*self._pool.recent_hashes(self._pool.total), *copies)}

    def add(self, sequence: NewSequence) -> None:
        assert sequence.id not in self._sequences
        assert sequence.tokens
        assert list(sequence.draw.history) == list(sequence.tokens)
        assert len(self._sequences) < self.max_sequences
        self._added += 1
        self._sequences[sequence.id] = _Sequence(self._added, sequence, list(sequence.tokens))

    def end(self, ids: Iterable[str]) -> None:
        for name in ids:
            sequence = self._sequences.pop(name, None)
            if sequence is not None:
                self._release(sequence)

    def facts(self) -> CoreFacts:
        events, self._pool.events = self._pool.events, []
        held = {block for sequence in self._sequences.values() for block in sequence.blocks}
        return CoreFacts(len(held), events)

    def step(
        self, drafts: Mapping[str, tuple[int, ...]], constrained: Mapping[str, Draw] | None = None
    ) -> dict[str, SequenceStep]:
        if self.failure is not None:
            failure = self.failure
            if not isinstance(failure, CoreLost):
                self.failure = None
            raise failure
        self.steps += 1
        self._constrained = constrained or {}
        named = {name: self._sequences[name] for name in drafts}
        assert not any(sequence.is_over for sequence in named.values())
        steps = {share.sequence.given.id: self._compute(share) for share in self._schedule(named, drafts)}
        return {name: steps.get(name) or SequenceStep(None, named[name].computed) for name in drafts}

    def _schedule(
        self, named: Mapping[str, _Sequence], drafts: Mapping[str, tuple[int, ...]]
    ) -> list[_Share]:
        budget, scheduled, preempted = self._max_rows, list[_Share](), self.preempted
        in_order = sorted(named.values(), key=lambda one: one.age)
        holding = [sequence for sequence in in_order if sequence.blocks]
        for sequence in holding:
            missing = len(sequence.record) - sequence.computed
            rows = min(missing, budget)
            verified = drafts[sequence.given.id][: budget - rows] if missing == 1 else ()
            # One that was preempted for an older one waits for a later step.
            if rows and sequence.blocks and self._allocate(sequence, rows + len(verified), holding, named):
                scheduled.append(_Share(sequence, rows, verified))
                budget -= rows + len(verified)
        if self.preempted > preempted:
            return scheduled
        for sequence in [one for one in in_order if one not in holding]:
            cached = self._attach(sequence)
            rows = min(len(sequence.record) - sequence.computed, budget)
            if not rows or not self._allocate(sequence, rows, (), named):
                self._release(sequence)
                break
            scheduled.append(_Share(sequence, rows, (), 0 if sequence.has_begun else cached))
            sequence.has_begun = True
            budget -= rows
        return scheduled

    def _allocate(
        self, sequence: _Sequence, rows: int, holding: Sequence[_Sequence], named: Mapping[str, _Sequence]
    ) -> bool:
        """Allocate blocks: free ones, those of paused sequences, then those of the last of `holding`."""
        missing = -(-(sequence.computed + rows) // self.info.kv_block_tokens) - len(sequence.blocks)
        victims = [one for one in self._sequences.values() if one.blocks and one.given.id not in named]
        victims += [one for one in reversed(holding) if one.blocks]
        for victim in victims:
            if self._pool.available >= missing:
                break
            self._release(victim)
            self.preempted += victim.given.id in named
            if victim is sequence:
                return False
        if self._pool.available < missing:
            return False
        sequence.blocks += [self._pool.take() for _ in range(missing)]
        return True

    def _attach(self, sequence: _Sequence) -> int:
        """Attach the record's cached blocks, but not the last token's; return how many tokens they hold."""
        size, name = self.info.kv_block_tokens, _chain_start(sequence)
        for first in range(0, (len(sequence.record) - 1) // size * size, size):
            name = next_block_hash(name, sequence.record[first : first + size])
            block = self._pool.find(name)
            if block is None:
                break
            self._pool.share((block,))
            sequence.blocks.append(block)
            sequence.names.append(name)
        sequence.computed = len(sequence.blocks) * size
        return sequence.computed

    def _compute(self, share: _Share) -> SequenceStep:
        sequence, outcome, is_cut = share.sequence, None, False
        self.rows += share.rows + len(share.drafts)
        sequence.computed += share.rows
        if sequence.computed == len(sequence.record):
            draw = replace(sequence.given.draw, history=sequence.record, draft_tokens=share.drafts)
            if sequence.given.id in self._constrained:
                constrained = self._constrained[sequence.given.id]
                assert list(constrained.history) == sequence.record
                draw = replace(draw, grammar=constrained.grammar)
            outcome = self._draw(draw)
            if isinstance(outcome, Sampled):
                sequence.record += outcome.tokens
                sequence.computed = len(sequence.record) - 1
                if self.cuts and len(outcome.tokens) > 1:
                    self.cuts, is_cut = False, True
                    outcome, sequence.is_over = Sampled(outcome.tokens[:-1]), True
            else:
                sequence.is_over = True
        self._register(sequence)
        if len(sequence.record) >= self.info.context_window:  # vLLM ends it
            self.end([sequence.given.id])
        computed, verified = sequence.computed, len(share.drafts)
        return SequenceStep(outcome, computed, share.cached, share.rows, verified, is_cut)

    def _register(self, sequence: _Sequence) -> None:
        size, names = self.info.kv_block_tokens, sequence.names
        for index in range(len(names), sequence.computed // size):
            parent, tokens = names[-1] if names else None, sequence.record[index * size : (index + 1) * size]
            name = next_block_hash(parent or _chain_start(sequence), tokens)
            self._pool.events.append(StoredBlocks((name,), parent, tokens, sequence.given.salt))
            if self._pool.find(name) is not None:
                sequence.copies.append(name)
            self._pool.register(name, sequence.blocks[index])
            prefix = sequence.record[: (index + 1) * size]
            self._chains[name] = block_hashes(bytes.fromhex(sequence.given.salt), prefix, size)[-1]
            names.append(name)

    def _release(self, sequence: _Sequence) -> None:
        while sequence.blocks:
            self._pool.release((sequence.blocks.pop(),))
        sequence.names.clear()
        self._pool.events += [DroppedBlocks((name,)) for name in sequence.copies]
        sequence.copies.clear()
        sequence.computed = 0


def _chain_start(sequence: _Sequence) -> bytes:
    """Return another beginning than Galley's, as vLLM has another hash."""
    return b"vllm" + sequence.given.salt.encode()
