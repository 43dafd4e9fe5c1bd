"""What a session knows of its draft: what was asked, what came, what its cache holds, whether it rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from galley.core.answer.answer import Answer
from galley.core.content import common_prefix_len
from galley.core.hints import MAX_HINT_TOKENS, NOTHING, Hint, HintTail
from galley.core.session.events import Proposed


@dataclass(frozen=True, slots=True)
class PendingProposal:
    """A proposal under way, asked for at `at_ns`: up to `k` tokens from `position` on.

    The prefix, of this hash, may end with guesses.
    """

    request_id: int
    position: int
    prefix_hash: bytes
    k: int
    requested_ns: int


class ProposalObserver(Protocol):
    """Learns how good proposals are, and says what is to be made of that."""

    @property
    def can_recover(self) -> bool:
        """Is what was proposed after a wrong token mostly right again?"""

    def record_token(self, right: bool) -> None:
        """A proposed token was right, or the first that was not."""

    def record_recovery(self, right: bool) -> None:
        """The one after a wrong one was right, or was not."""


class Drafting:
    """One proposal is under way at most. Times in nanoseconds.

    `hint` is what has been proposed, while it may be of use: proposals that went on from one another are
    joined; the first of them came at `hint_since_ns`. `cache_len` is how far the draft's cache holds what is
    confirmed or guessed. `silent`: when last asked it had nothing to say, and may have nothing again;
    `spent`: it had less to say than was asked for, so that there is no more to be had after this hint.
    """

    def __init__(self, cooldown_ns: int, max_cooldown_ns: int, observer: ProposalObserver) -> None:
        self._observer = observer
        self._after_wrong: tuple[int, int] | None = None
        self._wrong_from: int | None = None
        self.pending: PendingProposal | None = None
        self.hint: Hint | None = None
        self.hint_since_ns = 0
        self.was_empty = False
        self.is_exhausted = False
        self.cache_len = 0
        self.misses = 0
        self._first_cooldown = self._cooldown = cooldown_ns
        self._max_cooldown = max_cooldown_ns
        self._off_until = 0

    def is_pending(self, request_id: int) -> bool:
        """Whether this request is the one under way."""
        return self.pending is not None and self.pending.request_id == request_id

    def is_cooling_down(self, now: int) -> bool:
        """Whether it failed or lied a short while ago."""
        return now < self._off_until

    def receive(self, event: Proposed, answer: Answer, alpha: float, now: int) -> int:
        """What was asked has come: keep what is of use; how many tokens that is.

        A draft that answers something else is left alone for a while. Where it does not say how likely its
        tokens are to survive, `alpha` does, for each that all before it have.
        """
        asked, self.pending = self.pending, None
        self.misses = 0
        if asked is None or (event.position, event.prefix_hash) != (asked.position, asked.prefix_hash):
            self._cool_down(now)
            return 0
        self._cooldown = self._first_cooldown
        came = _read_hint(event, asked.k, answer.spec.vocab_size, alpha)
        before = self.hint
        self.hint = joined(before, came)
        if before is None or self.hint.position != before.position:
            self.hint_since_ns = now
        most = asked.k if event.max_tokens is None else min(asked.k, event.max_tokens)
        self.is_exhausted = len(came.draft_tokens) < most
        self.was_empty = not came.draft_tokens
        self.cache_len = max(0, event.cache_len)
        if self._wrong_from is not None:  # it went on from a guess that has turned out wrong
            self.cache_len = min(self.cache_len, self._wrong_from)
            self._wrong_from = None
        self.confirm(answer.tokens)
        return len(came.draft_tokens)

    def confirm(self, tokens: Sequence[int]) -> PendingProposal | None:
        """These are confirmed: a hint that they contradict or reach beyond is of no more use.

        But where drafts recover, what is left of it after a wrong token stays, by position. Returns what is
        asked if it is of no use either: as it goes on from such a guess, or is for confirmed tokens alone.
        """
        self._judge_recovery(tokens)
        if self.pending is not None and self.pending.position + self.pending.k <= len(tokens):
            return self.give_up()
        hint = self.hint
        if hint is None:
            return None
        reached = len(tokens) - hint.position
        agreeing = common_prefix_len(hint.draft_tokens, tokens[hint.position :])
        refused = agreeing < min(reached, len(hint.draft_tokens))
        for right in (*[True] * agreeing, *[False] * refused):
            self._observer.record_token(right)
        if refused:
            return self._refuse(hint, tokens, agreeing)
        if reached > 0:
            self.hint = _rerooted(hint, reached)
        return None

    def _refuse(self, hint: Hint, tokens: Sequence[int], agreeing: int) -> PendingProposal | None:
        """The hint's token `agreeing` was wrong."""
        wrong, reached = hint.position + agreeing, len(tokens) - hint.position
        self.cache_len = min(self.cache_len, wrong)
        self.hint = None
        goes_on = self.pending is not None and self.pending.position > wrong
        left = hint.draft_tokens[reached:]
        if left:
            self._after_wrong = (len(tokens), left[0])
        if not left or not self._observer.can_recover:
            return self.give_up() if goes_on else None
        self.hint = _rerooted(hint, reached)
        if goes_on:
            self._wrong_from = wrong
        return None

    def _judge_recovery(self, tokens: Sequence[int]) -> None:
        """Of the last wrong token: was the next one right?"""
        if self._after_wrong is not None and len(tokens) > self._after_wrong[0]:
            position, guess = self._after_wrong
            self._observer.record_recovery(tokens[position] == guess)
            self._after_wrong = None

    def give_up(self) -> PendingProposal | None:
        """What is asked is not wanted any more; whether the draft's cache came to hold it is not known."""
        asked, self.pending = self.pending, None
        self.misses = 0
        self._wrong_from = None
        return asked

    def fail(self, now: int) -> None:
        """What was asked came to nothing."""
        self.pending = None
        self._wrong_from = None
        self.hint = None
        self.misses = 0
        self.cache_len = 0
        self._cool_down(now)

    def _cool_down(self, now: int) -> None:
        """Leave it alone, each time twice as long as the last."""
        self.hint = None
        self._off_until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._max_cooldown)


