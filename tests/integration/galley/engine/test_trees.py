"""Trees of draft tokens in the engine: the bits of a node are those of the chain of its path."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import TorchDynamoException

from galley.core.errors import Broken
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.kv.compaction import compaction
from galley.core.step import StepChunk, TokenMove
from galley.core.trees import CHAIN, Parents, depths, path_to
from galley.engine import pages
from galley.engine.model import CausalModel, Rows
from galley.engine.paged import CompiledAttention
from galley.engine.pages import FlatPool, KvPool, KvShape, Shape, Span
from tests.fakes.model_configs import CONFIGS, VOCAB, load, tokens_of, whole
from tests.fakes.random_trees import RandomTree, tree_around

MakeModel = Callable[[Any], Path]

CPU = torch.device("cpu")
BLOCKS = 48
KINDS = ("llama", "qwen3", "mistral", "gemma2", "gpt2")
DTYPES = (torch.float32, torch.bfloat16)


def random_tree(rng: random.Random, nodes: int) -> RandomTree:
    path = tokens_of(rng, nodes // 3)
    return tree_around(rng, path, tokens_of(rng, nodes - len(path)))


def chains(model: CausalModel, prefix: list[int], tree: RandomTree, blocks: Sequence[int]) -> torch.Tensor:
    """Return the logits after each node, of a chain of its path alone."""
    paths = [path_to(tree.parents, node) for node in range(len(tree.tokens))]
    rows = [
        model.run([StepChunk(0, [*prefix, *(tree.tokens[node] for node in path)], blocks, 1)])
        for path in paths
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_has_the_bits_of_the_chain_of_its_path(
    kind: str, dtype: torch.dtype, make_model: MakeModel
) -> None:
    model = load(make_model(CONFIGS[kind]()), dtype, kv_blocks=BLOCKS)
    assert model.info.trees
    rng = random.Random(3)
    for nodes in (2, 9, 30):
        prefix, tree = tokens_of(rng, rng.randint(20, 70)), random_tree(rng, nodes)
        expected = chains(model, prefix, tree, range(40, 45))
        model.kv.keys[:, :20], model.kv.values[:, :20] = torch.nan, torch.nan
        other = random_tree(rng, 7)
        company = StepChunk(0, [*prefix[:33], *other.tokens], [7, 3], 8, parents=other.parents)
        mine = StepChunk(0, [*prefix, *tree.tokens], [5, 1, 9, 4], nodes, parents=tree.parents)
        assert torch.equal(model.run([mine]), expected)
        assert torch.equal(model.run([company, mine, StepChunk(0, [3], [11], 1)])[8:-1], expected)


SIGHTS = st.fixed_dictionaries(
    {
        "group": st.sampled_from([1, 3, 7]),
        "dim": st.sampled_from([8, 48]),
        "prefix": st.integers(0, 100),
        "before": st.integers(0, 3),
        "nodes": st.integers(1, 40),
        "window": st.sampled_from([None, 1, 4, 33]),
        "softcap": st.sampled_from([None, 2.0]),
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 2**16),
    }
)


@settings(max_examples=40)
@given(SIGHTS)
def test_attention_of_a_node_has_the_bits_of_a_chain(case: dict[str, Any]) -> None:
    rng = random.Random(case["seed"])
    generator = torch.Generator().manual_seed(case["seed"])
    group, dim, dtype = case["group"], case["dim"], case["dtype"]
    pool = KvPool(KvShape(1, 2, dim, dim, dtype), 8, CPU)
    for part in (pool.keys, pool.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    attention = CompiledAttention(pool, 2 * group, 8 * BLOCK_TOKENS)
    start, nodes, shape = case["prefix"], case["nodes"], Shape(0.4, case["window"], case["softcap"])
    rows, blocks = case["before"] + nodes, [6, 2, 5, 3, 0]
    query, key, value = (
        torch.randn(rows, heads, dim, generator=generator).to(dtype) for heads in (2 * group, 2, 2)
    )
    parents = tree_around(rng, [], [0] * nodes).parents
    laid_out = attention.lay_out([Span(start, rows, blocks, parents)])
    root = start + case["before"]
    assert laid_out.positions[case["before"] :].tolist() == [root + depth for depth in depths(parents, nodes)]
    mixed = attention.store_attend(laid_out, 0, query, key, value, shape)
    written = pool.keys.clone(), pool.values.clone()
    for node in rng.sample(range(nodes), min(nodes, 4)):
        path = path_to(parents, node)
        pool.move(compaction(blocks, BLOCK_TOKENS, root, path))
        row = slice(case["before"] + node, case["before"] + node + 1)
        alone = attention.lay_out([Span(root + len(path) - 1, 1, blocks)])
        again = attention.store_attend(alone, 0, query[row], key[row], value[row], shape)
        assert torch.equal(again, mixed[row])
        pool.keys.copy_(written[0])
        pool.values.copy_(written[1])


def test_an_engine_whose_trees_change_bits_takes_none(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_before(parents: Parents, root: int) -> list[list[int]]:
        return [list(range(root, root + node + 1)) for node in range(len(parents))]

    monkeypatch.setattr(pages, "slots_of_paths", all_before)
    info = load(make_model(CONFIGS["llama"]()), kv_blocks=BLOCKS).info
    assert (info.deterministic, info.trees) == (True, False)


def test_trees_that_do_not_compile_are_not_taken(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model(CONFIGS["llama"]())
    monkeypatch.setattr("galley.engine.model.keeps_bits", lambda *_: False)
    assert load(directory, kv_blocks=BLOCKS).info.trees, "nothing is promised that they would break"

    def fail(*_: object) -> list[list[int]]:
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr(pages, "slots_of_paths", fail)
    assert not load(directory, kv_blocks=BLOCKS).info.trees

    def lack_memory(*_: object) -> list[list[int]]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pages, "slots_of_paths", lack_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        load(directory, kv_blocks=BLOCKS)


def test_a_tree_fed_step_by_step_is_the_tree_fed_at_once(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["mistral"]()), torch.bfloat16, kv_blocks=BLOCKS)
    rng = random.Random(4)
    prefix, tree = tokens_of(rng, 50), random_tree(rng, 24)
    (expected,) = model.forward([Rows(model.new_cache(), [*prefix, *tree.tokens], 24, tree.parents)])
    cache, other = model.new_cache(), model.new_cache()
    model.forward([Rows(cache, prefix[:45], 0)])
    parts = [model.forward([Rows(cache, [*prefix[45:], *tree.tokens[:5]], 5, tree.parents[:5])])[0]]
    for first, last in ((5, 6), (6, 17), (17, 24)):
        batch = [
            Rows(other, prefix[:3], 1),
            Rows(cache, tree.tokens[first:last], last - first, tree.parents[:last]),
        ]
        parts.append(model.forward(batch)[1])
    assert torch.equal(torch.cat(parts), expected)
    assert (cache.tokens, cache.tree, cache.parents) == (prefix, tree.tokens, tree.parents)
    cache.truncate(40)
    assert (cache.slots, cache.tree, cache.parents) == (40, [], CHAIN)
    (again,) = model.forward([Rows(cache, prefix[40:], 1)])
    assert torch.equal(again, whole(model, prefix)[-1:])


def test_a_kept_path_goes_on_as_a_chain(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=BLOCKS)
    rng = random.Random(5)
    prefix, path, following = tokens_of(rng, 61), tokens_of(rng, 7), tokens_of(rng, 3)
    expected = whole(model, [*prefix, *path, *following])
    for _ in range(5):
        cache, tree = model.new_cache(), tree_around(rng, path, tokens_of(rng, 12))
        model.forward([Rows(cache, [*prefix, *tree.tokens], 0, tree.parents)])
        model.keep_path(cache, tree.path)
        assert (cache.tokens, cache.tree, len(cache.blocks)) == ([*prefix, *path], [], 3)
        (logits,) = model.forward([Rows(cache, following, 3)])
        assert torch.equal(logits, expected[-3:])


@pytest.mark.parametrize("kind", [KvPool, FlatPool])
def test_moves_read_all_slots_before_they_write(kind: type[KvPool]) -> None:
    pool = kind(KvShape(2, 3, 16, 40, torch.float32), 4, CPU)
    for number, part in enumerate((pool.keys, pool.values)):
        part.copy_(torch.arange(part.numel()).view(part.shape) + number)
    moves = [TokenMove(2, 1, 2, 0), TokenMove(2, 3, 2, 1), TokenMove(1, 0, 2, 31)]
    before = [_token(pool, move[0], move[1]) for move in moves]
    kept = _token(pool, 2, 3)
    pool.move(moves)
    assert all(
        torch.equal(_token(pool, move[2], move[3]), token) for move, token in zip(moves, before, strict=True)
    )
    assert torch.equal(_token(pool, 2, 3), kept)


def _token(pool: KvPool, block: int, slot: int) -> torch.Tensor:
    """Return a copy of the keys and values of a slot, [layers, kv_heads, key_dim + value_width]."""
    if isinstance(pool, FlatPool):
        return torch.cat([pool.keys[:, :, block, slot], pool.values[:, :, block, slot]], dim=-1)
    return torch.cat([pool.keys[:, block, :, :, slot], pool.values[:, block, :, slot]], dim=-1)


def test_trees_and_moves_out_of_bounds_are_refused_before_any_work(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=BLOCKS)
    model.kv.keys.zero_()
    good = StepChunk(0, [1, 2], [0], 2, parents=(-1, -1))
    for parents in ((-1, -1, -1), (-2,), (0,), (-1, 1), (-1, 5)):
        with pytest.raises(Broken, match="parents: must be"):
            model.run([good, StepChunk(0, [1, 2], [1], 1, parents=parents)])
    for moves in (
        [TokenMove(BLOCKS, 0, 0, 0)],
        [TokenMove(0, 0, -1, 0)],
        [TokenMove(0, BLOCK_TOKENS, 0, 0)],
        [TokenMove(0, 1, 0, -1)],
        [TokenMove(0, 1, 0, 0), TokenMove(0, 2, 0, 0)],
    ):
        with pytest.raises(Broken):
            model.run([good], moves=moves)
    assert not model.kv.keys.any()


def test_rows_that_do_not_extend_the_tree_leave_the_cache_unchanged(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=BLOCKS)
    cache = model.new_cache()
    with pytest.raises(Broken, match="parents: must be at most 1, got 2"):
        model.forward([Rows(cache, [1], 1, (-1, -1))])
    model.forward([Rows(cache, [5, 6, 7], 0, (-1, -1))])
    for tokens, parents in (
        ([8], CHAIN),
        ([8], (-1, -1)),
        ([8], (-1, 0, 0)),
        ([8, 9], (-1, -1, 1)),
        ([8], (-1, -1, 2)),
    ):
        with pytest.raises(Broken, match="parents: must"):
            model.forward([Rows(cache, tokens, 1, parents)])
    assert (cache.tokens, cache.tree, cache.parents) == ([5], [6, 7], (-1, -1))
    with pytest.raises(Broken, match="tokens: must"):
        model.forward([Rows(cache, [VOCAB], 1, (-1, -1, 1))])
    assert cache.slots == 3
