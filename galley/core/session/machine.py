"""The session machine: one answer from its prompt to its end.

Rules:

1. Without credit, a round is: request up to k draft tokens, have the target verify them, append what it
   confirmed. The next round starts with the last verdict; it does not wait for the log.
2. With credit, one Verify stays open at the target, which decodes on without a new request. Each verdict
   ends a round. New proposals follow as hints, and more credit once half of it is used.
3. Confirmed tokens are committed, one commit at a time: one has the tokens of all events that came together.
   Only what the log holds is emitted. At most `window` tokens are confirmed but not logged, and at most
   `buffer` confirmed but not sent to the client. The target's limit never goes beyond either.
4. Drafting runs ahead of verification: the draft continues from its own tokens while the target checks them.
   A proposal that continues from a rejected token is cancelled, unless the session's drafts usually recover.
   `speculation.py` decides how many tokens to request, down to none. What the grammar forces and what the
   caller predicts (`sources.py`) is proposed first, without a request.
5. The target never needs a draft: a round uses the valid part of a proposal, or none. After a failure, or a
   response that does not fit its request, the draft gets no request until a cooldown ends.
6. A target that fails is retried until `target_timeout_ns` have passed since its first failure without a
   verdict; a silent one has failed since it got the request. If another replica is available, it gets the
   request at once, and its time counts anew.
7. Caches are addressed by content: after a cache miss the request is repeated with more tokens.

The machine does no I/O and has no clock: `step(event, now)` returns the effects to carry out, in order.
A Commit always comes before the Emit of the same tokens. Times are nanoseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from galley.core.answer.answer import Answer, Ending, Reason, SessionSpec
from galley.core.content import common_prefix_len
from galley.core.errors import Broken, GalleyError, LogLost, TargetUnavailable, Unavailable
from galley.core.hints import MAX_HINT_TOKENS, Hint, HintTail
from galley.core.names import GRAMMAR, LOCAL_SOURCES, LOOKUP, NO_STRATEGY, PREDICTION
from galley.core.records import DRAFTED, NOT_DRAFTED, TokenRecord
from galley.core.session import events as ev
from galley.core.session.delivery import Delivery
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.drafting import Drafting, PendingProposal, added_sources, remaining
from galley.core.session.round import Round, SpeculationStats, VerifiedNodes
from galley.core.session.sources import LocalSources
from galley.core.session.speculation import Speculation
from galley.core.session.verifying import OpenVerify, Verifying
from galley.core.store import LogBehind, SessionEnded

_MS = 1_000_000

# The session's own sources are asked for the draft tokens of so many steps, once half of them are used: the
# target begins its next step before a hint arrives that answers its last verdict.
_LOCAL_STEPS = 4

_NO_NODES: Final = VerifiedNodes()


class Phase(enum.Enum):
    READY = "between rounds: about to start one, or waiting for the log or the client"
    DRAFTING = "waiting for a proposal, without credit"
    VERIFYING = "waiting for a verdict"
    BACKING_OFF = "waiting to retry the target"
    SEALING = "the answer has ended; its tail is being logged"
    FINISHING = "all tokens are logged; the ending is being stored"
    ENDED = "over"


# Tuples, because the hash of an enum's member is slow.
# With credit, a proposal may be pending in each of _WORKING but DRAFTING.
_WORKING: Final = (Phase.VERIFYING, Phase.READY, Phase.DRAFTING, Phase.BACKING_OFF)
_LIVE: Final = (*_WORKING, Phase.SEALING, Phase.FINISHING)

TRANSITIONS: Final[Mapping[type[ev.Event], tuple[tuple[Phase, ...], str]]] = {
    ev.Proposed: (_WORKING, "_on_proposed"),
    ev.CacheMissed: (_WORKING, "_on_missed"),
    ev.Failed: (_WORKING, "_on_failed"),
    ev.Verified: ((Phase.VERIFYING,), "_on_verified"),
    ev.TimerFired: ((Phase.BACKING_OFF,), "_on_timer"),
    ev.FinishStored: ((Phase.FINISHING,), "_on_finish_stored"),
    ev.Committed: (_LIVE, "_on_committed"),
    ev.Sent: (_LIVE, "_on_sent"),
    ev.Draining: (_LIVE, "_on_draining"),
    ev.StoreFailed: (_LIVE, "_on_store_failed"),
    ev.Interrupted: (_LIVE, "_on_interrupted"),
    ev.Aborted: (_LIVE, "_on_aborted"),
}
"""The phases in which each event may occur, and the method that handles it. Anything else raises Broken."""

_RESPONSES: Final = (ev.Proposed, ev.Verified, ev.CacheMissed, ev.Failed)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in nanoseconds.

    The target may decode `credit` tokens without a new request; 0 requests each round. A Verify carries at
    most `item_drafts` draft tokens; more follow as a hint.
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
    """One session. Call `start` once, then `step` with each event."""

    def __init__(  # noqa: PLR0913  # what it takes over, and from where
        self,
        answer: Answer,
        limits: SessionLimits | None = None,
        *,
        stream_from: int = 0,
        seen_hash: bytes = b"",
        finished: Ending | None = None,
        shared: SharedStatistics | None = None,
        sources: LocalSources | None = None,
        draft_version: str = "",
    ) -> None:
        """Take over an `answer` that holds what the log holds; `finished` is its ending, if stored.

        `shared` are the statistics of all sessions of a gateway, where those of a `draft_version` have their
        own. `sources` are those of the session itself,
        at the end of the answer. The client has output tokens [0, stream_from), whose hash is `seen_hash`
        (empty: not checked).
        """
        self.answer = answer
        self.stats = SpeculationStats()
        self.phase = Phase.READY
        self.limits = limits = limits or SessionLimits()
        self._delivery = Delivery(answer, stream_from, seen_hash)
        self._speculation = Speculation(answer.spec, shared or SharedStatistics(), draft_version)
        self._drafting = Drafting(limits.draft_cooldown_ns, limits.max_draft_cooldown_ns, self._speculation)
        self._verifying = Verifying(
            min(limits.credit, limits.window),
            limits.item_drafts,
            retry_ns=limits.retry_ns,
            max_retry_ns=limits.max_retry_ns,
            timeout_ns=limits.target_timeout_ns,
        )
        self._sources = sources
        self._round: Round
        # The draft tokens that the target was sent last.
        self._sent: Hint | None = None
        self._hint_due = False
        self._stored_ending = finished
        self._finish_requested = False
        self._is_draining = False
        self._verdict_follows = False
        """True if a further verdict came with the present one: what to draft is decided after the last."""
        self._lacks_room = False
        """True while the log or the client keeps the open Verify from getting the credit that is due."""
        self._last_request_id = 0
        self._effects: list[ev.Effect] = []

    @property
    def spec(self) -> SessionSpec:
        return self.answer.spec

    @property
    def logged_output(self) -> int:
        return self._delivery.logged_output

    @property
    def predicted(self) -> tuple[int, int]:
        """Return how many tokens of the prediction the output has, and how many it does not have."""
        prediction = None if self._sources is None else self._sources.prediction
        return (0, 0) if prediction is None else prediction.counts

    def start(self, now: int) -> list[ev.Effect]:
        """Emit what the log holds beyond the client's index, then start the first round."""
        self._emit()
        self._advance(now)
        return self._take_effects()

    def step(self, *events: ev.Event, now: int) -> list[ev.Effect]:
        """Handle events that came together and return the effects; one commit has all their tokens.

        Raise Broken if an event cannot occur in this phase.
        """
        for number, event in enumerate(events, 1):
            if self.phase is Phase.ENDED:
                break
            if isinstance(event, _RESPONSES) and self._is_stale(event):
                continue
            self._verdict_follows = (
                number < len(events)
                and isinstance(event, ev.Verified)
                and isinstance(events[number], ev.Verified)
            )
            phases, handler = TRANSITIONS[type(event)]
            if self.phase not in phases:
                raise Broken(f"session: event {type(event).__name__} in phase {self.phase.name}")
            getattr(self, handler)(event, now)
        if self.phase is Phase.ENDED:
            self._drafting.give_up(now)
        elif not self._delivery.is_committing:
            self._commit()
        return self._take_effects()

    def _is_stale(self, event: ev.Proposed | ev.Verified | ev.CacheMissed | ev.Failed) -> bool:
        """Return True for a response to a request that was cancelled or is closed."""
        request_id = event.request_id
        return not (self._verifying.is_open(request_id) or self._drafting.is_pending(request_id))

    def _advance(self, now: int) -> None:
        """Continue after a change: within a round, extend the Verify; between rounds, end or start one."""
        if self.phase is Phase.VERIFYING:
            self._extend_verify()
        elif self.phase is not Phase.READY:
            return
        elif self._stored_ending is not None or self.answer.ending is not None:
            self.phase = Phase.SEALING
            self._cancel_draft(self._drafting.give_up(now))
            self._seal()
        elif self._is_draining:
            if not self._delivery.unlogged:
                self._end_with(Unavailable("this gateway is shutting down; resume at another"))
        elif self._room() > 0:
            self._start_round(now)

    def _use_room(self, now: int) -> None:
        """Continue after the log or the client made room, if that was lacking."""
        if self._lacks_room or self.phase is not Phase.VERIFYING:
            self._advance(now)

    def _room(self) -> int:
        """Return how many tokens may be confirmed before the log, the client or max_position stops it."""
        to_log = self.limits.window - self._delivery.unlogged
        to_send = self.limits.buffer - self._delivery.unsent
        return min(to_log, to_send, self.spec.max_position - len(self.answer.tokens))

    def _start_round(self, now: int) -> None:
        self._begin_round(now)
        if self._round.overlap == "miss" and not self._verifying.credit:
            self.phase = Phase.DRAFTING
        else:
            self._verify(now)

    def _begin_round(self, now: int) -> Sequence[str]:
        """Begin a round; return the sources of draft tokens that the session itself has added to its hint."""
        self._round = Round(now, with_credit=self._verifying.credit > 0)
        added: Sequence[str] = ()
        if self._verdict_follows:
            is_ready = bool(self._tail().draft_tokens)
        else:
            if self._sources is not None:
                added = self._propose_locally(self._sources, now)
            is_ready = self._draft_ahead(now)
        if is_ready:
            self._round.overlap = "hit"
        elif self._drafting.pending is not None:
            self._round.overlap = "miss"
        return added

    def _propose_locally(self, sources: LocalSources, now: int) -> Sequence[str]:
        """Extend the hint by what the session's own sources propose; return the source of each token."""
        tail = self._tail().main
        ready, reached = len(tail.draft_tokens), tail.survival[-1] if tail.survival else 1.0
        room = self.spec.max_position - len(self.answer.tokens) - 1
        most = min(_LOCAL_STEPS * self.spec.k, room, MAX_HINT_TOKENS) - ready
        added: list[str] = []
        if most <= 0 or ready >= _LOCAL_STEPS // 2 * self.spec.k:
            return added
        for proposal in sources.propose(tail.draft_tokens, most):
            chance = reached * proposal.survival[0]
            # A token that is certain takes its row in any case, now or later.
            if chance < 1.0 and not self._speculation.is_worth_a_row(chance):
                break
            self._drafting.extend(proposal, self.answer, now)
            added += [proposal.source] * len(proposal.tokens)
            reached *= proposal.survival[-1]
        return added

    def _tail(self) -> HintTail:
        return self._drafting.tail(self.answer.tokens)

    def _draft_ahead(self, now: int) -> bool:
        """Request draft tokens unless the draft is pending or cooling. Return True if earlier ones remain."""
        if not self.spec.k:
            return False
        drafting, tail = self._drafting, self._tail()
        is_ready = bool(tail.draft_tokens)
        can_draft = self.spec.strategy != NO_STRATEGY and not drafting.is_cooling_down(now)
        # A prediction goes on where its tokens in the hint end, and needs no draft.
        last_source = tail.main.last_source
        goes_on = last_source == PREDICTION
        if drafting.pending is None and can_draft:
            k = 0 if is_ready and (drafting.is_exhausted or goes_on) else self._tokens_to_draft(tail)
            if k > 0:
                self._request_draft(k, self._speculation.width, tail, now)
            elif not is_ready:
                drafting.k = 0
        # After an empty proposal no hint is announced: that would cost a message and make the target linger.
        # It takes hints anyway. While it has one, another is due as soon as that one has its verdict; not
        # after a forced run, which nothing need follow.
        follows = goes_on or (is_ready and can_draft and last_source != GRAMMAR)
        self._hint_due = (drafting.pending is not None and not drafting.was_empty) or follows
        return is_ready

    def _tokens_to_draft(self, tail: HintTail) -> int:
        main = tail.main
        ready_survival = main.survival[-1] if main.draft_tokens else 1.0
        room = self._room() - 1 - len(main.draft_tokens)
        unread = len(self.answer.tokens) - self._drafting.cache_len
        return self._speculation.tokens_to_draft(len(tail.draft_tokens), ready_survival, room, unread)

    def _request_draft(self, k: int, width: int, tail: HintTail, now: int) -> None:
        self._last_request_id += 1
        request = self._drafting.request(self._last_request_id, self.answer, tail, k, now, width)
        self._effects.append(request)

    def _cancel_draft(self, pending: PendingProposal | None) -> None:
        if pending is not None:
            self.stats.cancelled += 1
            self._effects.append(ev.CancelPropose(pending.request_id))

    def _on_proposed(self, event: ev.Proposed, now: int) -> None:
        pending = self._drafting.pending
        if pending is None or pending.request_id != event.request_id:
            raise Broken("session: Proposed for a request to the target")
        latency_ns = now - pending.requested_ns
        # The draft is not trusted: its times are at most what was observed.
        timing = ev.Timing(min(event.timing.queue_ns, latency_ns), min(event.timing.compute_ns, latency_ns))
        self._round.record_proposal(timing, now)
        unread = pending.position - self._drafting.cache_len
        before = self._drafting.hint
        received = self._drafting.receive(event, self.answer, self._speculation.alpha, now)
        self._count_proposal(event)
        self._speculation.record_proposal(
            received.valid,
            unread,
            latency_ns,
            timing.compute_ns,
            event.sessions,
            is_late=received.is_late,
        )
        self._after_draft(received.added, pending.position, now, before)

    def _count_proposal(self, event: ev.Proposed) -> None:
        self.stats.proposed += len(event.tokens)
        if event.strategy != LOOKUP:  # which is no draft
            self.stats.proposals += 1
            self.stats.proposals_with_features += event.used_features

    def _on_draft_failed(self, now: int) -> None:
        self._round.record_proposal(ev.Timing(), now)
        self._drafting.fail(now)
        self._after_draft(0, len(self.answer.tokens), now)

    def _after_draft(self, added: int, position: int, now: int, before: Hint | None = None) -> None:
        """Use the tokens that a proposal for `position` has added to a hint, and request the next ones."""
        if self.phase is Phase.DRAFTING:
            self._round.exposed_ns = self._round.draft_wait_ns
            self._verify(now)
            return
        tail = self._tail()
        hint = self._hint_from(tail) if added and tail.draft_tokens else None
        self._hint_due = False
        if tail.draft_tokens or position < len(self.answer.tokens):
            self._draft_ahead(now)  # what follows; or again, because this proposal came too late
        if self.phase is Phase.VERIFYING:
            self._extend_verify(hint, added_sources(before, tail, added))

    def _hint_from(self, tail: HintTail) -> Hint:
        position = len(self.answer.tokens)
        digest = self.answer.prefix_hash(position)
        return Hint(position, digest, tail.draft_tokens, tail.survival, tail.sources, tail.parents)

    def _on_draft_missed(self, event: ev.CacheMissed, now: int) -> None:
        pending = self._drafting.miss(event, self.answer)
        if pending is None:
            self._on_draft_failed(now)
            return
        tail = self._tail()
        k = min(pending.k, self._room() - 1 - len(tail.main.draft_tokens))
        if k > 0:
            self._request_draft(k, pending.width, tail, now)
            return
        self._speculation.record_given_up(now - pending.requested_ns)
        if self.phase is Phase.DRAFTING:
            self._verify(now)
        else:
            self._draft_ahead(now)
            self._advance(now)

    def _verify(self, now: int) -> None:
        self._round.verify_ns = now
        self._request_verify()
        if not self._verifying.credit:
            self._draft_ahead(now)

    def _request_verify(self) -> None:
        self.phase = Phase.VERIFYING
        self._lacks_room = True  # until the first verdict tells
        self._last_request_id += 1
        tail = self._tail()
        verify = self._verifying.request(
            self._last_request_id,
            self.answer,
            tail,
            self._room(),
            hint_due=self._hint_due,
            is_drafting=self._drafting.is_in_use,
        )
        sent, before = len(verify.draft_tokens), self._sent_before(tail)
        self._round.record_sent(tail.sources[before:sent])
        self._effects.append(verify)
        if sent > before:
            position = len(self.answer.tokens)
            self._sent = Hint(position, b"", verify.draft_tokens, verify.survival, parents=verify.parents)
        if sent < len(tail.draft_tokens):
            self._extend_verify(self._hint_from(tail), tail.sources[max(before, sent) :])

    def _sent_before(self, tail: HintTail) -> int:
        """Return how many of the first draft tokens of `tail` were in an earlier request or extension."""
        if self._sent is None:
            return 0
        return common_prefix_len(remaining(self._sent, self.answer.tokens).draft_tokens, tail.draft_tokens)

    def _extend_verify(self, hint: Hint | None = None, unsent: Sequence[str] = ()) -> None:
        """Send the open Verify a hint, or credit; `unsent` are the sources of tokens new to the target."""
        self._lacks_room = False
        if self._is_draining or not self._verifying.can_extend(self.answer, hint, hint_due=self._hint_due):
            return
        room = self._room()
        extension = self._verifying.extend(self.answer, room, hint, hint_due=self._hint_due)
        self._lacks_room = room <= self._verifying.credit
        if extension is None:
            return
        if hint is not None:
            self._round.record_sent(unsent)
            self._sent = hint
        self._effects.append(extension)

    def _cancel_verify(self) -> None:
        cancel = self._verifying.cancel()
        if cancel is not None:
            self._effects.append(cancel)

    def _on_verified(self, event: ev.Verified, now: int) -> None:
        open_verify = self._verifying.open
        if open_verify is None or open_verify.request_id != event.request_id:
            raise Broken("session: Verified for a request to the draft")
        violation = open_verify.violation(event, self.answer)
        if violation:
            self._end_with(Broken(f"the target's verdict {violation}"))
            return
        nodes = self._verified_nodes(event, open_verify) if event.verified else _NO_NODES
        if nodes.undrafted:
            drafted = len(nodes.sources)
            event = replace(event, accepted=min(event.accepted, drafted), verified=drafted)
        self._confirm(event, nodes, now, reads_prompt=open_verify.prefills)
        self._after_verdict(event, now)

    def _verified_nodes(self, event: ev.Verified, open_verify: OpenVerify) -> VerifiedNodes:
        """Return the verified draft tokens, up to the first that was not drafted.

        The target verifies what the grammar forces without a hint of it. That counts as drafted if the
        session's own grammar forces it as well.
        """
        nodes = open_verify.tree(event, self.answer)
        if nodes is not None:
            return nodes
        sources = open_verify.sources(event, self.answer)
        if "" in sources:
            forced = () if self._sources is None else self._sources.forced(event.accepted)
            own = common_prefix_len(forced, event.tokens)
            end = next((i for i, source in enumerate(sources) if not source and i >= own), len(sources))
            self._round.record_sent([GRAMMAR] * sources[:end].count(""))
            sources = [source or GRAMMAR for source in sources[:end]]
        return VerifiedNodes(sources, undrafted=event.verified - len(sources))

    def _confirm(self, event: ev.Verified, nodes: VerifiedNodes, now: int, *, reads_prompt: bool) -> None:
        """Take a verdict; `nodes` are the draft tokens that it verified."""
        sources = nodes.sources
        # The draft pool is judged by its own tokens alone.
        verified = sum([source not in LOCAL_SOURCES for source in sources]) if sources else 0
        offered = verified > 0 or self._had_hint(event, now)
        confirmed = self._append(event)
        self._verifying.confirm(event, self.answer)
        if not reads_prompt:
            # Prompts are read whatever is drafted: a token that is confirmed sooner does not save that time.
            step_ns = max(0, event.timing.compute_ns - event.prefill_ns)
            self._speculation.shared.record_step(step_ns, event.sessions, event.row_ns, confirmed)
        self._speculation.record_verdict(offered=offered, verified=verified)
        self._speculation.record_target(trees=event.trees)
        self._cancel_draft(self._drafting.confirm(self.answer.tokens, now))
        strategy = self._drafting.strategy
        done = self._round.finish(
            event,
            confirmed,
            now,
            nodes=nodes,
            k=self._drafting.k,
            strategy=strategy,
            reads_prompt=reads_prompt,
        )
        self.stats.add(done)
        self._effects.append(done)

    def _had_hint(self, event: ev.Verified, now: int) -> bool:
        """Return True if the target had tokens of the draft for a verdict, and verified none."""
        tail = self._tail()
        if event.verified or not tail.draft_tokens or tail.first_source in LOCAL_SOURCES:
            return False
        arrived_ns = self._drafting.hint_since_ns + self._speculation.shared.message_ns
        return arrived_ns <= now - event.timing.compute_ns

    def _append(self, event: ev.Verified) -> int:
        """Append the verdict's tokens to the answer, up to its end; return how many."""
        answer, before = self.answer, self.answer.output_len
        for index, token in enumerate(event.tokens):
            from_draft = index < event.accepted
            changed = event.fingerprint != answer.fingerprint
            if changed or self.spec.logprobs is not None:
                record = TokenRecord(
                    from_draft=from_draft,
                    logprobs=event.logprobs[index] if self.spec.logprobs is not None else None,
                    fingerprint=event.fingerprint if changed else None,
                )
            else:
                record = DRAFTED if from_draft else NOT_DRAFTED
            if not answer.append(token, record):
                break
        confirmed = answer.output_len - before
        if self._sources is not None:
            self._sources.confirm(answer.tokens[len(answer.tokens) - confirmed :])
        return confirmed

    def _after_verdict(self, event: ev.Verified, now: int) -> None:
        over = self.answer.ending is not None or self._is_draining
        if event.more and not over:
            added = self._begin_round(now)
            if not self._verdict_follows:
                self._extend_verify(self._hint_from(self._tail()) if added else None, added)
            return
        if event.more:
            self._cancel_verify()
        self._verifying.open = None
        self.phase = Phase.READY
        self._advance(now)

    def _on_missed(self, event: ev.CacheMissed, now: int) -> None:
        if self._drafting.is_pending(event.request_id):
            self._on_draft_missed(event, now)
        elif not self._verifying.miss(event, self.answer):
            self._on_target_failed(ev.Failed(event.request_id, "its cache keeps missing"), now)
        elif self._is_draining:
            self.phase = Phase.READY
            self._advance(now)
        else:
            self._request_verify()

    def _on_failed(self, event: ev.Failed, now: int) -> None:
        if self._drafting.is_pending(event.request_id):
            self._on_draft_failed(now)
        else:
            self._on_target_failed(event, now)

    def _on_target_failed(self, event: ev.Failed, now: int) -> None:
        self._verifying.fail(elsewhere=event.elsewhere)
        failed_ns = self._round.verify_ns if event.late else now
        if event.elsewhere:
            self._retry_target(now)
        elif not event.retryable:
            self._end_with(event.refusal or Broken(f"the target refused: {event.message}"))
        elif (retry_ns := self._verifying.next_retry_ns(now, self.spec.session_id, failed_ns)) is None:
            self._end_with(TargetUnavailable(f"no verdict from the target: {event.message}"))
        else:
            self.phase = Phase.BACKING_OFF
            self._effects.append(ev.SetTimer(retry_ns))

    def _on_timer(self, _event: ev.TimerFired, now: int) -> None:
        self._retry_target(now)

    def _retry_target(self, now: int) -> None:
        if self._is_draining:
            self.phase = Phase.READY
            self._advance(now)
        else:
            self._verify(now)

    def _commit(self) -> None:
        if self.phase is Phase.ENDED:
            return
        commit = self._delivery.commit(self._drafting.cache_len, self._verifying.cache_len)
        if commit is not None:
            self._effects.append(commit)

    def _on_committed(self, event: ev.Committed, now: int) -> None:
        self._delivery.committed(event.length)
        self._emit()
        self._seal()
        self._use_room(now)

    def _emit(self) -> None:
        """Emit what the log holds; end the session if that contradicts what the client has."""
        try:
            emit = self._delivery.emit()
        except LogLost as error:
            self._end_with(error)
            return
        if emit is not None:
            self._effects.append(emit)

    def _on_sent(self, event: ev.Sent, now: int) -> None:
        self._delivery.sent(event.index)
        self._use_room(now)

    def _seal(self) -> None:
        """Store the ending once the tail is logged; end once that is stored."""
        if self.phase is not Phase.SEALING or self._delivery.unlogged:
            return
        if self._stored_ending is not None:
            self._conclude(self._stored_ending)
        elif self.answer.ending is not None:
            self._store_finish(self.answer.ending)

    def _store_finish(self, ending: Ending) -> None:
        self.phase = Phase.FINISHING
        self._finish_requested = True
        self._effects.append(ev.StoreFinish(ending, self._delivery.logged, self._delivery.log_hash))

    def _on_finish_stored(self, _event: ev.FinishStored, _now: int) -> None:
        self._conclude(self.answer.ending)

    def _conclude(self, ending: Ending | None) -> None:
        """End with `ending`, unless the client has more tokens than the log."""
        client_has = self._delivery.stream_from
        if self.logged_output < client_has:
            self._end_with(LogLost(f"the client has {client_has} tokens, the log only {self.logged_output}"))
        else:
            self._end(ev.End(ending=ending))

    def _on_draining(self, _event: ev.Draining, now: int) -> None:
        self._is_draining = True
        self._advance(now)

    def _on_store_failed(self, event: ev.StoreFailed, _now: int) -> None:
        if isinstance(event.error, LogBehind):
            self._repair_log(event.error)
        elif isinstance(event.error, SessionEnded):
            self._on_ended_in_store()
        else:
            self._end_with(event.error)

    def _on_ended_in_store(self) -> None:
        """Handle a session that the store calls finished: it was aborted elsewhere, or our finish was late.

        A late finish follows a roll-back of the store. All tokens are logged then, and repeating the call
        returns its first result.
        """
        ending = self.answer.ending
        if self.phase is Phase.SEALING and self._finish_requested and ending is not None:
            self._delivery.holds(len(self.answer.tokens))
            self._store_finish(ending)
        else:
            self._end_as_aborted()

    def _repair_log(self, behind: LogBehind) -> None:
        """Commit again what the store lost in a crash, if its log agrees as far as it goes.

        After two roll-backs it may hold part of a commit, and so more than was known to be logged.
        """
        if self.answer.prefix_hash(behind.have) != behind.log_hash:
            self._end_with(LogLost("the log is not that of the answer"))
            return
        self._delivery.holds(behind.have)
        if self.phase is Phase.FINISHING:
            self.phase = Phase.SEALING

    def _on_aborted(self, _event: ev.Aborted, _now: int) -> None:
        # While the finish is being stored, the store decides whether finish or abort won.
        if self.phase is not Phase.FINISHING:
            self._end_as_aborted()

    def _end_as_aborted(self) -> None:
        self._end(ev.End(ending=Ending(Reason.ABORTED)))

    def _on_interrupted(self, event: ev.Interrupted, _now: int) -> None:
        self._end_with(event.error)

    def _end_with(self, error: GalleyError) -> None:
        self._end(ev.End(error=error))

    def _end(self, end: ev.End) -> None:
        self.phase = Phase.ENDED
        self._cancel_verify()
        self._effects.append(end)

    def _take_effects(self) -> list[ev.Effect]:
        effects, self._effects = self._effects, []
        return effects
