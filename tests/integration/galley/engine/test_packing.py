"""How many rows products are given: few numbers, for oneDNN keeps half a megabyte of code for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in _PRODUCTS:
            self.rows.add(int(args[0].shape[0]))
        return func(*args, **(kwargs or {}))


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
