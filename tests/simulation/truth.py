"""The one true answer: the target's token as a pure function of build, seed, position and all before it."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from galley.core.answer.answer import SessionSpec
from galley.core.content import token_bytes
from tests.fakes.truth import letters, token_after
from tests.simulation.grammars import VOCAB, allowed_after


def true_token(
    build: str, seed: int, position: int, history: Sequence[int], allowed: Sequence[int] | None = None
) -> int:
    """Return the token at `position`, after `history`; with a grammar, one of those that are `allowed`."""
    salt = f"{build} {seed} {position}"
    if allowed is None:
        return token_after(history, VOCAB, salt)
    return allowed[crc32(token_bytes(history), crc32(salt.encode())) % len(allowed)]


def true_next(spec: SessionSpec, build: str, log: Sequence[int]) -> int:
    """Return the token that follows the log of a session, on a target of this build."""
    allowed = None if spec.grammar is None else allowed_after(spec.grammar, tuple(log[len(spec.prompt) :]))
    return true_token(build, spec.sampling.seed, len(log), log, allowed)


def true_output(spec: SessionSpec, build: str) -> tuple[int, ...]:
    """Return the whole answer of a target of this build."""
    log = list(spec.prompt)
    while not is_over(spec, log):
        log.append(true_next(spec, build, log))
    return tuple(log[len(spec.prompt) :])


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
