"""Cross-entropy against a few likely tokens a row, with its gradient computed in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Distilled(torch.autograd.Function):
    """Computes both gradients in forward: the logits of a large head are read once, not four times."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        narrow = head.to(states.dtype)
        logits = (states @ narrow.T).float()  # [rows, head]
        log_z = torch.logsumexp(logits, -1, keepdim=True)
        loss = (probs * (log_z - logits.gather(1, ids))).sum() / len(states)
        push = logits.sub_(log_z).exp_().mul_(probs.sum(1, keepdim=True))  # towards q, away from p
        push.scatter_add_(1, ids, -probs)
        push = push.div_(len(states)).to(states.dtype)
        ctx.save_for_backward(push @ narrow, (push.T @ states).to(head.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states, head = ctx.saved_tensors
        return states * grads[0].to(states.dtype), head * grads[0], None, None


def distilled(states: Tensor, head: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return the mean over rows of -sum p log q: the draft's q against the target's p, up to p's entropy.

    states [rows, hidden]; head [head_rows, hidden]; ids [rows, labels] rows of the head; probs [rows,
    labels] their probabilities in the target, 0 for no label. (Hinton et al., arXiv 1503.02531.)
    """
    loss: Tensor = _Distilled.apply(states, head, ids, probs)  # type: ignore[no-untyped-call]  # torch has none
    return loss
