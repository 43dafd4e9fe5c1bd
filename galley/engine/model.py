"""A causal language model that computes the new tokens of many sequences in one step.

It is the interface between the engine and its callers (docs/decisions/003-engine-seam.md). A model is used
either through `run`, by a scheduler that accounts for the blocks itself, or through caches and `forward`;
never both. It is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from galley.common.logs import get_logger
from galley.common.models.files import model_name
from galley.common.server.process import hand_back_free_memory
from galley.core.errors import Broken, UnsupportedModel
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.kv.compaction import compaction
from galley.core.step import StepChunk, StepTrace, TokenMove
from galley.core.trees import ROOT, simplified
from galley.engine import attention
from galley.engine.batch import INT8, NONE, FreeBlocks, ModelInfo, Rows, SessionCache
from galley.engine.cpu import int8, llama, packing
from galley.engine.cuda.device import DeviceOptions
from galley.engine.forward import Forward, forward_of
from galley.engine.kv_shape import kv_shape
from galley.engine.load import module as loading
from galley.engine.load.draft_directory import ReducedHead, takes_embeddings
from galley.engine.load.feature_head import FeatureHead
from galley.engine.load.module import parse_dtype
from galley.engine.load.resolve import resolve_model
from galley.engine.paged import pool_for
from galley.engine.pages import KvPool, Span
from galley.engine.parallel.ranks import ALONE, Ranks
from galley.engine.states import Residuals, check_states, size_of, wanted_layers, wanted_rows

__all__ = ["CausalModel", "KvPool", "ModelInfo", "Rows", "SessionCache"]

_LOG = get_logger(__name__)
# Rows that go through the layers at once, so that memory is bounded.
MAX_ROWS = 512
# The system commits memory as blocks are used.
DEFAULT_KV_BLOCKS = 2048
_DEFAULT_OPTIONS = DeviceOptions()
# Two and a half blocks.
_PROBE_TOKENS = 80
# Blocks that the probes need at once: a prompt and another sequence beside it.
PROBE_BLOCKS = 2 * -(-_PROBE_TOKENS // BLOCK_TOKENS)
# Relative to the norm of the logits: eager attention rounds differently (SmolLM2-135M in bfloat16: 5 %).
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_STRIDE = 7919
_CUTS = (1, 2, 3, 8, 13, 32, 37, 70)


class CausalModel:
    def __init__(
        self,
        forward: Forward,
        info: ModelInfo,
        head: ReducedHead | None = None,
        *,
        max_rows: int = MAX_ROWS,
        ranks: Ranks = ALONE,
    ) -> None:
        self.info = info
        self.max_rows = max_rows
        self._ranks = ranks
        self.kv = forward.attention.pool
        self._forward = forward
        self.head = head
        # The projections of states that a draft reads; None for any other model.
        self.features: FeatureHead | None = None
        self._free = FreeBlocks(self.kv.blocks)

    @classmethod
    def load(  # noqa: PLR0913
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: str,
        threads: int | None = None,
        name: str | None = None,
        kv_blocks: int = DEFAULT_KV_BLOCKS,
        ranks: Ranks = ALONE,
        target: Path | None = None,
        options: DeviceOptions = _DEFAULT_OPTIONS,
        quantization: str = NONE,
    ) -> CausalModel:
        """Load the model in `directory` and check it against its own eager attention.

        `threads` sets torch's threads for the whole process. `name` defaults to the directory's name. Each
        rank calls this with its own `ranks`. `target` is the directory whose embeddings a trained draft uses.
        `quantization` is NONE or INT8. Raises UnsupportedModel.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        config = loading.load_config(directory)
        if quantization == INT8:
            llama.refuse_int8(config, dtype, device, ranks)
        shape = kv_shape(config, dtype, ranks)
        loaded = loading.load_module(
            directory, config, dtype=dtype, device=device, ranks=ranks, target=target
        )
        module = loaded.module
        if quantization == INT8:
            int8.quantize_linears(module)
        layers, hidden_size = size_of(module)
        info = ModelInfo(
            name=name or directory.name,
            directory=directory,
            context_window=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            eos_token_ids=loading.eos_token_ids(directory, config),
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            tokenizer_hash=loaded.tokenizer_hash,
            deterministic=False,
            ranks=ranks.size,
            quantization=quantization,
            layers=layers,
            hidden_size=hidden_size,
        )
        pool = pool_for(shape, max(kv_blocks, PROBE_BLOCKS), torch.device(device), options)
        own = llama.can_serve(module, pool)
        if quantization == INT8 and not own:
            raise UnsupportedModel(
                f"quantization: must be none for {config.model_type} with heads that are rotated in part"
            )
        # Our own forward takes the module apart, so its reference comes first. Otherwise our attention comes
        # first, since its refusals are clearer.
        theirs = eager_logits(module, prompt_of(info)) if own else None
        max_rows = options.rows_of_step(device, MAX_ROWS)
        forward = forward_of(module, pool, ranks, max_rows=max_rows, own=own, options=options)
        model = cls(forward, info, loaded.head, max_rows=max_rows, ranks=ranks)
        model.features = loaded.features
        logits = probe_logits(model)
        ours = logits if loaded.head is None else logits[:, loaded.head.tokens]
        if theirs is None:
            theirs = eager_logits(module, prompt_of(info))
        # Products of int8 weights also round their inputs, whatever the dtype.
        precision = dtype if loaded.head is None and quantization == NONE else torch.bfloat16
        refuse_other_attention(config.model_type, ours, theirs, precision)
        deterministic = keeps_bits(model, logits)
        trees = takes_trees(model, logits, deterministic=deterministic)
        model.info = replace(info, deterministic=deterministic, trees=trees)
        return model

    @property
    def forward_kind(self) -> str:
        return self._forward.kind

    @property
    def attention_kind(self) -> str:
        return type(self._forward.attention).__name__

    @torch.inference_mode()
    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> Tensor:
        """Move tokens, copy blocks, feed the chunks, and write their keys and values into their blocks.

        Returns the logits that the chunks want, float32 [sum of want_logits, vocab_size], in order, on the
        model's device. A row may hold NaN without harm to the others. Raises Broken, before any work, if a
        chunk is out of bounds. With `watch`, waits for the device and records the times there.
        """
        return self.run_with_states(chunks, copies, watch, moves=moves)[0]

    @torch.inference_mode()
    def run_with_states(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run a step as `run` does; return the logits, and the states that the chunks want, in order.

        The states are of the model's dtype or float32, [sum of feature_rows, layers, hidden], after all
        `wanted_layers` of the chunks, on the model's device.
        """
        if watch is None:
            logits, states = self._run(chunks, copies, moves)
        else:
            logits, states = _watched(lambda: self._run(chunks, copies, moves), self._ranks, watch)
        return (logits if self.head is None else self.head.spread(logits)), states

    @torch.inference_mode()
    def _run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        moves: Sequence[TokenMove] = (),
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step; return logits [sum of want_logits, head_vocab] of the whole or reduced vocabulary.

        Also returns states, as `run_with_states` does. `added` is that of `Residuals`.
        """
        self._check(chunks)
        check_states(chunks, self.info.layers)
        self._check_blocks(chunks, copies, moves)
        self.kv.move(moves)
        self.kv.copy(copies)
        layers, first = wanted_layers(chunks), 0
        logits, states = [], []
        for pieces in _pieces(chunks, self.max_rows):
            last = first + sum(len(piece.tokens) for piece in pieces)
            residuals = Residuals(layers, [], None if added is None else added[first:last])
            logits.append(self._forward_pieces(pieces, residuals))
            if layers:
                states.append(residuals.states())
            first = last
        columns = self.info.vocab_size if self.head is None else len(self.head.tokens)
        return (
            _joined(logits, self.kv.keys.device, columns),
            _joined(states, self.kv.keys.device, len(layers), self.info.hidden_size),
        )

    def _forward_pieces(self, pieces: Sequence[StepChunk], residuals: Residuals) -> Tensor:
        """Return the logits of the pieces; read the states of the rows that they want."""
        tokens: list[int] = []
        logit_rows: list[int] = []
        state_rows: list[int] = []
        spans = []
        for piece in pieces:
            tokens += piece.tokens
            logit_rows += range(len(tokens) - piece.want_logits, len(tokens))
            state_rows += range(len(tokens) - wanted_rows(piece), len(tokens))
            spans.append(Span(piece.start, len(piece.tokens), piece.blocks, simplified(piece.parents)))
        residuals.rows = state_rows
        return self._forward(spans, tokens, logit_rows, residuals)

    def _check(self, chunks: Sequence[StepChunk]) -> None:
        for chunk in chunks:
            rows = len(chunk.tokens)
            if not 0 <= chunk.want_logits <= rows:
                raise Broken(f"want_logits: must be in [0, {rows}], got {chunk.want_logits}")
            if not 0 <= chunk.start <= self.info.context_window - rows:
                end = chunk.start + rows
                raise Broken(f"chunk: must end within {self.info.context_window} tokens, got {end}")
            if rows and not 0 <= min(chunk.tokens) <= max(chunk.tokens) < self.info.vocab_size:
                raise Broken(f"tokens: must be in [0, {self.info.vocab_size})")
            _check_parents(chunk)

    def _check_blocks(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]],
        moves: Sequence[TokenMove],
    ) -> None:
        """Raise Broken for a block out of bounds: the kernels check none, and would write anywhere."""
        for chunk in chunks:
            if len(chunk.blocks) * self.kv.block_tokens < chunk.start + len(chunk.tokens):
                tokens = chunk.start + len(chunk.tokens)
                raise Broken(f"blocks: must cover {tokens} tokens, got {len(chunk.blocks)} blocks")
        used = [block for chunk in chunks for block in chunk.blocks]
        used += [block for pair in copies for block in pair]
        used += [block for move in moves for block in (move.from_block, move.to_block)]
        if used and not 0 <= min(used) <= max(used) < self.kv.blocks:
            raise Broken(f"blocks: must be in [0, {self.kv.blocks}), got {min(used)} to {max(used)}")
        _check_moves(moves, self.kv.block_tokens)

    def new_cache(self) -> SessionCache:
        return SessionCache(self._free)

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Feed each item's tokens at [len(cache.tokens), ...) and extend its cache. Raises as `forward_head`.

        Returns each item's logits, float32 [want_logits, vocab_size], on the model's device.
        """
        logits = self.forward_head(batch)
        if self.head is not None:
            logits = self.head.spread(logits)
        return list(torch.split(logits, [item.want_logits for item in batch]))

    def forward_head(self, batch: Sequence[Rows]) -> Tensor:
        """Feed the batch as `forward` does; return all logits, float32 [sum of want_logits, head_vocab].

        Raises, before any work, Broken for an item out of bounds or a cache given twice, and Overloaded.
        """
        return self.forward_states(batch, ())[0]

    def forward_states(self, batch: Sequence[Rows], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed the batch as `forward_head` does; return its logits, and states of the same rows.

        The states are float32 [sum of want_logits, len(layers), hidden], after each of the rising `layers`.
        """
        if len({id(item.cache) for item in batch}) < len(batch):
            raise Broken("batch: must hold each cache once")
        chunks = [_chunk_of(item, tuple(layers)) for item in batch]
        self._check(chunks)
        try:
            for item in batch:
                item.cache.reserve(item.cache.slots + len(item.tokens))
            logits, states = self._run(chunks, added=_added(batch))
        except BaseException:
            for item in batch:
                item.cache.trim()
            raise
        for item in batch:
            item.cache.extend(item.tokens, item.parents)
        return logits, states.float()

    @torch.inference_mode()
    def keep_path(self, cache: SessionCache, path: Sequence[int]) -> None:
        """Extend `cache.tokens` by the nodes of a path of its tree, whose KV it moves; drop the others."""
        tokens = [cache.tree[node] for node in path]
        self.kv.move(compaction(cache.blocks, BLOCK_TOKENS, len(cache.tokens), path))
        cache.tokens += tokens
        cache.truncate(len(cache.tokens))


