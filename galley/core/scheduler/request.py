"""A request of the target's scheduler while it is active: confirmed tokens, limit and hint."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from galley.core.content import PrefixHasher
from galley.core.grammar.follower import GrammarFollower
from galley.core.hints import NOTHING, Hint, HintTail
from galley.core.scheduler.hint_statistics import AcceptanceEstimate, HintTiming, leveled
from galley.core.scheduler.messages import Extend, VerifyRequest
from galley.core.step import GrowingTokens
from galley.core.trees import ROOT, candidates_after, child_of, kept, parent_of, simplified

# Past results kept, so that the delay of a hint anchored at one of them can be measured.
_ANCHORS = 8


class SessionStatistics:
    """Statistics that outlive the requests of a session: how good its drafts are, and how late."""

    __slots__ = ("acceptance", "hint_timing")

    def __init__(self, overall: SessionStatistics | None = None) -> None:
        self.acceptance: AcceptanceEstimate = AcceptanceEstimate(overall.acceptance if overall else None)
        self.hint_timing: HintTiming = HintTiming(overall.hint_timing if overall else None)


class PendingHint:
    __slots__ = (
        "_acceptance",
        "_after_mismatch",
        "_anchored",
        "_followed",
        "_left",
        "_node",
        "hint",
        "is_exhausted",
    )

    def __init__(self, hint: Hint, acceptance: AcceptanceEstimate, *, anchored: bool = False) -> None:
        """Take a hint. `anchored`: its prefix is known to agree, so it need not be hashed."""
        self.hint = hint
        self.is_exhausted = not hint.draft_tokens
        self._acceptance = acceptance
        self._anchored = anchored
        self._followed = 0
        self._node = ROOT
        self._after_mismatch = False
        self._left: tuple[int, HintTail] = (-1, NOTHING)

    def follow(self, tokens: Sequence[int], hasher: PrefixHasher) -> HintTail:
        """Return what is left of the hint after these confirmed tokens, which only grow.

        After a wrong token, that is the main path below its first candidate there. Return NOTHING before its
        anchor, and once it disagrees for good or is used up (`is_exhausted`).
        """
        passed = len(tokens) - self.hint.position
        if self.is_exhausted or passed < 0:
            return NOTHING
        if passed != self._left[0]:
            self._left = (passed, self._left_after(tokens, passed, hasher))
        self.is_exhausted = not self._left[1].draft_tokens
        return self._left[1]

    def _left_after(self, tokens: Sequence[int], passed: int, hasher: PrefixHasher) -> HintTail:
        if not (self._has_root(tokens, hasher) and self._holds(tokens, passed)):
            return NOTHING
        left = self.hint.whole.below(self._node)
        if not self._after_mismatch:
            return left
        left = left.main
        return HintTail(left.draft_tokens, left.survival, after_mismatch=True)

    def _has_root(self, tokens: Sequence[int], hasher: PrefixHasher) -> bool:
        if not self._anchored:
            self._anchored = hasher.digest(tokens, self.hint.position) == self.hint.prefix_hash
        return self._anchored

    def _holds(self, tokens: Sequence[int], passed: int) -> bool:
        """Return True if the hint has agreed with the tokens since its anchor, except for single ones."""
        if self.hint.parents:
            return self._holds_tree(tokens, passed)
        draft_tokens, anchor = self.hint.draft_tokens, self.hint.position
        while self._followed < min(passed, len(draft_tokens)):
            agrees = tokens[anchor + self._followed] == draft_tokens[self._followed]
            self._followed += 1
            if self._after_mismatch:
                self._acceptance.record_recovery(right=agrees)
            else:
                self._acceptance.record_token(right=agrees, predicted=self.hint.chance(self._followed - 1))
            if self._after_mismatch and not agrees:
                return False
            self._after_mismatch = not agrees
        self._node = passed - 1
        return passed < len(draft_tokens)

    def _holds_tree(self, tokens: Sequence[int], passed: int) -> bool:
        hint, drafts = self.hint, self.hint.draft_tokens
        while self._followed < passed:
            candidates = candidates_after(hint.parents, len(drafts), self._node)
            if not candidates:
                return False
            right = child_of(drafts, hint.parents, self._node, tokens[hint.position + self._followed])
            self._followed += 1
            self._node = candidates[0] if right is None else right
            if self._after_mismatch:
                self._acceptance.record_recovery(right=right == candidates[0])
                if right is None:
                    return False
            else:
                self._record(candidates, right)
            self._after_mismatch = right is None
        return True

    def _record(self, candidates: Sequence[int], right: int | None) -> None:
        """Record which of the candidates for a position was right, if any."""
        first, sides = candidates[0], candidates[1:]
        self._acceptance.record_token(right=right == first, predicted=self.hint.chance(first))
        if sides:
            predicted = sum(self.hint.chance(node) or 0.0 for node in sides)
            self._acceptance.record_sides(right=right in sides, predicted=predicted)


def _after_chain(tokens: tuple[int, ...], tree: HintTail) -> HintTail:
    """Return the tree below the last of these tokens, which are certain."""
    count = len(tokens)
    below = [count + parent_of(tree.parents, node) for node in range(len(tree.draft_tokens))]
    return HintTail(
        tokens + tree.draft_tokens,
        (1.0,) * count + tree.survival,
        parents=simplified([*range(ROOT, count + ROOT), *below]),
    )


class ActiveRequest:
    """An active request. `tokens` are all confirmed tokens from absolute position 0; [0, kv_len) have KV.

    `block_hashes` are those of the first full blocks, as far as they were known when it was admitted.
    `kv_len` is None until KV blocks are allocated. The first result reports `kv_reused`, and resets it to 0.
    `is_new`: its session had no blocks before. `turn` is when its prompt is read (`PromptTurns`), if it has
    one.
    `tail` is what the hint offers as of the last `update_hint`; its first `certain` tokens follow in any
    case. `grammar` follows `tokens`, if there is one.
    """

    def __init__(
        self,
        request_id: int,
        message: VerifyRequest,
        memory: SessionStatistics,
        now: int,
        max_draft_tokens: int | None = None,
        *,
        takes_trees: bool = False,
    ) -> None:
        self.id = request_id
        self.key = message.key
        self.message = message
        self.statistics = memory
        self.tokens = GrowingTokens()
        self.block_hashes: Sequence[bytes] = ()
        self.kv_len: int | None = None
        self.turn: int | None = None
        self.limit = min(message.limit, message.max_position)
        self.hint_due = message.hint_due
        self.tail = NOTHING
        self.certain = 0
        self.arrived_ns = now
        self.has_started = False
        self.cancelled = False
        self.compute_ns = 0
        self.linger_ns = 0
        self.kv_reused = 0
        self.is_new = False
        self._since_ns = now
        self._awaits_hint = not message.draft_tokens
        self.grammar: GrammarFollower | None = None
        bounds = (message.max_verified or None, max_draft_tokens)
        self._bounds = [most for most in bounds if most is not None]
        self._hasher = PrefixHasher()
        self._takes_trees = takes_trees
        offered = Hint(message.position, b"", message.draft_tokens, message.survival, parents=message.parents)
        self._hint: PendingHint | None = (
            self._pending(offered, anchored=True) if message.draft_tokens else None
        )
        self._previous: PendingHint | None = None
        self._anchors: deque[tuple[int, int]] = deque([(message.position, now)], _ANCHORS)

    @property
    def age(self) -> tuple[int, int, int]:
        """Return the sort key of requests: the higher priority first, then the older session."""
        return (-self.message.priority, self.message.arrival_ns, self.id)

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Return the number of confirmed tokens without KV: at least the last one, which every step feeds."""
        return len(self.tokens) - (self.kv_len or 0)

    @property
    def room(self) -> int:
        """Return the most draft tokens that a step may verify.

        The last position below `limit` is for the target's own token. `max_verified` and the engine's bound,
        if set, bound it too.
        """
        return min([self.limit - self.position - 1, *self._bounds])

    @property
    def result_ns(self) -> int:
        """Time of the last result, or of the request's arrival."""
        return self._anchors[-1][1]

    def prefix_hash(self) -> bytes:
        return self._hasher.digest(self.tokens, len(self.tokens))

    def update_hint(self) -> None:
        """Advance the hint to the present position, and set `tail` to what it offers within room and grammar.

        If it offers nothing, use the previous hint, which ended later. On a slow link, the hint drafted after
        a rejected token can arrive too late, while the previous one may match again.
        """
        self._hint, offered = self._followed(self._hint)
        self._previous, previous = self._followed(self._previous)
        rest = offered if offered.draft_tokens else previous
        self.tail, self.certain = rest.first(self.room), 0
        if self.grammar is not None:
            self._follow_grammar(self.grammar)

    def _follow_grammar(self, grammar: GrammarFollower) -> None:
        """Cut the tail to what the grammar allows, and begin it with what is certain.

        The gateway's hint of these tokens may be on its way.
        """
        certain = grammar.certain(self.room) if self.message.max_verified else ()
        tail = self.tail
        path = tail.follow(certain) if certain else []
        if len(path) < len(certain):
            tail = HintTail(certain, (1.0,) * len(certain))
        elif certain and tail.parents:
            tail = _after_chain(certain, tail.below(path[-1]))
        nodes = grammar.allowed_nodes(tail.draft_tokens, tail.parents)
        if len(nodes) < len(tail.draft_tokens):
            tail = tail.only(nodes, kept(tail.parents, nodes))
        self.certain = min(len(certain), len(nodes))
        self.tail = HintTail(
            tail.draft_tokens,
            tail.survival,
            tail.after_mismatch and not self.certain,
            parents=tail.parents,
        )

    def _pending(self, hint: Hint, *, anchored: bool = False) -> PendingHint:
        """Return the hint as this engine can use it. A tree without survival says not what to verify."""
        if hint.parents and not (self._takes_trees and hint.survival):
            left = hint.whole.main
            hint = Hint(hint.position, hint.prefix_hash, left.draft_tokens, left.survival)
        return PendingHint(hint, self.statistics.acceptance, anchored=anchored)

    def _followed(self, hint: PendingHint | None) -> tuple[PendingHint | None, HintTail]:
        if hint is None:
            return None, NOTHING
        rest = hint.follow(self.tokens, self._hasher)
        return (None if hint.is_exhausted else hint), rest

    def survival(self) -> list[float]:
        """Return for each offered draft token the chance that it and all before it are accepted.

        They fall, so that the first tokens of all sessions are taken where the chances are best.
        """
        acceptance = self.statistics.acceptance
        rest = self.tail.after(self.certain)
        if rest.parents:
            chances = leveled(acceptance.calibrated_tree(rest.parents, rest.survival))
        elif rest.survival:
            chances = acceptance.calibrated(list(accumulate(rest.survival, min)))
        else:
            chances = acceptance.survival(len(rest.draft_tokens))
        if rest.after_mismatch and chances and chances[0] > 0.0:
            # The first token shows whether the hint has recovered; if so, the others are as good as before.
            recovered = self.statistics.acceptance.recovery / chances[0]
            chances = [min(1.0, chance * recovered) for chance in chances]
        return [1.0] * self.certain + chances

    @property
    def has_usable_hint(self) -> bool:
        """Return True if there are draft tokens to verify that are worth as much as those that may arrive."""
        return bool(self.tail.draft_tokens) and (
            not self.tail.after_mismatch or self.statistics.acceptance.can_recover
        )

    def extend(self, extension: Extend, now: int) -> None:
        self.limit = max(self.limit, min(extension.limit, self.message.max_position))
        self.hint_due = extension.hint_due
        if extension.hint is not None:
            if self._hint is not None and self._hint.hint.end > extension.hint.end:
                self._previous = self._hint
            self._hint = self._pending(extension.hint)
            self._learn_delay(extension.hint, now)

    def _learn_delay(self, hint: Hint, now: int) -> None:
        """Record the delay of the first hint after a result that left none; later ones measure nothing."""
        result_ns = next((at for position, at in self._anchors if position == hint.position), None)
        if self._awaits_hint and result_ns is not None:
            self.statistics.hint_timing.record_arrival(now - result_ns, hint.end - hint.position)
        self._awaits_hint = False

    def take_reused(self) -> int:
        reused, self.kv_reused = self.kv_reused, 0
        return reused

    def confirm(self, tokens: tuple[int, ...], now: int) -> tuple[int, int, int]:
        """Append confirmed tokens. Return (queue_ns, compute_ns, linger_ns) since the last result."""
        self.tokens.extend(tokens)
        compute_ns, self.compute_ns = self.compute_ns, 0
        linger_ns, self.linger_ns = self.linger_ns, 0
        queue_ns = max(0, now - self._since_ns - compute_ns)
        self._since_ns = now
        self._anchors.append((len(self.tokens), now))
        self.update_hint()
        self._awaits_hint = not self.tail.draft_tokens or self.tail.after_mismatch
        return queue_ns, compute_ns, min(linger_ns, queue_ns)
