"""Accept a draft token iff it equals the target's own token at that position.

The target samples with the noise of the position, which the draft shares (`galley/core/noise.py`). The ratio
test of Leviathan et al. (arXiv 2211.17192) needs independent noise and would be biased here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `tokens` that one verification confirmed; the first `accepted` of them are draft tokens."""

    tokens: tuple[int, ...]
    accepted: int


def accepted_length(draft_tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the length of the longest common prefix of the draft's and the target's tokens."""
    for i, (draft_token, token) in enumerate(zip(draft_tokens, sampled, strict=False)):
        if draft_token != token:
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
    """Return the accepted draft tokens and one target token, cut after a stop token and at max_position.

    `sampled[i]` is the target's token for `position + i` given `draft_tokens[:i]`; it may end at the first
    disagreement. `output_len` output tokens were confirmed before. A stop token among the first `min_tokens`
    output tokens does not end the answer.
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
    """Return the chance that draft and target sample the same token when they share their Gumbel noise.

    Sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i) (Daliri et al., arXiv 2408.07978). Tokens that
    one of them never samples add nothing. Takes O(vocabulary squared): for small vocabularies.
    """
    pairs = list(zip(target_probs, draft_probs, strict=True))
    return sum(
        1.0 / sum(max(p_j / p_i, q_j / q_i) for p_j, q_j in pairs)
        for p_i, q_i in pairs
        if p_i > 0.0 and q_i > 0.0
    )


def total_variation(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return half the summed absolute difference of two distributions, in [0, 1]."""
    return 0.5 * sum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True))


def match_probability_bound(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return a lower bound of `match_probability`: (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    distance = total_variation(target_probs, draft_probs)
    return (1.0 - distance) / (1.0 + distance)