def joined(hint: Hint | None, further: Hint) -> Hint:
    """A hint and what was proposed after its last token; another hint takes its place."""
    if hint is None or hint.end != further.position:
        return further
    sure = hint.survival[-1] if hint.survival else 1.0
    chances = hint.survival + tuple(sure * chance for chance in further.survival)
    tokens = hint.draft_tokens + further.draft_tokens
    return Hint(hint.position, hint.prefix_hash, tokens[:MAX_HINT_TOKENS], chances[:MAX_HINT_TOKENS])


def _rerooted(hint: Hint, reached: int) -> Hint | None:
    """What is left of it after its first tokens, from there on; the hash of what is before is not kept."""
    if reached >= len(hint.draft_tokens):
        return None
    rest = hint.tail(reached)
    return Hint(hint.position + reached, b"", rest.draft_tokens, rest.survival)


def _read_hint(event: Proposed, k: int, vocab_size: int, alpha: float) -> Hint:
    """What is of use in a proposal of at most `k` tokens: a draft may say anything."""
    tokens = valid_prefix(event.tokens[:k], vocab_size)
    survival = event.survival[: len(tokens)]
    if len(survival) != len(tokens) or not all(0 <= chance <= 1 for chance in survival):
        survival = tuple(alpha ** (i + 1) for i in range(len(tokens)))
    return Hint(event.position, event.prefix_hash, tokens, survival)


def remaining(hint: Hint, confirmed: Sequence[int]) -> HintTail:
    """What is left of a hint whose prefix agrees, once these tokens (from position 0) are confirmed."""
    reached = len(confirmed) - hint.position
    if not 0 <= reached < len(hint.draft_tokens):
        return NOTHING
    if tuple(confirmed[hint.position :]) != hint.draft_tokens[:reached]:
        return NOTHING
    return hint.tail(reached)


def valid_prefix(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens before the first that is outside the vocabulary."""
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:index]
    return tokens
