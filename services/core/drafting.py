"""What a session knows of its draft: what was asked, what came, what its cache holds, whether it rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.content import agreement
from services.core.hints import NOTHING, Hint, Rest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.core.answer import Answer
    from services.core.events import Proposed


@dataclass(frozen=True, slots=True)
class Asked:
    """A proposal under way: up to `k` tokens from `position` on."""

    request_id: int
    position: int
    k: int


class Drafting:
    """One proposal is under way at most. Times in nanoseconds.

    `hint` is the last proposal, while it may be of use; `cache_len` is how far the draft's cache holds what
    is confirmed or guessed. `silent`: when last asked it had nothing to say, and may have nothing again.
    """

    def __init__(self, cooldown_ns: int, max_cooldown_ns: int) -> None:
        self.asked: Asked | None = None
        self.hint: Hint | None = None
        self.silent = False
        self.cache_len = 0
        self.misses = 0
        self._first_cooldown = self._cooldown = cooldown_ns
        self._max_cooldown = max_cooldown_ns
        self._off_until = 0

    def has_asked(self, request_id: int) -> bool:
        """Whether this request is the one under way."""
        return self.asked is not None and self.asked.request_id == request_id

    def resting(self, now: int) -> bool:
        """Whether it failed or lied a short while ago."""
        return now < self._off_until

    def take(self, event: Proposed, answer: Answer, now: int) -> None:
        """What was asked has come: keep what is of use; leave a draft that answers something else alone."""
        asked, self.asked = self.asked, None
        self.misses = 0
        self.hint = None
        if asked is None or not _is_anchored(event, asked.position, answer):
            self._rest(now)
            return
        self._cooldown = self._first_cooldown
        self.hint = _read_hint(event, asked.k, answer.spec.vocab_size)
        self.silent = not self.hint.draft_tokens
        self.cache_len = max(0, event.cache_len)
        self.confirm(answer.tokens)

    def confirm(self, tokens: Sequence[int]) -> None:
        """These are confirmed: a hint that they contradict or reach beyond is of no more use."""
        if self.hint is None:
            return
        reached = len(tokens) - self.hint.position
        agreeing = agreement(self.hint.draft_tokens, tokens[self.hint.position :])
        if agreeing < reached:
            self.cache_len = min(self.cache_len, self.hint.position + agreeing)
            self.hint = None

    def fail(self, now: int) -> None:
        """What was asked came to nothing."""
        self.asked = None
        self.hint = None
        self.misses = 0
        self.cache_len = 0
        self._rest(now)

    def _rest(self, now: int) -> None:
        """Leave it alone, each time twice as long as the last."""
        self._off_until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._max_cooldown)


def _is_anchored(event: Proposed, position: int, answer: Answer) -> bool:
    return event.position == position and event.prefix_hash == answer.prefix_hash(position)


def _read_hint(event: Proposed, k: int, vocab_size: int) -> Hint:
    """What is of use in a proposal of at most `k` tokens: a draft may say anything."""
    tokens = valid_prefix(event.tokens[:k], vocab_size)
    survival = event.survival[: len(tokens)]
    if len(survival) != len(tokens) or not all(0 <= chance <= 1 for chance in survival):
        survival = ()
    return Hint(event.position, event.prefix_hash, tokens, survival)


def rest_of(hint: Hint, confirmed: Sequence[int]) -> Rest:
    """What is left of a hint whose prefix agrees, once these tokens (from position 0) are confirmed."""
    reached = len(confirmed) - hint.position
    if not 0 <= reached < len(hint.draft_tokens):
        return NOTHING
    if tuple(confirmed[hint.position :]) != hint.draft_tokens[:reached]:
        return NOTHING
    return hint.after(reached)


def valid_prefix(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens before the first that is outside the vocabulary."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:index]
    return tokens
