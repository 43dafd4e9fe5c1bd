"""The session's side of its draft: the pending proposal, the current hint, the draft's cache, cooldowns.

1. At most one proposal is pending. It may continue from the current hint instead of from confirmed tokens.
2. A proposal that continues the current hint is joined to it, at the end of its main path
   (`galley/core/trees.py`); any other replaces it.
3. A hint ends where a confirmed token differs: of a tree, the part below the confirmed tokens stays. Where
   drafts recover after a wrong token, the rest of the main path stays.
4. The session's own sources (`sources.py`) extend the hint at once. A proposal that was pending meanwhile
   adds what goes beyond the hint, if it agrees with it, and nothing otherwise.
5. After a failure or a response that does not fit its request, nothing is requested until a cooldown is
   over. The cooldown doubles each time, up to a bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from galley.core.answer.answer import Answer
from galley.core.content import common_prefix_len
from galley.core.hints import MAX_HINT_TOKENS, NOTHING, Hint, HintTail
from galley.core.names import NO_STRATEGY
from galley.core.session.events import CacheMissed, Propose, Proposed, Slice
from galley.core.session.sources import LocalProposal
from galley.core.session.speculation import Speculation
from galley.core.trees import (
    ROOT,
    best_first,
    candidates_after,
    main_path,
    parent_of,
    ranks,
    simplified,
    valid_count,
)

MAX_MISSES = 3
"""Most cache misses in a row that a replica may return for one request."""


@dataclass(frozen=True, slots=True)
class PendingProposal:
    """A request for up to `k` tokens after the prefix of `prefix_hash`, which may end with draft tokens.

    At most `width` of them are for one position.
    """

    request_id: int
    position: int
    prefix_hash: bytes
    k: int
    requested_ns: int
    width: int = 1


class Received(NamedTuple):
    """The number of `valid` tokens of a proposal, and of those that were `added` to the hint.

    `is_late`: all tokens of its main path were confirmed before it came.
    """

    valid: int
    added: int
    is_late: bool


class Drafting:
    """The drafting state of one session. Times in nanoseconds.

    `hint` holds the proposed tokens while they are of use; the first of them arrived at `hint_since_ns`. The
    draft has `cache_len` confirmed or proposed tokens in its cache. `was_empty`: the last proposal had no
    token. `is_exhausted`: it had fewer than requested, so no more follow this hint.
    """

    def __init__(self, cooldown_ns: int, max_cooldown_ns: int, speculation: Speculation) -> None:
        self.pending: PendingProposal | None = None
        self.hint: Hint | None = None
        self.hint_since_ns = 0
        self.was_empty = False
        self.is_exhausted = False
        self.cache_len = 0
        self.k = 0
        self.strategy = NO_STRATEGY
        self._speculation = speculation
        self._misses = 0
        # After a wrong token: the position of the next one, and the hint's token there.
        self._recovery: tuple[int, int] | None = None
        # The pending proposal continues from a token that was wrong, at this position.
        self._wrong_at: int | None = None
        self._first_cooldown = self._cooldown = cooldown_ns
        self._max_cooldown = max_cooldown_ns
        self._off_until = 0

    def is_pending(self, request_id: int) -> bool:
        return self.pending is not None and self.pending.request_id == request_id

    @property
    def is_in_use(self) -> bool:
        """Return True if a draft works for the session, or caches it."""
        return self.pending is not None or self.cache_len > 0

    def is_cooling_down(self, now: int) -> bool:
        return now < self._off_until

    def tail(self, tokens: Sequence[int]) -> HintTail:
        return NOTHING if self.hint is None else remaining(self.hint, tokens)

    def request(
        self, request_id: int, answer: Answer, tail: HintTail, k: int, now: int, width: int = 1
    ) -> Propose:
        """Request `k` tokens that follow the answer and the main path of the `tail` of the hint."""
        ahead = tail.main.draft_tokens
        position = len(answer.tokens) + len(ahead)
        part = Slice.after(answer, self.cache_len)
        part = Slice(part.start, part.tokens + ahead, part.prefix_hash)
        self.pending = PendingProposal(request_id, position, answer.extended_hash(ahead), k, now, width)
        self.k = k
        return Propose(request_id, part, k, answer.spec.strategy, len(ahead), width)

    def extend(self, proposal: LocalProposal, answer: Answer, now: int) -> None:
        """Add a proposal of the session itself, which follows the answer and what is left of the hint."""
        if not self.tail(answer.tokens).draft_tokens:
            self.hint, self.hint_since_ns = None, now
        position = len(answer.tokens) if self.hint is None else self.hint.end
        sources = (proposal.source,) * len(proposal.tokens)
        self.hint = joined(self.hint, Hint(position, b"", proposal.tokens, proposal.survival, sources))
        self.strategy = proposal.source
        # What the draft had no more tokens for ends now elsewhere.
        self.is_exhausted = False

    def receive(self, event: Proposed, answer: Answer, alpha: float, now: int) -> Received:
        """Take the pending proposal.

        A response that does not fit the request starts a cooldown. `alpha` replaces an invalid `survival`.
        """
        pending, self.pending = self.pending, None
        self._misses = 0
        self.strategy = event.strategy or answer.spec.strategy or NO_STRATEGY
        if pending is None or (event.position, event.prefix_hash) != (pending.position, pending.prefix_hash):
            self._cool_down(now)
            return Received(0, 0, is_late=False)
        self._cooldown = self._first_cooldown
        received = _valid_hint(event, pending, answer.spec.vocab_size, alpha, self.strategy)
        most = pending.k if event.max_tokens is None else min(pending.k, event.max_tokens)
        self.is_exhausted = len(received.draft_tokens) < most
        self.was_empty = not received.draft_tokens
        if pending.width > 1 and not received.parents and received.draft_tokens:
            self._speculation.record_chain(len(received.draft_tokens))
        self.cache_len = max(0, event.cache_len)
        if self._wrong_at is not None:
            self.cache_len = min(self.cache_len, self._wrong_at)
            self._wrong_at = None
        further = self._beyond_hint(received, answer.tokens)
        before = self.hint
        self.hint = joined(before, further)
        if before is None or self.hint.position != before.position:
            self.hint_since_ns = now
        self.confirm(answer.tokens, now)
        is_late = received.end <= len(answer.tokens)
        return Received(len(received.draft_tokens), len(further.draft_tokens), is_late)

    def _beyond_hint(self, received: Hint, tokens: Sequence[int]) -> Hint:
        """Return the part of a proposal that follows the hint; none of it if they differ.

        They overlap if the session has extended its hint itself while the proposal was pending.
        """
        hint = self.hint
        if hint is None or received.position >= hint.end:
            return received
        known = [*tokens[received.position : hint.position], *hint.whole.main.draft_tokens]
        known = known[max(0, received.position - hint.position) :]
        path = received.whole.follow(known)
        confirmed = max(0, len(tokens) - received.position)
        self._judge(received, confirmed, path[:confirmed])
        self.is_exhausted = False
        cached = received.whole.main.draft_tokens
        agreeing = common_prefix_len(cached, known)
        if agreeing < min(len(known), len(cached)):
            self.cache_len = min(self.cache_len, received.position + agreeing)
        rest = received.whole.below(path[-1]) if path and len(path) == len(known) else NOTHING
        return _hint_at(hint.end, rest)

    def confirm(self, tokens: Sequence[int], now: int) -> PendingProposal | None:
        """Advance the hint past the confirmed `tokens`; return the pending proposal if it is useless now.

        A proposal is useless if it can propose only tokens that are confirmed already, or if it continues
        from a rejected token and the session's drafts do not recover.
        """
        if self._recovery is not None and len(tokens) > self._recovery[0]:
            position, proposed = self._recovery
            self._speculation.record_recovery(tokens[position] == proposed)
            self._recovery = None
        if self.pending is not None and self.pending.position + self.pending.k <= len(tokens):
            self._speculation.record_late()
            return self.give_up(now)
        hint = self.hint
        if hint is None:
            return None
        passed = len(tokens) - hint.position
        if hint.parents:
            return self._follow(hint, tokens, now) if passed > 0 else None
        agreeing = common_prefix_len(hint.draft_tokens, tokens[hint.position :])
        self._judge(hint, passed, range(agreeing))
        if agreeing < min(passed, len(hint.draft_tokens)):
            return self._reject(hint, tokens, agreeing, now)
        if passed > 0:
            self.hint = _advanced(hint, passed)
        return None

    def _judge(self, hint: Hint, passed: int, path: Sequence[int]) -> None:
        """Record the draft's tokens that `passed` confirmed tokens have judged; `path` are the right ones."""
        if not hint.parents:
            for index in range(min(len(path) + 1, passed, len(hint.draft_tokens))):
                if not hint.is_local(index):
                    self._speculation.record_token(index < len(path))
            return
        for before, right in zip((ROOT, *path), (*path, None)[:passed], strict=False):
            candidates = candidates_after(hint.parents, len(hint.draft_tokens), before)
            if candidates and not hint.is_local(candidates[0]):
                rank = None if right is None else candidates.index(right)
                self._speculation.record_candidates(len(candidates), rank)

    def _follow(self, hint: Hint, tokens: Sequence[int], now: int) -> PendingProposal | None:
        """Keep the part of a tree below the confirmed tokens; return what `confirm` does."""
        passed = len(tokens) - hint.position
        path = hint.whole.follow(tokens[hint.position :])
        self._judge(hint, passed, path)
        main = main_path(hint.parents, len(hint.draft_tokens))
        on_main = common_prefix_len(path, main)
        rest = hint.whole.below(path[-1]) if len(path) == passed else NOTHING
        if not rest.draft_tokens:
            if on_main == len(main):
                self.hint = None
                return None
            return self._reject(_hint_at(hint.position, hint.whole.main), tokens, on_main, now)
        self.hint = _hint_at(len(tokens), rest)
        if on_main == passed:
            return None
        # The draft goes on from the main path, and has that in its cache.
        left_at = hint.position + on_main
        self.cache_len = min(self.cache_len, left_at)
        self.is_exhausted = False
        continues = self.pending is not None and self.pending.position > left_at
        return self.give_up(now) if continues else None

    def _reject(self, hint: Hint, tokens: Sequence[int], agreeing: int, now: int) -> PendingProposal | None:
        """Handle a rejected token, at index `agreeing` of the hint; return what `confirm` does."""
        wrong, passed = hint.position + agreeing, len(tokens) - hint.position
        self.cache_len = min(self.cache_len, wrong)
        self.hint = None
        continues = self.pending is not None and self.pending.position > wrong
        # The session's own sources look for another place themselves.
        left = () if hint.is_local(agreeing) else hint.draft_tokens[passed:]
        if left and not hint.is_local(passed):
            self._recovery = (len(tokens), left[0])
        if not left or not self._speculation.can_recover:
            return self.give_up(now) if continues else None
        self.hint = _advanced(hint, passed)
        if continues:
            self._wrong_at = wrong
        return None

    def give_up(self, now: int) -> PendingProposal | None:
        """Stop waiting for the pending proposal, and return it."""
        pending, self.pending = self.pending, None
        self._misses = 0
        self._wrong_at = None
        if pending is not None:
            self._speculation.record_given_up(now - pending.requested_ns)
        return pending

    def miss(self, event: CacheMissed, answer: Answer) -> PendingProposal | None:
        """Take a cache miss; return the request to repeat, or None if there were too many in a row."""
        self._misses += 1
        if self._misses > MAX_MISSES:
            return None
        self.cache_len = usable_cache_len(event, answer)
        pending, self.pending = self.pending, None
        return pending

    def fail(self, now: int) -> None:
        """Take the failure of the pending request: drop the hint and cool down."""
        self.give_up(now)
        self.cache_len = 0
        self._cool_down(now)

    def _cool_down(self, now: int) -> None:
        self.hint = None if self.hint is None else _local_part(self.hint)
        self._off_until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._max_cooldown)


