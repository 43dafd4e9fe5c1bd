"""Accept a draft token iff it equals the target's own token at that position.

The target samples with the noise of the position, which the draft shares (`galley/core/noise.py`). The ratio
test of Leviathan et al. (arXiv 2211.17192) needs independent noise and would be biased here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from galley.core.content import common_prefix_len
from galley.core.trees import CHAIN, Parents, follow


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `tokens` that one verification confirmed; the first `accepted` of them are draft tokens.

    These are one path of a tree of draft tokens; `trees.follow` finds it.

    With `stopped`, the last of them is a stop token.
    """

    tokens: tuple[int, ...]
    accepted: int
    stopped: bool = False


def confirm(  # noqa: PLR0913  # all that decides on tokens
    draft_tokens: Sequence[int],
    sampled: Sequence[int],
    *,
    parents: Parents = CHAIN,
    position: int,
    max_position: int,
    stop_token_ids: Set[int],
    output_len: int = 0,
    min_tokens: int = 0,
) -> Verdict:
    """Return the accepted draft tokens and one target token, cut after a stop token and at max_position.

    `sampled[i]` is the target's token given `sampled[:i]`, a path of draft tokens; `sampled` may end at the
    first token that does not continue the path. `parents`: see `trees.py`.
    A stop token does not cut if it is among the first `min_tokens` output tokens; `output_len` of them were
    confirmed before.
    """
    if parents:
        accepted = len(follow(draft_tokens, parents, sampled))
    else:
        accepted = common_prefix_len(draft_tokens, sampled)
    room = max(0, max_position - position)
    tokens = tuple(sampled[: min(accepted + 1, room)])
    for i, token in enumerate(tokens):
        if token in stop_token_ids and output_len + i >= min_tokens:
            return Verdict(tokens[: i + 1], min(accepted, i + 1), stopped=True)
    return Verdict(tokens, min(accepted, len(tokens)))
