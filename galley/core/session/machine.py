"""The session machine: one answer from its prompt to its end.

The rules it keeps (they are the design's rules 2 and 4):

- Without credit, a round is: ask the draft for up to k tokens, ask the target to check them, absorb what it
  confirmed. The next round starts as soon as the last verdict is in; it does not wait for the log.
- With credit, one Verify stands at the target, which goes on unasked; each of its verdicts is a round. What
  the draft proposes meanwhile is sent after it as a hint, and so is more credit when half of it is used up.
- What was confirmed is committed to the log, one commit at a time, and only what the log holds is emitted.
  At most `window` tokens may be confirmed and not yet logged; at most `buffer` may be confirmed and not yet
  taken by the client. The target is never allowed to go beyond either.
- The draft works ahead: while the target checks what was proposed, it goes on from its own guesses, so that
  the next round finds draft tokens ready when they come true. What goes on from a guess that was refused is
  given up. How many tokens are asked for, `galley/core/session/speculation.py` decides: down to none.
- The draft is never needed: if it fails, lies or is late, the round goes on with what is valid of its
  proposal, at worst with nothing, and the draft is left alone for a while.
- A target that fails is asked again, until `target_timeout_ns` have passed without a verdict (one that hangs
  has used them up when the shell gives up on it). Where another replica can be asked, that is done at once,
  and its time is counted anew.
- Caches are addressed by content: a miss is answered by sending more. A target that gives up a session in
  mid-item to make room for others says so by a miss.

The machine does no I/O and has no clock: `step(event, now_ns)` returns the effects to carry out, in order.
A Commit comes before the Emit of the same tokens, always.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from galley.core.answer.answer import Answer, Ending, Reason, SessionSpec
from galley.core.errors import Broken, GalleyError, LogLost, TargetUnavailable, Unavailable
from galley.core.hints import NOTHING, Hint, HintTail
from galley.core.names import NO_STRATEGY
from galley.core.records import TokenRecord
from galley.core.session import events as ev
from galley.core.session.delivery import Delivery
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.drafting import Drafting, PendingProposal, remaining
from galley.core.session.open_verify import OpenVerify
from galley.core.session.round import Round
from galley.core.session.speculation import Speculation
from galley.core.session.stats import SpeculationStats
from galley.core.store import LogBehind, SessionEnded

_MS = 1_000_000
_MAX_MISSES = 3


class Phase(enum.Enum):
    """Where the machine stands between events."""

    READY = "between rounds: starting the next one, or waiting for the log or the client"
    DRAFTING = "without credit: a proposal is awaited"
    VERIFYING = "a verdict is awaited"
    BACKING_OFF = "the target failed and will be asked again"
    SEALING = "the answer has ended; its tail is being logged"
    FINISHING = "all is logged; the end is being stored"
    ENDED = "over"


_WORKING = (Phase.READY, Phase.DRAFTING, Phase.VERIFYING, Phase.BACKING_OFF)
"""With credit, the draft may be at work in each of them but DRAFTING."""
_LIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in nanoseconds.

    `credit` is how many tokens the target may confirm unasked, at most `window`; with 0 it is asked for each
    round. An item takes at most `item_drafts` draft tokens; more follow as a hint.
    """

    window: int = 64
    buffer: int = 256
    credit: int = 32
    item_drafts: int = 16
    target_timeout_ns: int = 10_000 * _MS
    retry_ns: int = 50 * _MS
    max_retry_ns: int = 1_000 * _MS
    draft_cooldown_ns: int = 250 * _MS
    max_draft_cooldown_ns: int = 2_000 * _MS