def _chunk_of(item: Rows, layers: tuple[int, ...]) -> StepChunk:
    """Return the rows as a chunk that wants states too. Raises Broken unless its tree extends the cache's."""
    cache, known = item.cache, len(item.cache.tree)
    if item.parents[:known] != cache.parents or (known and len(item.parents) != known + len(item.tokens)):
        raise Broken(f"parents: must extend those of the {known} nodes in the cache by one for each token")
    if len(item.parents) > known + len(item.tokens):
        raise Broken(f"parents: must be at most {len(item.tokens)}, got {len(item.parents)}")
    if item.added is not None and len(item.added) != len(item.tokens):
        raise Broken(f"added: must have {len(item.tokens)} rows, got {len(item.added)}")
    return StepChunk(
        cache.slots,
        item.tokens,
        cache.blocks,
        item.want_logits,
        parents=item.parents,
        feature_layers=layers,
        feature_rows=item.want_logits,
    )


def _added(batch: Sequence[Rows]) -> Tensor | None:
    """Return what is added to all rows of the batch, float32 [rows, hidden]; None if nothing is."""
    given = next((item.added for item in batch if item.added is not None), None)
    if given is None:
        return None
    size = given.shape[1]
    parts = (given.new_zeros(len(item.tokens), size) if item.added is None else item.added for item in batch)
    return torch.cat(list(parts))