def usable_cache_len(event: CacheMissed, answer: Answer) -> int:
    """Return how many tokens of a replica's cache are the answer's own, by content."""
    agrees = 0 <= event.have <= len(answer.tokens) and answer.prefix_hash(event.have) == event.prefix_hash
    return event.have if agrees else 0


def joined(hint: Hint | None, further: Hint) -> Hint:
    """Return `hint` continued by `further`, or `further` alone if it does not start at the hint's end."""
    if hint is None or not hint.draft_tokens or hint.end != further.position:
        return further
    if hint.parents or further.parents:
        return _joined_trees(hint, further)
    reached = hint.survival[-1] if hint.survival else 1.0
    survival = hint.survival + tuple(reached * chance for chance in further.survival)
    tokens = hint.draft_tokens + further.draft_tokens
    sources = hint.sources + further.sources
    return Hint(
        hint.position,
        hint.prefix_hash,
        tokens[:MAX_HINT_TOKENS],
        survival[:MAX_HINT_TOKENS],
        sources[:MAX_HINT_TOKENS],
    )


def _joined_trees(hint: Hint, further: Hint) -> Hint:
    """Return `hint` with `further` below the end of its main path, in best-first order."""
    count = len(hint.draft_tokens)
    leaf = main_path(hint.parents, count)[-1]
    below = [parent_of(further.parents, node) for node in range(len(further.draft_tokens))]
    parents = [parent_of(hint.parents, node) for node in range(count)]
    parents += [leaf if parent == ROOT else count + parent for parent in below]
    reached = hint.survival[leaf]
    survival = hint.survival + tuple([reached * chance for chance in further.survival])
    order, placed, falling = best_first(parents, survival)
    order = order[:MAX_HINT_TOKENS]
    tokens, sources = hint.draft_tokens + further.draft_tokens, hint.sources + further.sources
    return Hint(
        hint.position,
        hint.prefix_hash,
        tuple([tokens[node] for node in order]),
        tuple(falling[:MAX_HINT_TOKENS]),
        tuple([sources[node] for node in order]),
        simplified(placed[:MAX_HINT_TOKENS]),
    )


