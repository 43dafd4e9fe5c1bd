"""The one true answer: the target's token as a pure function of build, seed, position and all before it."""

from __future__ import annotations

from collections.abc import Sequence

from galley.core.answer.answer import SessionSpec
from tests.fakes.truth import letters, token_after

VOCAB = 48
STOP = VOCAB - 1


def true_token(build: str, seed: int, position: int, history: Sequence[int]) -> int:
    """Return the token at `position`, after `history`."""
    return token_after(history, VOCAB, f"{build} {seed} {position}")


def text_of(spec: SessionSpec, index: int, tokens: Sequence[int]) -> str:
    visible = [
        token
        for i, token in enumerate(tokens, index)
        if token not in spec.stop_token_ids or i + 1 <= spec.min_tokens
    ]
    return letters(visible)


def is_over(spec: SessionSpec, tokens: Sequence[int]) -> bool:
    output = len(tokens) - len(spec.prompt)
    return len(tokens) >= spec.max_position or (
        output > spec.min_tokens and tokens[-1] in spec.stop_token_ids
    )
