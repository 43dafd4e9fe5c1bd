"""The loss and its own gradient, against torch's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import log_softmax

from galley.distill.data.corpus import epoch_groups
from galley.distill.training.training import Labels, distilled
from galley.engine.cpu.int8 import quantized

_FEW = settings(derandomize=True, max_examples=20)


@_FEW
@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 10**6))
def test_loss_and_gradients_are_those_of_the_cross_entropy(rows: int, head_rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    states = torch.randn(rows, 4, requires_grad=True)
    head = torch.randn(head_rows, 4, requires_grad=True)
    ids = torch.stack([torch.randperm(head_rows)[:2] for _ in range(rows)])
    probs = torch.rand(rows, 2) / 2
    probs[0] = 0.0
    ours = distilled(states, head, ids, probs)
    plain = -(probs * log_softmax(states @ head.T, -1).gather(1, ids)).sum() / rows
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, [states, head]), torch.autograd.grad(plain, [states, head])
    )


@_FEW
@given(st.lists(st.integers(2, 90), min_size=1, max_size=60), st.integers(1, 300), st.integers(0, 99))
def test_an_epoch_has_every_conversation_once_within_the_budget(
    lengths: list[int], budget: int, epoch: int
) -> None:
    tokens: NDArray[np.int64] = np.array(lengths)
    groups = epoch_groups(tokens, budget, 1, epoch)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(tokens)))
    assert all(len(group) == 1 or tokens[group].max() * len(group) <= budget for group in groups)


def test_hardness_moves_weight_to_the_likeliest() -> None:
    labels = Labels(np.array([[3, 5]], np.int32), np.array([[0.5, 0.25]], np.float16))
    ids, probs = labels.at(np.array([0]), 0.5)
    assert ids.tolist() == [[3, 5]]
    assert probs.tolist() == [[0.625, 0.125]]


def test_int8_rows_are_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    weight = torch.cat([torch.randn(5, 64), torch.zeros(1, 64)])
    rows, scale = quantized(weight)
    off = (rows.float() * scale[:, None] - weight).abs()
    assert bool((off <= scale[:, None] / 2 + 1e-7).all())
    assert rows.dtype == torch.int8