def _joined(parts: Sequence[Tensor], device: torch.device, *columns: int) -> Tensor:
    """Return the rows of the parts one after another, [rows, *columns]."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return torch.empty(0, *columns, device=device)
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _check_parents(chunk: StepChunk) -> None:
    """Raise Broken unless the tree begins in a slot that exists and each parent is an earlier node."""
    if chunk.root < 0:
        raise Broken(f"parents: must be at most {chunk.start + len(chunk.tokens)}, got {len(chunk.parents)}")
    for node, parent in enumerate(chunk.parents):
        if not ROOT <= parent < node:
            raise Broken(f"parents: must be in [{ROOT}, {node}) for node {node}, got {parent}")


def _check_moves(moves: Sequence[TokenMove], block_tokens: int) -> None:
    slots = [slot for move in moves for slot in (move.from_slot, move.to_slot)]
    if slots and not 0 <= min(slots) <= max(slots) < block_tokens:
        raise Broken(f"moves: slots must be in [0, {block_tokens}), got {min(slots)} to {max(slots)}")
    if len({move[2:] for move in moves}) < len(moves):
        raise Broken("moves: must go to a slot each")


def _pieces(chunks: Sequence[StepChunk], max_rows: int) -> Iterator[list[StepChunk]]:
    """Yield the rows of the chunks in order, cut into lists of at most `max_rows` rows."""
    pieces: list[StepChunk] = []
    room = max_rows
    for chunk in chunks:
        first, rows = 0, len(chunk.tokens)
        while first < rows:
            last = min(rows, first + room)
            want_logits = max(0, last - max(first, rows - chunk.want_logits))
            parents = chunk.parents[: max(0, len(chunk.parents) - (rows - last))]
            pieces.append(
                StepChunk(
                    chunk.start + first,
                    chunk.tokens[first:last],
                    chunk.blocks,
                    want_logits,
                    parents=parents,
                    feature_layers=chunk.feature_layers,
                    feature_rows=max(0, last - max(first, rows - chunk.feature_rows)),
                )
            )
            room -= last - first
            first = last
            if room == 0:
                yield pieces
                pieces, room = [], max_rows
    if pieces:
        yield pieces


def _watched(
    forward: Callable[[], tuple[Tensor, Tensor]], ranks: Ranks, watch: StepTrace
) -> tuple[Tensor, Tensor]:
    """Return the result of `forward` once the device has finished it; write the times into `watch`."""
    start_ns = time.perf_counter_ns()
    with ranks.waits() as waits:
        logits, states = forward()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
    watch.forward_ns = time.perf_counter_ns() - start_ns
    own_ns = max(0, watch.forward_ns - waits.ns)
    watch.rank_ns = lambda: (own_ns,)
    return logits, states


def prompt_of(info: ModelInfo) -> list[int]:
    """Return the probe prompt: token ids from all over the vocabulary, always the same.

    Leaves out the first ids, which round badly in bfloat16, and the last, which may be padding.
    """
    length = min(_PROBE_TOKENS, info.context_window)
    return [_STRIDE * (index + 1) % (info.vocab_size // 2) for index in range(length)]


def probe_logits(model: CausalModel) -> Tensor:
    prompt = prompt_of(model.info)
    return model.forward([Rows(model.new_cache(), prompt, len(prompt))])[0]


@torch.inference_mode()
def eager_logits(module: Any, prompt: list[int]) -> Tensor:
    """Return float32 [tokens, vocab_size] of transformers with the model's own eager attention."""
    module.set_attn_implementation("eager")
    tokens = torch.tensor([prompt], device=module.device)
    with packing.torch_products(module.dtype, str(module.device)):
        logits: Tensor = module(input_ids=tokens, use_cache=False).logits[0].float()
    module.set_attn_implementation(attention.NAME)
    return logits