def added_sources(before: Hint | None, tail: HintTail, added: int) -> Sequence[str]:
    """Return what proposed the `added` nodes that `tail` has and the hint `before` did not have."""
    if not added:
        return ()
    if tail.parents and before is not None:
        return list((Counter(tail.sources) - Counter(before.sources)).elements()) or tail.sources
    return tail.sources[-added:]


def _local_part(hint: Hint) -> Hint | None:
    """Return the first tokens of the hint, as far as the session itself proposed them."""
    hint = _hint_at(hint.position, hint.whole.main) if hint.parents else hint
    count = next((i for i in range(len(hint.draft_tokens)) if not hint.is_local(i)), len(hint.draft_tokens))
    if not count:
        return None
    return Hint(hint.position, b"", hint.draft_tokens[:count], hint.survival[:count], hint.sources[:count])


def _advanced(hint: Hint, passed: int) -> Hint | None:
    """Return the hint without its first `passed` tokens, and without a hash of its new prefix."""
    if passed >= len(hint.draft_tokens):
        return None
    return _hint_at(hint.position + passed, hint.tail(passed))


def _hint_at(position: int, tail: HintTail) -> Hint:
    return Hint(position, b"", tail.draft_tokens, tail.survival, tail.sources, tail.parents)


def _valid_hint(
    event: Proposed, pending: PendingProposal, vocab_size: int, alpha: float, strategy: str
) -> Hint:
    """Return the valid part of a proposal. The draft is not trusted.

    Of a tree without valid survival, that is its main path.
    """
    tokens = valid_prefix(event.tokens[: pending.k], vocab_size)
    if event.parents:
        tokens = tokens[: _valid_nodes(event, tokens, pending.width)]
    parents = event.parents[: len(tokens)]
    survival = event.survival[: len(tokens)]
    sources = event.sources[: len(tokens)]
    if len(sources) != len(tokens):
        sources = (strategy,) * len(tokens)
    if len(survival) != len(tokens) or not all(0 <= chance <= 1 for chance in survival):
        chain = HintTail(tokens, (), sources=sources, parents=parents).main
        tokens, sources, parents = chain.draft_tokens, chain.sources, chain.parents
        survival = tuple(alpha ** (i + 1) for i in range(len(tokens)))
    if parents:
        order, parents, falling = best_first(parents, survival)
        tokens, sources = tuple(tokens[i] for i in order), tuple(sources[i] for i in order)
        survival = tuple(falling)
    return Hint(event.position, event.prefix_hash, tokens, survival, sources, parents)


def _valid_nodes(event: Proposed, tokens: tuple[int, ...], width: int) -> int:
    """Return how many of the first `tokens` of a proposal are a tree of at most this width."""
    if len(event.parents) != len(event.tokens):
        return 0
    parents = event.parents[: len(tokens)]
    count = valid_count(tokens, parents)
    return next((node for node, rank in enumerate(ranks(parents, count)) if rank >= width), count)


def remaining(hint: Hint, confirmed: Sequence[int]) -> HintTail:
    """Return what is left of a hint after `confirmed` tokens (from position 0); its prefix must agree."""
    passed = len(confirmed) - hint.position
    if not 0 <= passed < len(hint.draft_tokens):
        return NOTHING
    if hint.parents:
        path = hint.whole.follow(confirmed[hint.position :])
        return hint.whole.below(path[-1] if path else ROOT) if len(path) == passed else NOTHING
    if tuple(confirmed[hint.position :]) != hint.draft_tokens[:passed]:
        return NOTHING
    return hint.tail(passed)


def valid_prefix(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:index]
    return tokens
