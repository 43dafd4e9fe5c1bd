"""The one rule of acceptance: accept iff equal.

The target samples its own token at every position with the noise of that position; the draft's guess is
accepted where it is that very token. Draft and target share their noise (galley/core/noise.py), so the
ratio test of Leviathan et al. (arXiv 2211.17192), which needs independent noise, would be biased here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification confirmed: `tokens`, of which the first `accepted` are the draft's too."""

    tokens: tuple[int, ...]
    accepted: int


def accepted_length(draft_tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """The length of the longest prefix on which the draft guessed what the target sampled."""
    for i, (guess, token) in enumerate(zip(draft_tokens, sampled, strict=False)):
        if guess != token:
            return i
    return min(len(draft_tokens), len(sampled))


def confirm(
    draft_tokens: Sequence[int],
    sampled: Sequence[int],
    *,
    position: int,
    max_position: int,
    stop_token_ids: Set[int],
    output_len: int = 0,
    min_tokens: int = 0,
) -> Verdict:
    """The accepted draft tokens and one of the target's, cut after a stop token and at max_position.

    `sampled[i]` is the target's token for `position + i` given `draft_tokens[:i]`; nothing after the first
    disagreement is looked at, so it may end there. `output_len` output tokens were confirmed before; a stop
    token among the first `min_tokens` of the output does not end it.
    """
    accepted = accepted_length(draft_tokens, sampled)
    room = max(0, max_position - position)
    tokens = tuple(sampled[: min(accepted + 1, room)])
    for i, token in enumerate(tokens):
        if token in stop_token_ids and output_len + i >= min_tokens:
            tokens = tokens[: i + 1]
            break
    return Verdict(tokens, min(accepted, len(tokens)))


def match_probability(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """The chance that draft and target, sharing their Gumbel noise, sample the same token.

    Sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i) (Daliri et al., arXiv 2408.07978); a
    token that either of them never samples adds nothing. O(vocabulary squared): for small ones.
    """
    pairs = list(zip(target_probs, draft_probs, strict=True))
    return sum(
        1.0 / sum(max(p_j / p_i, q_j / q_i) for p_j, q_j in pairs)
        for p_i, q_i in pairs
        if p_i > 0.0 and q_i > 0.0
    )


def total_variation(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Half the summed absolute difference, in [0, 1]."""
    return 0.5 * sum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True))


def match_probability_bound(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """What `match_probability` is at least: (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978)."""
    distance = total_variation(target_probs, draft_probs)
    return (1.0 - distance) / (1.0 + distance)
