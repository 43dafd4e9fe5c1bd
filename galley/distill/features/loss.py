"""The loss of a feature draft: it rewards equal choices of draft and target, at every temperature at once.

Draft and target add the same Gumbel noise. At temperature T both choose token v with probability
1 / sum_u max(p_u / p_v, q_u / q_v), for the target's p and the draft's q at T (Daliri, Musco, Suresh, arXiv
2408.07978, section 3). The sum over v is what decides how many sampled draft tokens are accepted, and has a
gradient. Temperature 0 is rewarded by cross entropy with the target's likeliest token, and the
cross entropy with its distribution keeps tokens in sight that the draft does not rank yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEMPERATURES = (0.7, 1.0)
"""The temperatures of sampled draft tokens that the loss rewards, beside 0."""
# Weight of the target's likeliest token in the cross entropy, and of the chance of equal choices beside it.
HARDNESS, COUPLING = 0.5, 1.0
# Bounds exp(); beyond it a chance is 0.
_LARGEST_LOG = 30.0


@dataclass(frozen=True, slots=True)
class TargetLabels:
    """The target's likeliest tokens among those of the head, at some places.

    `logits` are relative to the largest of the whole vocabulary, and so are the normalizers `log_z`.
    """

    ids: Tensor  # int64 rows of the head, likeliest first [places, labels]
    logits: Tensor  # [places, labels]
    log_z: Tensor  # of the whole vocabulary at each of TEMPERATURES, [places, temperatures]

    def log_probs(self, temperature: int) -> Tensor:
        return self.logits / TEMPERATURES[temperature] - self.log_z[:, temperature, None]


def feature_loss(states: Tensor, head: Tensor, labels: TargetLabels, coupling: float = COUPLING) -> Tensor:
    """Return the loss of each place [places]: `states` [places, hidden], `head` [head_rows, hidden]."""
    chosen, log_z = scores(states, head, labels.ids)
    plain = TEMPERATURES.index(1.0)
    weights = labels.log_probs(plain).exp() * (1 - HARDNESS)
    # The likeliest token of the head is the likeliest of all, unless that one is outside the head.
    weights = torch.cat([weights[:, :1] + HARDNESS * (labels.logits[:, :1] >= 0), weights[:, 1:]], 1)
    loss = (weights * (log_z[:, plain, None] - chosen)).sum(1)
    for place, temperature in enumerate(TEMPERATURES):
        ours = chosen / temperature - log_z[:, place, None]
        loss = loss + coupling * (1 - equal_choices(labels.log_probs(place), ours))
    return loss


def equal_choices(theirs: Tensor, ours: Tensor) -> Tensor:
    """Return the probability [rows] that both choose the same token, one of those given.

    `theirs` and `ours` are log-probabilities [rows, tokens] of the same tokens. The other tokens' mass is
    taken as disjoint, so the result is a lower bound.
    """
    rest = [(1 - logs.exp().sum(1, keepdim=True)).clamp_min(0.0) for logs in (theirs, ours)]
    # [rows, v, u]: log p_u / p_v and log q_u / q_v
    larger = torch.maximum(*(logs.unsqueeze(1) - logs.unsqueeze(2) for logs in (theirs, ours)))
    total = larger.clamp_max(_LARGEST_LOG).exp().sum(2)
    for mass, logs in zip(rest, (theirs, ours), strict=True):
        total = total + mass * (-logs).clamp_max(_LARGEST_LOG).exp()
    return total.reciprocal().sum(1)


def scores(states: Tensor, head: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [rows, labels] of some rows of the head, and log-normalizers [rows, TEMPERATURES]."""
    chosen, log_z = _Scores.apply(states, head, ids)  # type: ignore[no-untyped-call]  # torch has none
    return chosen, log_z


class _Scores(torch.autograd.Function):
    """Logits of a large head whose backward reads them once."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        narrow = head.to(states.dtype)
        logits = (states @ narrow.T).float()
        log_z = torch.stack([(logits / temperature).logsumexp(1) for temperature in TEMPERATURES], 1)
        ctx.save_for_backward(states, head, ids, logits, log_z)
        return logits.gather(1, ids), log_z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        states, head, ids, logits, log_z = ctx.saved_tensors
        push = torch.zeros_like(logits)
        for place, temperature in enumerate(TEMPERATURES):
            probs = (logits / temperature).sub_(log_z[:, place, None]).exp_()
            push.addcmul_(probs, grads[1][:, place, None], value=1 / temperature)
        push = push.scatter_add_(1, ids, grads[0]).to(states.dtype)
        return push @ head.to(states.dtype), (push.T @ states).to(head.dtype), None
