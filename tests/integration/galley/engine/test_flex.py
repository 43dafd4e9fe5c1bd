"""Attention over pages in place, as a GPU is to do it, on the CPU: a stand-in for the kernel."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from galley.core.errors import UnsupportedModel
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine import paged
from galley.engine.cuda import flex, flex_layout
from galley.engine.cuda.device import DeviceOptions
from galley.engine.cuda.flex import FlexAttention, attend_by, compiled_flex
from galley.engine.paged import TorchAttention
from galley.engine.pages import FlatPool, KvPool, KvShape, Shape, Span
from tests.fakes.random_trees import tree_around
from tests.integration.galley.engine.flex_standin import kernel

CPU = torch.device("cpu")
BLOCKS = 24
KERNEL = partial(attend_by, kernel)

CASES = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 3, 7, 20]),
        "key_dim": st.sampled_from([16, 48]),
        "value_dim": st.sampled_from([16, 40]),
        "window": st.sampled_from([None, 1, 5, 32, 70]),
        "softcap": st.sampled_from([None, 2.0]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "fixed": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


def _spans(rng: random.Random, most: int) -> list[Span]:
    free = list(range(BLOCKS))
    rng.shuffle(free)
    shared = [free.pop(), free.pop()]
    spans = []
    for _ in range(rng.randint(1, most)):
        start, rows = rng.choice([0, 1, 40, 64, 70, 96]), rng.choice([1, 1, 2, 6, 33])
        blocks = list(shared) if start >= 2 * BLOCK_TOKENS and rng.random() < 0.6 else []
        while len(blocks) * BLOCK_TOKENS < start + rows:
            blocks.append(free.pop())
        # Blocks that sequences share hold no nodes.
        nodes = rng.choice([0, 0, 3, 40])
        others = [0] * min(nodes, rows + (start % BLOCK_TOKENS if start < 2 * BLOCK_TOKENS else 0))
        spans.append(Span(start, rows, blocks, tree_around(rng, [], others).parents))
    return spans


def _flat(pool: KvPool) -> FlatPool:
    flat = FlatPool(pool.shape, pool.blocks, CPU)
    flat.keys[:, :, : pool.blocks] = pool.keys.permute(0, 2, 1, 4, 3)
    flat.values[:, :, : pool.blocks] = pool.values.transpose(1, 2)
    return flat


def _pool(case: dict[str, Any], generator: torch.Generator) -> KvPool:
    shape = KvShape(2, case["kv_heads"], case["key_dim"], case["value_dim"], case["dtype"])
    pool = KvPool(shape, BLOCKS, CPU)
    for part in (pool.keys, pool.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return pool


def _rows(case: dict[str, Any], rows: int, generator: torch.Generator) -> list[Tensor]:
    heads = case["kv_heads"] * case["group"]
    sizes = (
        (heads, case["key_dim"]),
        (case["kv_heads"], case["key_dim"]),
        (case["kv_heads"], case["value_dim"]),
    )
    return [torch.randn(rows, *size, generator=generator).to(case["dtype"]) for size in sizes]


def _both(
    case: dict[str, Any], spans: Sequence[Span], attend: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    pool = _pool(case, generator)
    flat = _flat(pool)
    heads = case["kv_heads"] * case["group"]
    query, key, value = _rows(case, sum(span.rows for span in spans), generator)
    shape = Shape(0.3, case["window"], case["softcap"])
    ours = FlexAttention(flat, heads, fixed=case["fixed"], attend=attend)
    plain = TorchAttention(pool, heads)
    return (
        ours.store_attend(ours.lay_out(spans), 1, query, key, value, shape),
        plain.store_attend(plain.lay_out(spans), 1, query, key, value, shape),
    )


def _close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@settings(max_examples=60)
@given(CASES)
def test_blocks_and_mask_equal_plain_torch(case: dict[str, Any]) -> None:
    ours, theirs = _both(case, _spans(random.Random(case["seed"]), 5), KERNEL)
    _close(ours, theirs)


@settings(max_examples=4)
@given(CASES)
def test_torchs_own_operator_takes_mask_and_views(case: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = _both(case, _spans(random.Random(case["seed"]), 1), partial(attend_by, flex_attention))
    _close(ours, theirs)


def test_a_kernel_is_compiled_once_for_its_scale_and_tiles() -> None:
    calls: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        calls.extend(node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph.forward

    case = {"kv_heads": 2, "group": 3, "key_dim": 16, "value_dim": 40, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(7)
    pool = _pool(case, generator)
    attention = FlexAttention(_flat(pool), 6, attend=compiled_flex(backend))
    plain = TorchAttention(pool, 6)
    kinds = [Shape(0.3), Shape(0.4), Shape(0.3, 20), Shape(0.3, 21, 2.0)]
    with torch.inference_mode():
        for shape in kinds:
            for rows in (1, 3, 15, 16):
                parts = _rows(case, rows, generator)
                pages = attention.lay_out([Span(40, rows, [3, 1])])
                ours = attention.store_attend(pages, 0, parts[0], parts[1], parts[2], shape)
                _close(ours, plain.store_attend(pages, 0, parts[0], parts[1], parts[2], shape))
    assert [node.args[5] for node in calls] == [shape.scale for shape in kinds]
    assert all(node.kwargs == {} for node in calls)


def test_trees_of_any_size_use_one_kernel() -> None:
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    case = {"kv_heads": 2, "group": 3, "key_dim": 16, "value_dim": 40, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(9)
    pool = _pool(case, generator)
    attention, plain = FlexAttention(_flat(pool), 6, attend=compiled_flex(backend)), TorchAttention(pool, 6)
    rng = random.Random(9)
    with torch.inference_mode():
        for nodes in (0, 4, 15, 3, 90):
            parents = tree_around(rng, [], [0] * nodes).parents
            rows = max(1, nodes)
            parts = _rows(case, rows, generator)
            pages = attention.lay_out([Span(20, rows, [3, 1, 7, 4], parents)])
            ours = attention.store_attend(pages, 0, parts[0], parts[1], parts[2], Shape(0.3, 20))
            _close(ours, plain.store_attend(pages, 0, parts[0], parts[1], parts[2], Shape(0.3, 20)))
    # Chains, trees, and trees in wider tiles.
    assert compiled == 3


def test_a_row_is_the_same_in_any_batch_and_chunk() -> None:
    case = {"kv_heads": 2, "group": 3, "key_dim": 16, "value_dim": 16, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(3)
    pool = _flat(_pool(case, generator))
    attention = FlexAttention(pool, 6, fixed=True, attend=KERNEL)
    query, key, value = _rows(case, 40, generator)

    def rows(first: int, last: int, company: list[Span]) -> Tensor:
        spans = [*company, Span(50 + first, last - first, [5, 2, 9])]
        before = sum(span.rows for span in company)
        parts = [
            torch.cat([torch.randn(before, *part.shape[1:]), part[first:last]])
            for part in (query, key, value)
        ]
        pages = attention.lay_out(spans)
        return attention.store_attend(pages, 0, parts[0], parts[1], parts[2], Shape(0.3, 45))[before:]

    whole = rows(0, 40, [])
    other = [Span(3, 20, [7]), Span(0, 1, [8])]
    cut = [rows(first, last, company) for first, last, company in ((0, 7, other), (7, 8, []), (8, 40, other))]
    torch.testing.assert_close(torch.cat(cut), whole, atol=1e-6, rtol=1e-6)


def test_a_bad_row_spoils_only_rows_that_attend_to_it() -> None:
    case = {"kv_heads": 1, "group": 2, "key_dim": 16, "value_dim": 16, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(4)
    pool = _flat(_pool(case, generator))
    attention = FlexAttention(pool, 2, attend=KERNEL)
    query, key, value = _rows(case, 6, generator)
    value[3] = torch.inf
    pages = attention.lay_out([Span(0, 6, [4])])
    spoiled = attention.store_attend(pages, 0, query, key, value, Shape(0.3))
    assert spoiled[:3].isfinite().all()
    assert spoiled[3:].isnan().all(), "what saw it says so"
    again = attention.store_attend(
        attention.lay_out([Span(0, 2, [4])]), 0, query[:2], key[:2], value[:2], Shape(0.3)
    )
    assert torch.equal(again, spoiled[:2])


def test_padding_rows_change_no_block_and_attend_to_nothing() -> None:
    case = {"kv_heads": 2, "group": 3, "key_dim": 16, "value_dim": 16, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(5)
    pool = _flat(_pool(case, generator))
    attention = FlexAttention(pool, 6, attend=KERNEL)
    query, key, value = _rows(case, 80, generator)
    spans = [Span(40, 5, [1, 2]), Span(0, 1, [3])]
    before = pool.keys.clone()
    mixed = attention.store_attend(attention.lay_out(spans), 0, query, key, value, Shape(0.3))
    assert mixed[:6].any(dim=(1, 2)).all()
    assert not mixed[6:].any()
    written = (pool.keys != before).any(-1).any(1).any(0)  # [blocks + 1, block_tokens]
    assert written[2, 8:13].all()
    assert written[3, 0]
    assert written[: pool.scratch].sum() == 6


@pytest.mark.parametrize("group", [1, 3, 9, 16, 20])
def test_tiles_hold_a_product_of_tensor_cores_and_whole_rows(group: int) -> None:
    for longest in (1, 5, 40, 500):
        slots = flex_layout.slots_of(group, longest, fixed=False)
        assert slots >= 16
        assert slots.bit_count() == 1
        assert slots >= group
        assert flex_layout.slots_of(group, longest, fixed=True) == flex_layout.slots_of(group, 1, fixed=False)


def test_blocks_are_copied_whole() -> None:
    case = {"kv_heads": 2, "key_dim": 16, "value_dim": 40, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(6)
    plain = _pool(case, generator)
    flat = _flat(plain)
    for pool in (plain, flat):
        pool.copy([(3, 4), (4, 9)])
    assert torch.equal(flat.keys, _flat(plain).keys)
    assert torch.equal(flat.values, _flat(plain).values)
    assert flat.nbytes == (BLOCKS + 1) * flat.block_bytes, "one block more than told"


def test_the_cpu_keeps_its_kernels_and_its_pool() -> None:
    shape = KvShape(1, 1, 16, 16, torch.bfloat16)
    pool = paged.pool_for(shape, 4, CPU, DeviceOptions(invariant=True))
    assert type(pool) is KvPool
    assert isinstance(paged.attention_for(pool, 2, CPU, 64), paged.CompiledAttention)
    assert isinstance(paged.attention_for(FlatPool(shape, 4, CPU), 2, CPU, 64), FlexAttention)


def test_failed_compilation_is_detected_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KvShape(3, 2, 16, 40, torch.float32)
    monkeypatch.setattr(flex, "compiled_flex", lambda: KERNEL)
    assert flex.can_compile(CPU, shape)

    def fails(*_arguments: object) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(flex, "compiled_flex", lambda: fails)
    assert not flex.can_compile(CPU, shape)


def test_invariance_without_flex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "can_serve", lambda *_: False)
    shape = KvShape(1, 1, 16, 16, torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="invariant"):
        paged.pool_for(shape, 4, torch.device("cuda"), DeviceOptions(invariant=True))
