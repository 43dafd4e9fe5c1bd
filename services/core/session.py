"""The session machine: one answer from its prompt to its end, one round at a time.

The rules it keeps (they are the design's rules 2 and 4):

- A round is: ask the draft for up to k tokens, ask the target to check them, absorb what it confirmed. The
  next round starts as soon as the last verdict is in; it does not wait for the log.
- What was confirmed is committed to the log, one commit at a time, and only what the log holds is emitted.
  At most `window` tokens may be confirmed and not yet logged; at most `buffer` may be confirmed and not yet
  taken by the client.
- The draft is never needed: if it fails, lies or is late, the round goes on with what is valid of its
  proposal, at worst with nothing, and the draft is left alone for a while.
- A target that fails is asked again, until `target_timeout_ns` have passed without a verdict (one that hangs
  has used them up when the shell gives up on it).
- Caches are addressed by content: a miss is answered by sending more.

The machine does no I/O and has no clock: `step(event, now_ns)` returns the effects to carry out, in order.
A Commit comes before the Emit of the same tokens, always.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from services.core import events as ev
from services.core.answer import Ending, Reason
from services.core.errors import Broken, LogLost, TargetUnavailable, Unavailable
from services.core.records import TokenRecord
from services.core.stats import SpeculationStats
from services.core.store import LogBehind, SessionEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.core.answer import Answer, SessionSpec
    from services.core.errors import GalleyError

_MS = 1_000_000
_MAX_MISSES = 3


class Phase(enum.Enum):
    """Where the machine stands between events."""

    READY = "between rounds: starting the next one, or waiting for the log or the client"
    DRAFTING = "a proposal is awaited"
    VERIFYING = "a verdict is awaited"
    BACKING_OFF = "the target failed and will be asked again"
    SEALING = "the answer has ended; its tail is being logged"
    FINISHING = "all is logged; the end is being stored"
    ENDED = "over"


_LIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in nanoseconds."""

    window: int = 64
    buffer: int = 256
    target_timeout_ns: int = 10_000 * _MS
    retry_ns: int = 50 * _MS
    max_retry_ns: int = 1_000 * _MS
    draft_cooldown_ns: int = 250 * _MS
    max_draft_cooldown_ns: int = 10_000 * _MS


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
    ) -> None:
        """`answer` holds what the log holds already; `finished` is the stored end of a session that has one.

        The client has output tokens [0, stream_from), whose hash is `seen_hash` (empty: not checked).
        """
        self.answer = answer
        self.stats = SpeculationStats()
        self.phase = Phase.READY
        self._limits = limits or SessionLimits()
        self._stream_from = stream_from
        self._seen_hash = seen_hash
        self._finished = finished
        self._logged = len(answer.tokens)
        self._committing = False
        self._emitted = 0
        self._taken = 0
        self._draining = False
        self._request_id = 0
        self._misses = 0
        self._cache_len = {ev.Pool.DRAFT: 0, ev.Pool.TARGET: 0}
        self._draft_off_until = 0
        self._draft_cooldown = self._limits.draft_cooldown_ns
        self._retry = self._limits.retry_ns
        self._trouble_since: int | None = None
        self._round = _Round(0)
        self._effects: list[ev.Effect] = []

    @property
    def spec(self) -> SessionSpec:
        """The request."""
        return self.answer.spec

    @property
    def logged_output(self) -> int:
        """How many output tokens the log holds."""
        return self._logged - len(self.spec.prompt)

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
        return event.request_id != self._request_id or self.phase not in {Phase.DRAFTING, Phase.VERIFYING}

    # ---------------------------------------------------------------------------------- rounds --

    def _advance(self, now: int) -> None:
        """Between rounds: end, wait, or start the next one."""
        if self.phase is not Phase.READY:
            return
        if self._finished is not None or self.answer.ending is not None:
            self.phase = Phase.SEALING
            self._seal()
        elif self._draining:
            self._leave()
        elif self._room() > 0:
            self._start_round(now)

    def _room(self) -> int:
        """How many tokens may be confirmed before the log or the client must catch up."""
        unlogged = len(self.answer.tokens) - self._logged
        untaken = self.answer.output_len - max(self._taken, self._stream_from)
        return min(self._limits.window - unlogged, self._limits.buffer - untaken)

    def _start_round(self, now: int) -> None:
        self._round = _Round(now)
        k = self._affordable_k(now)
        if k > 0:
            self._propose(k, now)
        else:
            self._verify(now)

    def _affordable_k(self, now: int) -> int:
        if now < self._draft_off_until:
            return 0
        left = self.spec.max_position - len(self.answer.tokens)
        return min(self.spec.k, left - 1, self._room() - 1)

    def _propose(self, k: int, now: int) -> None:
        self.phase = Phase.DRAFTING
        self._round.asked_k = k
        self._round.asked_ns = now
        self._ask_draft()

    def _ask_draft(self) -> None:
        k, strategy = self._round.asked_k, self.spec.strategy
        self._emit_effect(ev.Propose(self._next_request(), self._slice(ev.Pool.DRAFT), k, strategy))

    def _verify(self, now: int) -> None:
        self.phase = Phase.VERIFYING
        self._round.verify_ns = now
        self._ask_target()

    def _ask_target(self) -> None:
        draft_tokens = self._round.draft_tokens
        self._emit_effect(ev.Verify(self._next_request(), self._slice(ev.Pool.TARGET), draft_tokens))

    def _slice(self, pool: ev.Pool) -> ev.Slice:
        tokens = self.answer.tokens
        start = min(self._cache_len[pool], len(tokens) - 1)
        return ev.Slice(start, tuple(tokens[start:]), self.answer.prefix_hash(start))

    def _next_request(self) -> int:
        self._request_id += 1
        return self._request_id

    # ------------------------------------------------------------------------------- the draft --

    def _on_proposed(self, event: ev.Proposed, now: int) -> None:
        self._misses = 0
        position = len(self.answer.tokens)
        self._round.draft_wait_ns = now - self._round.asked_ns
        self._round.draft = event.timing
        if event.position != position or event.prefix_hash != self.answer.prefix_hash(position):
            self._rest_draft(now)
        else:
            self._draft_cooldown = self._limits.draft_cooldown_ns
            self._cache_len[ev.Pool.DRAFT] = max(0, event.cache_len)
            self._round.draft_tokens = _valid_prefix(
                event.tokens[: self._round.asked_k], self.spec.vocab_size
            )
        self._verify(now)

    def _on_draft_failed(self, _event: ev.Failed, now: int) -> None:
        self._misses = 0
        self._round.draft_wait_ns = now - self._round.asked_ns
        self._cache_len[ev.Pool.DRAFT] = 0
        self._rest_draft(now)
        self._verify(now)

    def _rest_draft(self, now: int) -> None:
        """Leave the draft alone, each time twice as long as the last."""
        self._draft_off_until = now + self._draft_cooldown
        self._draft_cooldown = min(2 * self._draft_cooldown, self._limits.max_draft_cooldown_ns)

    def _on_draft_missed(self, event: ev.CacheMissed, now: int) -> None:
        if self._too_many_misses():
            self._on_draft_failed(ev.Failed(event.request_id, "its cache keeps missing"), now)
            return
        self._learn_cache(ev.Pool.DRAFT, event)
        self._ask_draft()

    # ------------------------------------------------------------------------------ the target --

    def _on_verified(self, event: ev.Verified, now: int) -> None:
        fault = self._fault_of(event)
        if fault:
            self._end_with(Broken(f"the target's verdict {fault}"))
            return
        self._misses = 0
        self._trouble_since = None
        self._retry = self._limits.retry_ns
        position = len(self.answer.tokens)
        confirmed = self._absorb(event)
        self._cache_len[ev.Pool.TARGET] = min(max(0, event.cache_len), len(self.answer.tokens))
        agreed = position + min(event.accepted, confirmed)
        self._cache_len[ev.Pool.DRAFT] = min(self._cache_len[ev.Pool.DRAFT], agreed)
        self._count_round(event, position, confirmed, now)
        self.phase = Phase.READY
        self._advance(now)  # first, because the next round is what the client waits for
        self._commit()

    def _fault_of(self, event: ev.Verified) -> str:
        """What is wrong with a verdict, if anything: a broken target must not reach the log."""
        drafted = self._round.draft_tokens
        if event.position != len(self.answer.tokens):
            return f"is for position {event.position}, not {len(self.answer.tokens)}"
        if not 0 < len(event.tokens) <= len(drafted) + 1:
            return f"has {len(event.tokens)} tokens for {len(drafted)} draft tokens"
        if not 0 <= event.accepted <= min(len(drafted), len(event.tokens)):
            return f"accepts {event.accepted} of {len(drafted)}"
        if len(event.tokens) > event.accepted + 1:
            return f"has {len(event.tokens)} tokens for {event.accepted} accepted"
        if not event.accepted <= event.verified <= len(drafted):
            return f"verified {event.verified} of {len(drafted)}"
        if event.tokens[: event.accepted] != drafted[: event.accepted]:
            return "accepts tokens that were not drafted"
        if len(_valid_prefix(event.tokens, self.spec.vocab_size)) < len(event.tokens):
            return "has a token outside the vocabulary"
        if self.spec.logprobs is not None and len(event.logprobs) != len(event.tokens):
            return "lacks logprobs"
        return ""

    def _absorb(self, event: ev.Verified) -> int:
        before = self.answer.output_len
        for index, token in enumerate(event.tokens):
            changed = event.fingerprint != self.answer.fingerprint
            record = TokenRecord(
                from_draft=index < event.accepted,
                logprobs=event.logprobs[index] if self.spec.logprobs is not None else None,
                fingerprint=event.fingerprint if changed else None,
            )
            if not self.answer.absorb(token, record):
                break
        return self.answer.output_len - before

    def _count_round(self, event: ev.Verified, position: int, confirmed: int, now: int) -> None:
        done = ev.RoundEnded(
            position=position,
            started_ns=self._round.started_ns,
            ended_ns=now,
            drafted=len(self._round.draft_tokens),
            verified=event.verified,
            accepted=min(event.accepted, confirmed),
            confirmed=confirmed,
            draft_wait_ns=self._round.draft_wait_ns,
            verify_wait_ns=now - self._round.verify_ns,
            draft=self._round.draft,
            target=event.timing,
        )
        self.stats.count(done)
        self._emit_effect(done)

    def _on_target_missed(self, event: ev.CacheMissed, now: int) -> None:
        if self._too_many_misses():
            self._on_target_failed(ev.Failed(event.request_id, "its cache keeps missing"), now)
            return
        self._learn_cache(ev.Pool.TARGET, event)
        self._ask_target()

    def _on_target_failed(self, event: ev.Failed, now: int) -> None:
        self._misses = 0
        self._cache_len[ev.Pool.TARGET] = 0
        if self._trouble_since is None:
            self._trouble_since = self._round.verify_ns
        if not event.retryable:
            self._end_with(Broken(f"the target refused: {event.message}"))
        elif now + self._retry - self._trouble_since >= self._limits.target_timeout_ns:
            self._end_with(TargetUnavailable(f"no verdict from the target: {event.message}"))
        else:
            self.phase = Phase.BACKING_OFF
            self._emit_effect(ev.WakeAt(now + self._retry))
            self._retry = min(2 * self._retry, self._limits.max_retry_ns)

    def _on_retry(self, _event: ev.Woken, now: int) -> None:
        if self._draining:
            self.phase = Phase.READY
            self._advance(now)
        else:
            self._verify(now)

    def _too_many_misses(self) -> bool:
        self._misses += 1
        return self._misses > _MAX_MISSES

    def _learn_cache(self, pool: ev.Pool, event: ev.CacheMissed) -> None:
        """What the replica has is of use if it is ours by content."""
        usable = 0 <= event.have <= len(self.answer.tokens)
        if usable and self.answer.prefix_hash(event.have) == event.prefix_hash:
            self._cache_len[pool] = event.have
        else:
            self._cache_len[pool] = 0

    # --------------------------------------------------------------------- the log, the client --

    def _commit(self) -> None:
        unlogged = self.answer.tokens[self._logged :]
        if self._committing or not unlogged:
            return
        self._committing = True
        records = self.answer.records[max(0, self.logged_output) :]
        self._emit_effect(
            ev.Commit(
                expected_len=self._logged,
                tokens=tuple(unlogged),
                records=tuple(records),
                draft_cache_len=self._cache_len[ev.Pool.DRAFT],
                target_cache_len=self._cache_len[ev.Pool.TARGET],
            )
        )

    def _on_committed(self, event: ev.Committed, now: int) -> None:
        if not self._logged <= event.length <= len(self.answer.tokens):
            raise Broken(f"a commit logged {event.length} of {len(self.answer.tokens)} tokens")
        self._committing = False
        self._logged = event.length
        self._commit()
        if self._emit():
            self._seal()
            self._advance(now)

    def _emit(self) -> bool:
        """Emit what is logged and not emitted; false if it contradicts what the client has."""
        logged = self.logged_output
        if self._emitted == 0 and logged >= self._stream_from:
            if not self._agrees_with_client():
                self._end_with(LogLost("the answer is not the one whose first tokens the client has seen"))
                return False
            self._emitted = self._stream_from
        if logged > self._emitted and logged > self._stream_from:
            items = tuple(self.answer.stream(self._emitted, logged))
            self._emitted = logged
            self._emit_effect(ev.Emit(items))
        return True

    def _agrees_with_client(self) -> bool:
        return not self._seen_hash or self.answer.output_hash(self._stream_from) == self._seen_hash

    def _on_taken(self, event: ev.Taken, now: int) -> None:
        self._taken = max(self._taken, event.index)
        self._advance(now)

    # --------------------------------------------------------------------------------- the end --

    def _seal(self) -> None:
        """Once the tail is logged, store the end; once that is stored, say so."""
        if self.phase is not Phase.SEALING or self._logged < len(self.answer.tokens):
            return
        if self._finished is not None:
            self._conclude(self._finished)
        elif self.answer.ending is not None:
            self.phase = Phase.FINISHING
            self._emit_effect(ev.StoreFinish(self.answer.ending, self._logged))

    def _on_finish_stored(self, _event: ev.FinishStored, _now: int) -> None:
        self._conclude(self.answer.ending)

    def _conclude(self, ending: Ending | None) -> None:
        """Say how the answer ended, unless the client has more of it than there is."""
        if self.logged_output < self._stream_from:
            self._end_with(LogLost(f"the client has {self._stream_from} tokens of {self.logged_output}"))
        else:
            self._end(ev.End(ending=ending))

    def _on_draining(self, _event: ev.Draining, now: int) -> None:
        self._draining = True
        self._advance(now)

    def _leave(self) -> None:
        """Draining, between rounds: go once all that was confirmed is logged."""
        if self._logged == len(self.answer.tokens):
            self._end_with(Unavailable("this gateway is shutting down; resume at another"))

    def _on_store_failed(self, event: ev.StoreFailed, now: int) -> None:
        if isinstance(event.error, LogBehind) and event.error.have < self._logged:
            self._repair_log(event.error.have)
        elif isinstance(event.error, SessionEnded):
            self._on_aborted(ev.Aborted(), now)  # only the owner finishes a session: it was aborted elsewhere
        else:
            self._end_with(event.error)

    def _repair_log(self, have: int) -> None:
        """The store came back without its last moments, but agrees: commit again what it lost."""
        self._logged = have
        self._committing = False
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
        self._emit_effect(end)

    def _emit_effect(self, effect: ev.Effect) -> None:
        self._effects.append(effect)

    def _take_effects(self) -> list[ev.Effect]:
        effects, self._effects = self._effects, []
        return effects

    _TRANSITIONS: ClassVar[Mapping[tuple[Phase, type], Callable[[Session, Any, int], None]]] = {
        (Phase.DRAFTING, ev.Proposed): _on_proposed,
        (Phase.DRAFTING, ev.CacheMissed): _on_draft_missed,
        (Phase.DRAFTING, ev.Failed): _on_draft_failed,
        (Phase.VERIFYING, ev.Verified): _on_verified,
        (Phase.VERIFYING, ev.CacheMissed): _on_target_missed,
        (Phase.VERIFYING, ev.Failed): _on_target_failed,
        (Phase.BACKING_OFF, ev.Woken): _on_retry,
        (Phase.FINISHING, ev.FinishStored): _on_finish_stored,
        **dict.fromkeys([(phase, ev.Committed) for phase in _LIVE], _on_committed),
        **dict.fromkeys([(phase, ev.Taken) for phase in _LIVE], _on_taken),
        **dict.fromkeys([(phase, ev.Draining) for phase in _LIVE], _on_draining),
        **dict.fromkeys([(phase, ev.StoreFailed) for phase in _LIVE], _on_store_failed),
        **dict.fromkeys([(phase, ev.Interrupted) for phase in _LIVE], _on_interrupted),
        **dict.fromkeys([(phase, ev.Aborted) for phase in _LIVE], _on_aborted),
        (Phase.FINISHING, ev.Aborted): _on_aborted_too_late,
    }


class _Round:
    """What is known of the round under way."""

    def __init__(self, started_ns: int) -> None:
        self.started_ns = started_ns
        self.asked_k = 0
        self.asked_ns = started_ns
        self.verify_ns = started_ns
        self.draft_wait_ns = 0
        self.draft_tokens: tuple[int, ...] = ()
        self.draft = ev.Timing()


def _valid_prefix(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:index]
    return tokens
