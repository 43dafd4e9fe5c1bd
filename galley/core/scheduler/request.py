"""An item of the target's scheduler while it stands: what is confirmed, what may come, what is hinted."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from galley.core.content import PrefixHasher, SessionKey
from galley.core.hints import NOTHING, Hint, HintTail, PendingHint
from galley.core.scheduler.hint_statistics import AcceptanceEstimate, HintTiming
from galley.core.scheduler.messages import Extend, VerifyRequest

# Results that a hint may still be anchored at when it tells how long hints take.
_ANCHORS = 8


class SessionStatistics:
    """What is worth knowing of a session beyond its items: how good its drafts are, and how late."""

    __slots__ = ("acceptance", "hint_timing")

    def __init__(self, overall: SessionStatistics | None = None) -> None:
        """A session begins with what `overall`, those of all sessions, are like."""
        self.acceptance: AcceptanceEstimate = AcceptanceEstimate(overall.acceptance if overall else None)
        self.hint_timing: HintTiming = HintTiming(overall.hint_timing if overall else None)


class ActiveRequest:
    """One item; `tokens` are all that are confirmed, from absolute position 0, of which [0, kv_len) have KV.

    `kv_len` is None until the session's blocks are opened, when `kv_reused` had KV; of that the first result
    tells, and then it is 0. `rest` is what the hint offers at the present
    position, as `look` found it.
    """

    def __init__(self, item_id: int, request: VerifyRequest, memory: SessionStatistics, now: int) -> None:
        self.id = item_id
        self.message = request
        self.statistics = memory
        self.tokens: list[int] = []
        self.kv_len: int | None = None
        self.limit = min(request.limit, request.max_position)
        self.hint_due = request.hint_due
        self.tail = NOTHING
        self.arrived_ns = now
        self.has_started = False
        self.cancelled = False
        self.compute_ns = 0
        self.linger_ns = 0
        self.kv_reused = 0
        self._since_ns = now
        self._unhinted = not request.draft_tokens
        self._hasher = PrefixHasher()
        offered = Hint(request.position, b"", request.draft_tokens, request.survival)
        self._hint: PendingHint | None = (
            PendingHint(offered, memory.acceptance, anchored=True) if request.draft_tokens else None
        )
        self._former: PendingHint | None = None
        self._anchors: deque[tuple[int, int]] = deque([(request.position, now)], _ANCHORS)

    @property
    def key(self) -> SessionKey:
        """Of its session."""
        return self.message.key

    @property
    def age(self) -> tuple[int, int, int]:
        """Orders items: the higher priority first, and of equal ones the oldest session."""
        return (-self.message.priority, self.message.arrival_ns, self.id)

    @property
    def position(self) -> int:
        """Of the first token that is not confirmed yet."""
        return len(self.tokens)

    @property
    def uncomputed(self) -> int:
        """Confirmed tokens without KV: at least the last one, which every verification feeds."""
        return len(self.tokens) - (self.kv_len or 0)

    @property
    def room(self) -> int:
        """Draft tokens that could be verified: none confirms a token at or beyond the limit."""
        room = self.limit - self.position - 1
        return min(room, self.message.max_verified) if self.message.max_verified else room

    @property
    def result_ns(self) -> int:
        """When the last result was given, or the item came."""
        return self._anchors[-1][1]

    def prefix_hash(self) -> bytes:
        """Of all that is confirmed."""
        return self._hasher.digest(self.tokens, len(self.tokens))

    def update_hint(self) -> None:
        """Follow the hint to the present position: `rest` is what it offers there, within the room.

        Where it offers nothing, the one before may still: a draft that is asked afresh after a refused token
        answers late on a slow link, and with less than it had to say before.
        """
        self._hint, offered = self._followed(self._hint)
        self._former, formerly = self._followed(self._former)
        rest = offered if offered.draft_tokens else formerly
        self.tail = HintTail(rest.draft_tokens[: self.room], rest.survival[: self.room], rest.after_mismatch)

    def _followed(self, hint: PendingHint | None) -> tuple[PendingHint | None, HintTail]:
        """What it offers; and the hint itself, as long as it may be of use."""
        if hint is None:
            return None, NOTHING
        rest = hint.follow(self.tokens, self._hasher)
        return (None if hint.is_exhausted else hint), rest

    def survival(self) -> list[float]:
        """Of each draft token that is offered: the chance that it is accepted, with all before it."""
        acceptance = self.statistics.acceptance
        if self.tail.survival:
            chances = acceptance.calibrated(list(accumulate(self.tail.survival, min)))
        else:
            chances = acceptance.survival(len(self.tail.draft_tokens))
        if self.tail.after_mismatch and chances and chances[0] > 0.0:
            # The first says whether it has recovered; given that, the others are as good as ever.
            recovered = self.statistics.acceptance.recovery / chances[0]
            chances = [min(1.0, chance * recovered) for chance in chances]
        return chances

    @property
    def has_usable_hint(self) -> bool:
        """There are draft tokens to verify, which are not worth less than those that may come."""
        return bool(self.tail.draft_tokens) and (
            not self.tail.after_mismatch or self.statistics.acceptance.can_recover
        )

    def extend(self, told: Extend, now: int) -> None:
        """Take what a caller says of an item under way."""
        self.limit = max(self.limit, min(told.limit, self.message.max_position))
        self.hint_due = told.hint_due
        if told.hint is not None:
            if self._hint is not None and self._hint.hint.end > told.hint.end:
                self._former = self._hint
            self._hint = PendingHint(told.hint, self.statistics.acceptance)
            self._learn_delay(told.hint, now)

    def _learn_delay(self, hint: Hint, now: int) -> None:
        """Of the first hint after a result that left none; what is added to one says nothing of delays."""
        asked_ns = next((at for position, at in self._anchors if position == hint.position), None)
        if self._unhinted and asked_ns is not None:
            self.statistics.hint_timing.record_arrival(now - asked_ns, len(hint.draft_tokens))
        self._unhinted = False

    def take_reused(self) -> int:
        """Once."""
        reused, self.kv_reused = self.kv_reused, 0
        return reused

    def confirm(self, tokens: tuple[int, ...], now: int) -> tuple[int, int, int]:
        """Append them; the (queue_ns, compute_ns, linger_ns) of what led to this result."""
        self.tokens.extend(tokens)
        compute_ns, self.compute_ns = self.compute_ns, 0
        linger_ns, self.linger_ns = self.linger_ns, 0
        queue_ns = max(0, now - self._since_ns - compute_ns)
        self._since_ns = now
        self._anchors.append((len(self.tokens), now))
        self.update_hint()
        self._unhinted = not self.tail.draft_tokens or self.tail.after_mismatch
        return queue_ns, compute_ns, min(linger_ns, queue_ns)