def refuse_other_attention(name: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel if `ours` and `theirs` differ by more than rounding on the probe prompt."""
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= _TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"{name}: logits must be within {_TOLERANCE[dtype]:.1%} of those of the model's own attention, "
            f"got {error:.1%}; this kind of attention is not served"
        )


def keeps_bits(model: CausalModel, whole: Tensor) -> bool:
    """Return True if splitting the probe prompt, or batching it, leaves every bit of `whole`, its logits."""
    prompt = prompt_of(model.info)
    cache, other_cache = model.new_cache(), model.new_cache()
    edges = [0, *(cut for cut in _CUTS if cut < len(prompt)), len(prompt)]
    parts = []
    for first, last in pairwise(edges):
        mine = Rows(cache, prompt[first:last], last - first)
        other = Rows(other_cache, prompt[: last - first], 1)
        other_cache.truncate(0)
        parts.append(model.forward([other, mine] if first % 2 else [mine])[first % 2])
    return torch.equal(torch.cat(parts), whole)


def takes_trees(model: CausalModel, whole: Tensor, *, deterministic: bool) -> bool:
    """Return True if the model runs trees and, if it is `deterministic`, they keep its bits.

    Runs a small and a larger step with a tree, so that a device's kernels for trees are compiled.
    """
    try:
        kept = keeps_bits_in_tree(model, whole)
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415  # slow to load

        if not isinstance(error, TorchDynamoException):
            raise
        _LOG.warning("attention to trees not compiled; taking chains", error=str(error))
        return False
    return kept or not deterministic


def keeps_bits_in_tree(model: CausalModel, whole: Tensor) -> bool:
    """Return True if a path of a tree that holds other nodes too has the bits of `whole`, as `keeps_bits`."""
    prompt = prompt_of(model.info)
    root = len(prompt) // 2
    path = prompt[root : root + (len(prompt) - root) // 2]
    # Before each node of the path comes a sibling of it.
    nodes = [node for token in path for node in ((token + 1) % model.info.vocab_size, token)]
    parents = tuple(2 * depth - 1 for depth in range(len(path)) for _ in range(2))
    cache = model.new_cache()
    model.forward([Rows(cache, prompt[:root], 0)])
    steps = [(fed, parents[:last]) for last, fed in ((2, nodes[:2]), (len(nodes), nodes[2:]))]
    parts = [model.forward([Rows(cache, fed, len(fed), above)])[0] for fed, above in steps]
    return torch.equal(torch.cat(parts)[1::2], whole[root : root + len(path)])


def load_model(  # noqa: PLR0913
    spec: str,
    *,
    dtype: str,
    device: str,
    threads: int,
    kv_blocks: int = DEFAULT_KV_BLOCKS,
    ranks: Ranks = ALONE,
    target_model: str | None = None,
    invariant: bool = False,
    quantization: str = NONE,
) -> CausalModel:
    """Resolve and load the model that `spec` names. Raises UnsupportedModel.

    Blocks, for long if a model must be downloaded or converted. `target_model` names the model whose
    embeddings a trained draft uses. `invariant` asks a CUDA device for the same bits in any step.
    `quantization` is NONE or INT8.
    """
    directory = resolve_model(spec)
    target = resolve_model(target_model) if target_model and takes_embeddings(directory) else None
    model = CausalModel.load(
        directory,
        dtype=parse_dtype(dtype, device),
        device=device,
        threads=threads,
        name=model_name(spec),
        kv_blocks=kv_blocks,
        ranks=ranks,
        target=target,
        options=DeviceOptions(invariant=invariant),
        quantization=quantization,
    )
    hand_back_free_memory()
    return model