class Session:
    """Drive it with `start` once, then `step` for each event."""

    def __init__(
        self,
        answer: Answer,
        limits: SessionLimits | None = None,
        *,
        stream_from: int = 0,
        seen_hash: bytes = b"",
        finished: Ending | None = None,
        shared: SharedStatistics | None = None,
    ) -> None:
        """`answer` holds what the log holds already; `finished` is the stored end of a session that has one.

        `book` is what sessions share of what they learn of drafts and load.

        The client has output tokens [0, stream_from), whose hash is `seen_hash` (empty: not checked).
        """
        self.answer = answer
        self.stats = SpeculationStats()
        self.phase = Phase.READY
        self._limits = limits or SessionLimits()
        self._delivery = Delivery(answer, stream_from, seen_hash)
        self._finished = finished
        self._asked_to_finish = False
        self._draining = False
        self._request_id = 0
        self._credit = min(self._limits.credit, self._limits.window)
        self._speculation = Speculation(answer.spec, shared or SharedStatistics())
        self._drafting = Drafting(
            self._limits.draft_cooldown_ns, self._limits.max_draft_cooldown_ns, self._speculation
        )
        self._hint_due = False
        self._k = 0
        self._strategy = NO_STRATEGY
        self._standing: OpenVerify | None = None
        self._target_misses = 0
        self._target_cache_len = 0
        self._retry = self._limits.retry_ns
        self._trouble_since: int | None = None
        self._round = Round(0, with_credit=self._credit > 0)
        self._effects: list[ev.Effect] = []

    @property
    def spec(self) -> SessionSpec:
        """The request."""
        return self.answer.spec

    @property
    def logged_output(self) -> int:
        """How many output tokens the log holds."""
        return self._delivery.logged_output

    def start(self, now: int) -> list[ev.Effect]:
        """Emit what the log holds beyond the client's index, then go on."""
        self._emit()
        self._advance(now)
        return self._take_effects()

    def step(self, event: ev.Event, now: int) -> list[ev.Effect]:
        """Take one event; raise Broken if it cannot occur in this phase."""
        if self.phase is Phase.ENDED or self._is_stale(event):
            return []
        handler = self._TRANSITIONS.get((self.phase, type(event)))
        if handler is None:
            raise Broken(f"{type(event).__name__} while {self.phase.name}")
        handler(self, event, now)
        return self._take_effects()

    def _is_stale(self, event: ev.Event) -> bool:
        """A reply to a request that has been given up or answered."""
        if not isinstance(event, ev.Proposed | ev.Verified | ev.CacheMissed | ev.Failed):
            return False
        return not (self._drafting.is_pending(event.request_id) or self._stands(event.request_id))

    def _stands(self, request_id: int) -> bool:
        return self._standing is not None and self._standing.request_id == request_id

    # ---------------------------------------------------------------------------------- rounds --

    def _advance(self, now: int) -> None:
        """Something has changed: between rounds end, wait or start the next; within one, give more credit."""
        if self.phase is Phase.VERIFYING:
            self._tell_target()
        elif self.phase is not Phase.READY:
            return
        elif self._finished is not None or self.answer.ending is not None:
            self.phase = Phase.SEALING
            self._give_up_draft(self._drafting.give_up())
            self._seal()
        elif self._draining:
            self._leave()
        elif self._room() > 0:
            self._start_round(now)

    def _room(self) -> int:
        """How many tokens may be confirmed before the log or the client must catch up, or the answer ends."""
        to_log = self._limits.window - self._delivery.unlogged
        to_take = self._limits.buffer - self._delivery.untaken
        return min(to_log, to_take, self.spec.max_position - len(self.answer.tokens))

    def _start_round(self, now: int) -> None:
        self._begin_round(now)
        awaited = self._drafting.pending is not None and not self._rest_of_hint().draft_tokens
        if awaited and not self._credit:
            self.phase = Phase.DRAFTING
        else:
            self._verify(now)

    def _go_on(self, now: int) -> None:
        """The target does: let the draft keep up with it."""
        self._begin_round(now)
        self._tell_target()

    def _begin_round(self, now: int) -> None:
        self._round = Round(now, with_credit=self._credit > 0)
        ready = bool(self._rest_of_hint().draft_tokens)
        self._draft_ahead(now)
        if ready:
            self._round.overlap = "hit"
        elif self._drafting.pending is not None:
            self._round.overlap = "miss"

    def _next_request(self) -> int:
        self._request_id += 1
        return self._request_id

    def _slice(self, cache_len: int) -> ev.Slice:
        tokens = self.answer.tokens
        start = min(cache_len, len(tokens) - 1)
        return ev.Slice(start, tuple(tokens[start:]), self.answer.prefix_hash(start))

    # ------------------------------------------------------------------------------- the draft --

    def _draft_ahead(self, now: int) -> None:
        """Have what follows drafted while the target is at work, if it is not under way already."""
        drafting, rest = self._drafting, self._rest_of_hint()
        if drafting.pending is None and not drafting.is_cooling_down(now):
            k = 0 if rest.draft_tokens and drafting.is_exhausted else self._wanted(rest)
            if k > 0:
                self._ask_draft(k, rest, now)
            elif not rest.draft_tokens:
                self._k = 0
        # After silence the target is not made to wait, nor told of each question: a hint is taken any time.
        # While it has one, another will follow as soon as that has its verdict.
        coming = drafting.pending is not None and not drafting.was_empty
        self._hint_due = coming or (bool(rest.draft_tokens) and not drafting.is_cooling_down(now))

    def _wanted(self, rest: HintTail) -> int:
        ready = len(rest.draft_tokens)
        sure = rest.survival[-1] if ready else 1.0
        unread = len(self.answer.tokens) - self._drafting.cache_len
        return self._speculation.tokens_to_draft(ready, sure, self._room() - 1 - ready, unread)

    def _ask_draft(self, k: int, rest: HintTail, now: int) -> None:
        """For what follows the confirmed tokens and the `rest` of the hint."""
        guesses = rest.draft_tokens
        part = self._slice(self._drafting.cache_len)
        part = ev.Slice(part.start, part.tokens + guesses, part.prefix_hash)
        position, prefix = len(self.answer.tokens) + len(guesses), self.answer.extended_hash(guesses)
        asked = PendingProposal(self._next_request(), position, prefix, k, now)
        self._drafting.pending = asked
        self._k = k
        self._emit_effect(ev.Propose(asked.request_id, part, k, self.spec.strategy, len(guesses)))

    def _give_up_draft(self, asked: PendingProposal | None) -> None:
        if asked is not None:
            self.stats.cancelled += 1
            self._emit_effect(ev.CancelPropose(asked.request_id))

    def _on_proposed(self, event: ev.Proposed, now: int) -> None:
        asked = self._drafting.pending
        if asked is None or asked.request_id != event.request_id:
            raise Broken("Proposed for what the target was asked")
        latency_ns = now - asked.requested_ns
        # A draft may say anything.
        timing = ev.Timing(min(event.timing.queue_ns, latency_ns), min(event.timing.compute_ns, latency_ns))
        self._round.record_proposal(timing, now)
        unread = asked.position - self._drafting.cache_len
        came = self._drafting.receive(event, self.answer, self._speculation.alpha, now)
        self.stats.proposed += len(event.tokens)
        self._strategy = event.strategy or self.spec.strategy or NO_STRATEGY
        self._speculation.record_proposal(came, unread, latency_ns, timing.compute_ns, event.sessions)
        self._after_draft(came, asked.position, now)

    def _on_draft_failed(self, now: int) -> None:
        self._round.record_proposal(ev.Timing(), now)
        self._drafting.fail(now)
        self._after_draft(0, len(self.answer.tokens), now)

    def _after_draft(self, came: int, position: int, now: int) -> None:
        """What the draft was asked has come to an end: `came` tokens for `position` on."""
        if self.phase is Phase.DRAFTING:
            self._round.exposed_ns = self._round.draft_wait_ns
            self._verify(now)
            return
        rest = self._rest_of_hint()
        hint = self._present_hint(rest) if came and rest.draft_tokens else None
        self._hint_due = False
        if rest.draft_tokens or position < len(self.answer.tokens):
            self._draft_ahead(now)  # further; or anew, for it came too late, and the next may not
        if self.phase is Phase.VERIFYING:
            self._tell_target(hint, came)

    def _present_hint(self, rest: HintTail) -> Hint:
        """The rest of the hint, from here on."""
        position = len(self.answer.tokens)
        return Hint(position, self.answer.prefix_hash(position), rest.draft_tokens, rest.survival)

    def _rest_of_hint(self) -> HintTail:
        """What the last proposal says of the tokens that follow."""
        hint = self._drafting.hint
        return NOTHING if hint is None else remaining(hint, self.answer.tokens)

    def _on_draft_missed(self, event: ev.CacheMissed, now: int) -> None:
        drafting = self._drafting
        drafting.misses += 1
        if drafting.misses > _MAX_MISSES:
            self._on_draft_failed(now)
            return
        drafting.cache_len = self._usable(event)
        asked, drafting.pending = drafting.pending, None
        rest = self._rest_of_hint()
        k = min(asked.k, self._room() - 1 - len(rest.draft_tokens)) if asked else 0
        if k > 0:
            self._ask_draft(k, rest, now)
        elif self.phase is Phase.DRAFTING:
            self._verify(now)
        else:
            self._draft_ahead(now)
            self._advance(now)

    # ------------------------------------------------------------------------------ the target --

    def _verify(self, now: int) -> None:
        self._round.verify_ns = now
        self._ask_target()
        if not self._credit:
            self._draft_ahead(now)

    def _ask_target(self) -> None:
        """Without credit, the limit is what one verdict can reach."""
        self.phase = Phase.VERIFYING
        position, room = len(self.answer.tokens), self._room()
        rest = self._rest_of_hint()
        most = min(self._limits.item_drafts, max(0, room - 1))
        tokens = rest.draft_tokens[: most if self._credit else min(most, self.spec.k)]
        survival = rest.survival[: len(tokens)]
        asked_for = len(tokens) + 1
        credit = max(0, min(self._credit, room - asked_for))
        due = self._credit > 0 and self._hint_due
        request_id = self._next_request()
        part = self._slice(self._target_cache_len)
        self._standing = OpenVerify(
            request_id, position + asked_for + credit, credit, hint_due=due, prefills=len(part.tokens) > 1
        )
        if tokens:
            self._sent(Hint(position, b"", tokens, survival), len(tokens))
        self._emit_effect(ev.Verify(request_id, part, tokens, survival, credit, due, self.spec.k))
        if len(tokens) < len(rest.draft_tokens):
            self._tell_target(self._present_hint(rest), len(rest.draft_tokens) - len(tokens))

    def _sent(self, hint: Hint, new: int) -> None:
        self._round.drafted += new
        if self._standing is not None:
            self._standing.add_hint(hint)

    def _tell_target(self, hint: Hint | None = None, new: int = 0) -> None:
        """Tell what it does not know of the Verify that stands, if that is worth a message.

        Of the hint, the last `new` tokens were not sent before.
        """
        standing = self._standing
        if standing is None or not self._credit or self._draining:
            return
        drafted = len(hint.draft_tokens) if hint else 0
        limit = len(self.answer.tokens) + min(drafted + 1 + self._credit, self._room())
        due = self._hint_due
        if hint is None and due == standing.hint_due and not self._needs_credit(standing, limit):
            return
        if hint is not None:
            self._sent(hint, min(new, drafted))
        standing.limit = max(standing.limit, limit)
        standing.hint_due = due
        self._emit_effect(ev.ExtendVerify(standing.request_id, standing.limit, hint, due))

    def _needs_credit(self, standing: OpenVerify, limit: int) -> bool:
        """Less than half is left, and there is enough to give, or all that will ever be needed."""
        left = standing.limit - len(self.answer.tokens)
        gain = limit - standing.limit
        enough = 1 if limit == self.spec.max_position else max(1, self._credit // 4)
        return left <= max(1, self._credit // 2) and gain >= enough

    def _cancel_verify(self) -> None:
        if self._standing is not None:
            self._emit_effect(ev.CancelVerify(self._standing.request_id))
            self._standing = None

    def _on_verified(self, event: ev.Verified, now: int) -> None:
        standing = self._standing
        if standing is None or not self._stands(event.request_id):
            raise Broken("Verified for what the draft was asked")
        fault = standing.violation(event, self.answer)
        if fault:
            self._end_with(Broken(f"the target's verdict {fault}"))
            return
        self._target_misses = 0
        self._trouble_since = None
        self._retry = self._limits.retry_ns
        self._confirm(event, standing, now)
        self._after_verdict(event, now)  # first, because the next round is what the client waits for
        self._commit()

    def _confirm(self, event: ev.Verified, standing: OpenVerify, now: int) -> None:
        offered = self._was_offered(event, now)
        confirmed = self._absorb(event)
        self._target_cache_len = min(max(0, event.cache_len), len(self.answer.tokens))
        reads_prompt = standing.prefills
        if not reads_prompt:
            # Prompts have to be read whatever is drafted: no token that is confirmed sooner saves that time.
            pass_ns = max(0, event.timing.compute_ns - event.prefill_ns)
            self._speculation.record_step(pass_ns, event.sessions, event.row_ns, confirmed)
        standing.prefills = False
        self._speculation.record_verdict(offered=offered, verified=event.verified)
        self._give_up_draft(self._drafting.confirm(self.answer.tokens))
        standing.confirm(self.answer)
        self._count_round(event, confirmed, now, reads_prompt=reads_prompt)

    def _was_offered(self, event: ev.Verified, now: int) -> bool:
        """Had the target a hint when the pass began?"""
        if event.verified or not self._rest_of_hint().draft_tokens:
            return event.verified > 0
        told_ns = self._drafting.hint_since_ns + self._speculation.message_ns
        return told_ns <= now - event.timing.compute_ns

    def _after_verdict(self, event: ev.Verified, now: int) -> None:
        over = self.answer.ending is not None or self._draining
        if event.more and not over:
            self._go_on(now)
            return
        if event.more:
            self._cancel_verify()
        self._standing = None
        self.phase = Phase.READY
        self._advance(now)

    def _absorb(self, event: ev.Verified) -> int:
        before = self.answer.output_len
        for index, token in enumerate(event.tokens):
            changed = event.fingerprint != self.answer.fingerprint
            record = TokenRecord(
                from_draft=index < event.accepted,
                logprobs=event.logprobs[index] if self.spec.logprobs is not None else None,
                fingerprint=event.fingerprint if changed else None,
            )
            if not self.answer.append(token, record):
                break
        return self.answer.output_len - before

    def _count_round(self, event: ev.Verified, confirmed: int, now: int, *, reads_prompt: bool) -> None:
        done = self._round.finish(
            event, confirmed, now, k=self._k, strategy=self._strategy, reads_prompt=reads_prompt
        )
        self.stats.add(done)
        self._emit_effect(done)

    def _on_missed(self, event: ev.CacheMissed, now: int) -> None:
        if self._drafting.is_pending(event.request_id):
            self._on_draft_missed(event, now)
        else:
            self._on_target_missed(event, now)

    def _on_failed(self, event: ev.Failed, now: int) -> None:
        if self._drafting.is_pending(event.request_id):
            self._on_draft_failed(now)
        else:
            self._on_target_failed(event, now)

    def _on_target_missed(self, event: ev.CacheMissed, now: int) -> None:
        self._target_misses += 1
        if self._target_misses > _MAX_MISSES:
            self._on_target_failed(ev.Failed(event.request_id, "its cache keeps missing"), now)
            return
        self._standing = None
        self._target_cache_len = self._usable(event)
        if self._draining:
            self.phase = Phase.READY
            self._advance(now)
        else:
            self._ask_target()

    def _on_target_failed(self, event: ev.Failed, now: int) -> None:
        self._standing = None
        self._target_misses = 0
        self._target_cache_len = 0
        if not event.retryable:
            self._end_with(Broken(f"the target refused: {event.message}"))
        elif event.elsewhere:
            self._ask_target_again(now)
        else:
            self._back_off(event, now)

    def _back_off(self, event: ev.Failed, now: int) -> None:
        """Nobody can be asked at once."""
        if self._trouble_since is None:
            self._trouble_since = self._round.verify_ns
        if now + self._retry - self._trouble_since >= self._limits.target_timeout_ns:
            self._end_with(TargetUnavailable(f"no verdict from the target: {event.message}"))
        else:
            self.phase = Phase.BACKING_OFF
            self._emit_effect(ev.SetTimer(now + self._retry))
            self._retry = min(2 * self._retry, self._limits.max_retry_ns)

    def _on_retry(self, _event: ev.TimerFired, now: int) -> None:
        self._ask_target_again(now)

    def _ask_target_again(self, now: int) -> None:
        if self._draining:
            self.phase = Phase.READY
            self._advance(now)
        else:
            self._verify(now)

    def _usable(self, event: ev.CacheMissed) -> int:
        """How much of what the replica has is ours by content."""
        agrees = (
            0 <= event.have <= len(self.answer.tokens)
            and self.answer.prefix_hash(event.have) == event.prefix_hash
        )
        return event.have if agrees else 0

    # --------------------------------------------------------------------- the log, the client --

    def _commit(self) -> None:
        commit = self._delivery.commit(self._drafting.cache_len, self._target_cache_len)
        if commit is not None:
            self._emit_effect(commit)

    def _on_committed(self, event: ev.Committed, now: int) -> None:
        self._delivery.committed(event.length)
        self._commit()
        if self._emit():
            self._seal()
            self._advance(now)

    def _emit(self) -> bool:
        """Emit what can be; false if it contradicts what the client has."""
        try:
            emit = self._delivery.emit()
        except LogLost as error:
            self._end_with(error)
            return False
        if emit is not None:
            self._emit_effect(emit)
        return True

    def _on_taken(self, event: ev.Sent, now: int) -> None:
        self._delivery.taken(event.index)
        self._advance(now)

    # --------------------------------------------------------------------------------- the end --

    def _seal(self) -> None:
        """Once the tail is logged, store the end; once that is stored, say so."""
        if self.phase is not Phase.SEALING or self._delivery.unlogged:
            return
        if self._finished is not None:
            self._conclude(self._finished)
        elif self.answer.ending is not None:
            self._store_finish(self.answer.ending)

    def _store_finish(self, ending: Ending) -> None:
        self.phase = Phase.FINISHING
        self._asked_to_finish = True
        self._emit_effect(ev.StoreFinish(ending, self._delivery.logged))

    def _on_finish_stored(self, _event: ev.FinishStored, _now: int) -> None:
        self._conclude(self.answer.ending)

    def _conclude(self, ending: Ending | None) -> None:
        """Say how the answer ended, unless the client has more of it than there is."""
        has = self._delivery.stream_from
        if self.logged_output < has:
            self._end_with(LogLost(f"the client has {has} tokens of {self.logged_output}"))
        else:
            self._end(ev.End(ending=ending))

    def _on_draining(self, _event: ev.Draining, now: int) -> None:
        self._draining = True
        self._advance(now)

    def _leave(self) -> None:
        """Draining, between rounds: go once all that was confirmed is logged."""
        if not self._delivery.unlogged:
            self._end_with(Unavailable("this gateway is shutting down; resume at another"))

    def _on_store_failed(self, event: ev.StoreFailed, now: int) -> None:
        if isinstance(event.error, LogBehind):
            self._repair_log(event.error.have)
        elif isinstance(event.error, SessionEnded):
            self._on_ended_in_store(now)
        else:
            self._end_with(event.error)

    def _on_ended_in_store(self, now: int) -> None:
        """Only the owner finishes a session, so it was aborted elsewhere.

        Unless the owner's own call did it, late: one that was on its way when the store came back shorter,
        and found the log repaired. Then the same call again is answered as the first, and all is logged.
        """
        ending = self.answer.ending
        if self.phase is Phase.SEALING and self._asked_to_finish and ending is not None:
            self._delivery.holds(len(self.answer.tokens))
            self._store_finish(ending)
        else:
            self._on_aborted(ev.Aborted(), now)

    def _repair_log(self, have: int) -> None:
        """The store came back without its last moments, but agrees: commit again what it lost.

        After two roll-backs it may also hold a part of a commit, and so more than was known to be logged.
        """
        self._delivery.holds(have)
        if self.phase is Phase.FINISHING:
            self.phase = Phase.SEALING
        self._commit()

    def _on_aborted(self, _event: ev.Aborted, _now: int) -> None:
        self._end(ev.End(ending=Ending(Reason.ABORTED)))

    def _on_aborted_too_late(self, _event: ev.Aborted, _now: int) -> None:
        """The end is on its way to the store: which of the two it took first, its answer tells."""

    def _on_interrupted(self, event: ev.Interrupted, _now: int) -> None:
        self._end_with(event.error)

    def _end_with(self, error: GalleyError) -> None:
        self._end(ev.End(error=error))

    def _end(self, end: ev.End) -> None:
        self.phase = Phase.ENDED
        self._cancel_verify()
        self._emit_effect(end)

    def _emit_effect(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def _take_effects(self) -> list[ev.Effect]:
        effects, self._effects = self._effects, []
        return effects

    _TRANSITIONS: ClassVar[Mapping[tuple[Phase, type], Callable[[Session, Any, int], None]]] = {
        **dict.fromkeys([(phase, ev.Proposed) for phase in _WORKING], _on_proposed),
        **dict.fromkeys([(phase, ev.CacheMissed) for phase in _WORKING], _on_missed),
        **dict.fromkeys([(phase, ev.Failed) for phase in _WORKING], _on_failed),
        (Phase.VERIFYING, ev.Verified): _on_verified,
        (Phase.BACKING_OFF, ev.TimerFired): _on_retry,
        (Phase.FINISHING, ev.FinishStored): _on_finish_stored,
        **dict.fromkeys([(phase, ev.Committed) for phase in _LIVE], _on_committed),
        **dict.fromkeys([(phase, ev.Sent) for phase in _LIVE], _on_taken),
        **dict.fromkeys([(phase, ev.Draining) for phase in _LIVE], _on_draining),
        **dict.fromkeys([(phase, ev.StoreFailed) for phase in _LIVE], _on_store_failed),
        **dict.fromkeys([(phase, ev.Interrupted) for phase in _LIVE], _on_interrupted),
        **dict.fromkeys([(phase, ev.Aborted) for phase in _LIVE], _on_aborted),
        (Phase.FINISHING, ev.Aborted): _on_aborted_too_late,
    }
