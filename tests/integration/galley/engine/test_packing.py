"""How many rows products are given: few numbers, for oneDNN keeps half a megabyte of code for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from galley.engine.cpu import packing
from galley.engine.cpu.packing import rows_of_product
from galley.engine.model import MAX_ROWS
from tests.fakes.model_configs import CONFIGS, load, tokens_of, whole

MOST_NUMBERS = 16 + 24 + (MAX_ROWS - 64) // 8
_PRODUCTS = ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::linear")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.rows: set[int] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in _PRODUCTS:
            self.dtypes.add(args[0].dtype)
            self.rows.add(int(args[0].shape[0]))
        return func(*args, **(kwargs or {}))


def test_torch_multiplies_bfloat16_in_float32_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(64, 32).bfloat16()
    rows = torch.randn(9, 64).bfloat16()
    wide = torch.nn.functional.linear(rows.float(), layer.weight.float(), layer.bias.float()).bfloat16()
    monkeypatch.setattr(packing, "has_native_bfloat16", lambda: False)
    with packing.torch_products(torch.bfloat16, "cpu"), Products() as products:
        assert torch.equal(layer(rows), wide)
    assert products.dtypes == {torch.float32}
    monkeypatch.setattr(packing, "has_native_bfloat16", lambda: True)
    with packing.torch_products(torch.bfloat16, "cpu"), Products() as products:
        layer(rows)
    assert products.dtypes == {torch.bfloat16}


def test_rows_that_change_beside_many_are_multiplied_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with AMX, where oneDNN orders its sums by the number of rows."""

    def multiplied(rows: Any, weight: Any, *_: object) -> Any:
        return (rows.unsqueeze(-2) * weight).sum(-1) + (rows.shape[-2] > 32)

    ops = SimpleNamespace(
        _reorder_linear_weight=lambda weight: weight, _linear_pointwise=SimpleNamespace(default=multiplied)
    )
    monkeypatch.setattr(packing, "_OPS", ops)
    monkeypatch.setattr(packing, "kind", lambda dtype, device: "packed")
    monkeypatch.setattr(packing, "most_rows", lambda dtype: 32)
    weight, rows = torch.randn(16, 8), torch.randn(1, 100, 8)
    product = packing.Linears(torch.float32, "cpu").packed(weight, None)
    assert product is not None
    torch.testing.assert_close(product(rows), torch.nn.functional.linear(rows, weight))


def test_few_row_counts_and_little_padding() -> None:
    given = {rows: rows_of_product(rows, MAX_ROWS) for rows in range(1, MAX_ROWS + 1)}
    assert all(rows <= more <= MAX_ROWS for rows, more in given.items())
    assert all(more == rows for rows, more in given.items() if rows <= 16), "a single stream pays for none"
    assert all(more <= 1.12 * rows for rows, more in given.items())
    assert len(set(given.values())) <= MOST_NUMBERS


def test_steps_use_few_row_counts(make_model: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "kind", lambda dtype, device: "packed")
    model = load(make_model(CONFIGS["llama"]()))
    lengths = range(64, 200)
    with Products() as products:
        for length in lengths:
            whole(model, tokens_of(random.Random(length), length))
    assert max(products.rows) >= max(lengths)
    assert len(products.rows) <= MOST_NUMBERS
