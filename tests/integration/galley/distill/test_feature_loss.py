"""The chance of equal choices, against sampling it, and the head's gradient against torch's."""

from __future__ import annotations

import torch

from galley.distill.features.loss import TEMPERATURES, TargetLabels, equal_choices, feature_loss, scores


def test_the_chance_of_equal_choices_is_that_of_sampling_with_the_same_noise() -> None:
    torch.manual_seed(1)
    theirs, ours = torch.randn(3, 8).mul(2).log_softmax(1), torch.randn(3, 8).mul(2).log_softmax(1)
    noise = -torch.empty(40_000, 1, 8).exponential_().log()
    sampled = ((theirs + noise).argmax(2) == (ours + noise).argmax(2)).float().mean(0)
    torch.testing.assert_close(equal_choices(theirs, ours), sampled, rtol=0, atol=0.01)
    torch.testing.assert_close(equal_choices(theirs, theirs), torch.ones(3))
    # Some of the tokens only: a lower bound.
    some = equal_choices(theirs[:, :5], ours[:, :5])
    assert bool((some <= equal_choices(theirs, ours) + 1e-6).all())


def test_gradients_of_scores_are_torchs() -> None:
    torch.manual_seed(2)
    states, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    ids = torch.stack([torch.randperm(9)[:3] for _ in range(5)])
    logits = states @ head.T
    plain = logits.gather(1, ids), torch.stack([(logits / t).logsumexp(1) for t in TEMPERATURES], 1)
    ours = scores(states, head, ids)
    weights = [torch.randn_like(tensor) for tensor in plain]
    torch.testing.assert_close(ours, plain)
    ours_grad, plain_grad = (
        torch.autograd.grad(both, [states, head], grad_outputs=weights) for both in (ours, plain)
    )
    torch.testing.assert_close(ours_grad, plain_grad)


def test_the_loss_falls_to_a_draft_that_chooses_as_the_target() -> None:
    torch.manual_seed(3)
    head = torch.eye(6)
    logits = torch.randn(4, 6) * 2
    logits -= logits.max(1, keepdim=True).values
    likely = logits.sort(1, descending=True)
    log_z = torch.stack([(logits / t).logsumexp(1) for t in TEMPERATURES], 1)
    labels = TargetLabels(likely.indices, likely.values, log_z)
    states = torch.zeros(4, 6, requires_grad=True)
    optimizer = torch.optim.Adam([states], lr=0.1)
    loss = first = feature_loss(states, head, labels).mean()
    for _ in range(200):
        optimizer.zero_grad()
        loss = feature_loss(states, head, labels).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has none
        optimizer.step()
    assert loss.item() < first.item() - 1.0
    assert torch.equal(states.argmax(1), logits.argmax(1))
    assert float(equal_choices(logits.log_softmax(1), states.detach().log_softmax(1)).mean()) > 0.8
