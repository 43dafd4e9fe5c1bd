"""The target of one session: it keeps its replica while that serves it, then moves to another.

What a replica refuses or loses comes back to the session machine as Failed; the machine requests it again,
and the next request goes elsewhere. While a response is late, a second replica that caches the prefix may get
the same request (a hedge): whichever responds first continues. Both have one build, so their tokens are the
same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import grpc

from galley.common.wire.status import error_type
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.content import cache_salt
from galley.core.errors import GrammarsUnavailable, TokenizerMismatch, Unavailable
from galley.core.names import MOVE_FAILED, MOVE_HEDGED, MOVE_LATE, MOVE_LEFT
from galley.core.routing.choice import HashedTokens, RoutingRequest, cached_tokens
from galley.core.routing.lateness import VerdictTimeout
from galley.core.session import events as ev
from galley.core.session.events import Replica, ReportResults, Verification, VerifyEvent
from galley.core.store import CacheLocation
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND
from services.gateway.replicas import messages
from services.gateway.replicas.clients import OpenRequest
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.targets import TargetPool, TargetReplica
from services.gateway.telemetry.observer import request_observer

_MOST_BLOCKS = 512
"""Blocks of a prompt that are hashed before others get a turn: about 1 ms."""


class TargetSession:
    """Route the verifications of one session.

    It stays at a replica until a request fails there, the replica is let go, or a request is cancelled while
    a response is due. Until the next response, replicas that failed it are used only if there is no other.
    """

    def __init__(
        self,
        targets: TargetPool,
        fingerprint: str = "",
        held: CacheLocation | None = None,
        reader: DraftSession | None = None,
    ) -> None:
        """`fingerprint` is the build that computed the session so far; `held` is from the KV directory.

        `reader` gets the states that it reads while a draft works for the session.
        """
        self.reader = reader
        self.timeout = VerdictTimeout(targets.slow_factor)
        self._targets = targets
        self._fingerprint = fingerprint
        self._held = held
        self._at: TargetReplica | None = None
        self.has_begun = False
        """True once the session has had a verdict here."""
        self._hashed: HashedTokens | None = None
        self._failed: set[str] = set()
        self._refusals = 0
        self._served_by: Replica | None = None
        self._why_left = MOVE_LEFT

    def verify(
        self, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None, report: ReportResults
    ) -> Verification:
        return TargetRequest(self, spec, request, remaining_ns, report)

    def problem(self, spec: SessionSpec) -> str:
        """Return why no target serves the session."""
        leases = [lease for lease in self._targets.leases() if not lease.draining]
        if not leases or any(lease.offers(spec.lora, spec.grammar) for lease in leases):
            return self._targets.problem
        if spec.grammar is not None and any(lease.offers(spec.lora) for lease in leases):
            return str(GrammarsUnavailable(spec.grammar.kind))
        return f"no target offers the LoRA adapter {spec.lora!r}"

    # ------------------------------------------------------------------------------- placement --

    def place(self, spec: SessionSpec, request: ev.Verify) -> TargetReplica | None:
        """Return the session's replica; choose one if it has none, or one that is no longer accepted.

        Return None if there is none, or only one of another build, or many blocks are to be hashed: all that
        needs `find`.
        """
        at = self._at
        if at is None or not at.is_accepted or not at.candidate().lease.offers(spec.lora, spec.grammar):
            if not self._hash_blocks(spec, request):
                return None
            at = self._targets.choose(self._routing(spec, request), self._failed)
            self._at = at if at is not None and self._fingerprint in {"", at.fingerprint} else None
        return self._at

    async def find(self, spec: SessionSpec, request: ev.Verify) -> TargetReplica | None:
        """Return the session's replica; of a refreshed pool, also one of another build, or None."""
        if await self._hashed_and_placed(spec, request) is None:
            await self._targets.refresh()
            if await self._hashed_and_placed(spec, request) is None:
                self._at = self._targets.choose(self._routing(spec, request), self._failed)
        return self._at

    async def _hashed_and_placed(self, spec: SessionSpec, request: ev.Verify) -> TargetReplica | None:
        while not self._hash_blocks(spec, request):  # noqa: ASYNC110  # nothing else hashes them
            await asyncio.sleep(0)
        return self.place(spec, request)

    def other(self, spec: SessionSpec, request: ev.Verify, at: TargetReplica) -> TargetReplica | None:
        """Return another replica of the session's build that is up and has not failed it, or None."""
        fingerprint = self._fingerprint or at.fingerprint
        routing = replace(self._routing(spec, request), fingerprint=fingerprint)
        avoid = {*self._failed, at.address}
        other = self._targets.choose(routing, avoid)
        if other is None or not other.is_up or other.address in avoid or other.fingerprint != fingerprint:
            return None
        return other

    def other_with_prefix(
        self, spec: SessionSpec, request: ev.Verify, at: TargetReplica
    ) -> TargetReplica | None:
        """Return another replica that caches the prefix, except at most one KV block of it, or None."""
        if request.slice.start:
            return None  # what the others cache of it is not known
        other = self.other(spec, request, at)
        if other is None or other.lease is None:
            return None
        missing = len(request.slice.tokens) - cached_tokens(self._routing(spec, request), other.lease)
        return other if missing <= other.lease.kv_block_tokens else None

    def hedge_after_ns(self, at: TargetReplica) -> int | None:
        """Return how long to wait for the first response before a hedge, None for no hedge."""
        quantile = self._targets.hedge_quantile
        return at.times.first_verdict_quantile(quantile) if quantile else None

    def _hash_blocks(self, spec: SessionSpec, request: ev.Verify) -> bool:
        """Hash some of the blocks that `choose` compares; return True once all are hashed."""
        tokens = self._tokens(spec, request)
        return all(tokens.hash_blocks(size, _MOST_BLOCKS) for size in self._targets.block_sizes())

    def _routing(self, spec: SessionSpec, request: ev.Verify) -> RoutingRequest:
        tokens = self._tokens(spec, request)
        return RoutingRequest(
            tokens,
            spec.max_position,
            self._fingerprint,
            self._held,
            spec.lora,
            spec.session_id,
            spec.grammar,
        )

    def _tokens(self, spec: SessionSpec, request: ev.Verify) -> HashedTokens:
        """Return the first tokens of the session, as far as the request has them; at least its prompt."""
        if self._hashed is None:
            self._hashed = HashedTokens(spec.prompt, cache_salt(spec.tenant_salt, spec.lora))
        self._hashed.tokens = request.slice.tokens if request.slice.start == 0 else spec.prompt
        return self._hashed

    # ---------------------------------------------------------------------------------- reports --

    def served(self, verified: ev.Verified, session_id: str, by: Replica | None) -> None:
        """Note a result, and that the session has moved if another replica sent the last one."""
        self.has_begun = True
        self._fingerprint = verified.fingerprint
        self._held = None  # its KV is where the session is
        self._failed.clear()
        self._refusals = 0
        self.timeout.record_in_time()
        if by is not None and by is not self._served_by and by != self._served_by:
            if self._served_by is not None:
                self._targets.moved(session_id, self._served_by, by, self._why_left)
            self._served_by = by
            self._why_left = MOVE_LEFT

    def leave(self, target: TargetReplica, reason: str = MOVE_FAILED, *, has_refused: bool = False) -> None:
        self._failed.add(target.address)
        self._refusals += has_refused
        if self._at is target:
            self._at = None
            self._why_left = reason

    def may_repeat(self, failed: ev.Failed) -> bool:
        """Return True if another replica may serve what one has failed, and has been left for.

        What a second one refuses for good, no other serves either; it would only read the prompt again.
        """
        if failed.refusal is not None:
            return False
        return failed.retryable or self._refusals <= 1

    def move_to(self, target: TargetReplica, reason: str) -> None:
        """Continue at a replica that serves the session already. Its first result counts as a move, too."""
        if self._served_by is None and self._at is not None:
            self._served_by = self._at.client.replica
        self._at = target
        self._why_left = reason

    def leave_late(self, spec: SessionSpec, request: ev.Verify, at: TargetReplica, since_s: float) -> bool:
        """Move from `at`, which has sent no response since `since_s`, to a replica that is idle or has.

        Return False if there is none, for example if all are slow because they share a machine.
        """
        other = self.other(spec, request, at)
        if other is None or not other.is_responding(since_s):
            return False
        self.leave(at, MOVE_LATE)
        self.timeout.record_late()
        self._targets.start_probe(at)
        self._at = other
        return True


ReportEvents: TypeAlias = "Callable[[_Attempt, list[VerifyEvent]], None]"


class _Attempt:
    """A verification at one replica, among whose outstanding rows `rows` still count."""

    def __init__(
        self,
        target: TargetReplica,
        spec: SessionSpec,
        request: ev.Verify,
        remaining_ns: int | None,
        extensions: Sequence[ev.ExtendVerify],
        report: ReportEvents,
        session: TargetSession,
    ) -> None:
        """Send the request soon; `extensions` are sent after it, and the list may grow until then."""
        self.target = target
        self.has_begun = session.has_begun
        self.rows = len(request.slice.tokens) + len(request.draft_tokens)
        self.sent: OpenRequest[pb.VerifyAnswer] | None = None
        self._request_id = request.request_id
        self._extensions = extensions
        self._report = report
        self._reader = session.reader if request.is_drafting else None
        self._form = None if self._reader is None else self._reader.form_for(spec)
        self._sent_to: Replica | None = None
        self._span = request_observer().call(names.VERIFY, target.address)
        # Made when it is sent: a message with a long prompt takes a turn of the event loop of its own.
        self._item = partial(messages.verify_item, spec, request, remaining_ns, self._span.traceparent)
        self._has_ended = False
        target.add_request(self.rows)
        self._sending: asyncio.Task[None] | None = asyncio.create_task(self._send())

    @property
    def replica(self) -> Replica | None:
        return self._sent_to or self.target.client.replica

    @property
    def has_response(self) -> bool:
        """Return True if a response has arrived that was not read yet."""
        return self.sent is not None and self.sent.has_response

    def abandon(self, reason: str, status: str) -> ev.Failed:
        """End, and return the event of that; `status` becomes that of the call's span."""
        self._has_ended = True
        self._span.failed(status)
        return ev.Failed(self._request_id, reason)

    def stop_counting(self) -> None:
        self.target.remove_request(self.rows)

    def close(self) -> None:
        self._has_ended = True
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None  # a task that was cancelled keeps its frames, and so this object
        if self.sent is not None:
            self.sent.cancel()
        self._span.end()

    async def _send(self) -> None:
        client = self.target.client
        try:
            self.sent = await client.verify(await self._item(), self, self._form)
            self._sent_to = client.replica
            for extension in self._extensions:
                self.extend(extension)
        except TokenizerMismatch as error:
            self._report(self, [self.abandon(str(error), error_type(error))])
        except (grpc.aio.AioRpcError, Unavailable) as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  # the session must not wait for ever
            self._has_ended = True
            self._span.failed(error_type(error))
            self._report(self, [messages.broken_event(self._request_id, error)])

    def extend(self, request: ev.ExtendVerify) -> None:
        """Send an extension; ignored before the request was sent."""
        if self.sent is not None:
            self.sent.extend(messages.extension(request, trees=self.target.client.info.trees))

    def put(self, responses: Sequence[pb.VerifyAnswer]) -> None:
        if self._has_ended:
            return
        trees = self.target.client.info.trees
        events = [messages.verify_event(self._request_id, response, trees=trees) for response in responses]
        last = events[-1]
        if not (isinstance(last, ev.Verified) and last.more):
            self._has_ended = True
            messages.note_status(self._span, responses[-1])
        if self._reader is not None and self._form is not None:
            self._reader.receive(self._form, responses)
        self._report(self, events)

    def fail(self, error: Exception) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.target.client.lost()
        self._report(self, [messages.failed_event(self._request_id, error, self._span)])


class TargetRequest:
    """A verification at its session's replica, with a timer for late responses and perhaps a hedge."""

    def __init__(
        self,
        session: TargetSession,
        spec: SessionSpec,
        request: ev.Verify,
        remaining_ns: int | None,
        report: ReportResults,
    ) -> None:
        self._session = session
        self._spec = spec
        self._request = request
        self._remaining_ns = remaining_ns
        self._report = report
        self._loop = asyncio.get_running_loop()
        # Responses arrive in the context of the connection, which has another span and other log fields.
        self._context = copy_context()
        self._extensions: list[ev.ExtendVerify] = []
        """Extensions before the first response; another replica that gets the request later gets them too."""
        self._is_first = True
        self._is_due = True
        self._attempt: _Attempt | None = None
        self._replica: Replica | None = None
        self._hedge: _Attempt | None = None
        self._hedge_expected = self._expected = (0.0, 0)
        # The next response: when it is late, when the timer is to fire, and when it will, which may be
        # earlier.
        self._late_s = self._timer_s = self._armed_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        target = session.place(spec, request)
        self._finding = None if target is not None else asyncio.create_task(self._find())
        if target is not None:
            self._start(target)

    @property
    def replica(self) -> Replica | None:
        """Return the process that serves it, None if none does; it stays when the request has ended."""
        return self._replica if self._attempt is None else self._attempt.replica

    def extend(self, request: ev.ExtendVerify) -> None:
        """Send an extension to every replica that has the request; one that gets it later gets both."""
        if self._is_first:
            self._extensions.append(request)
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.extend(request)

    def expire(self) -> bool:
        """Leave the replica, which has sent no response in time; return True if another one can serve."""
        late = self._attempt
        self.close()
        return late is not None and self._can_move_from(late.target)

    def close(self) -> None:
        """Cancel the request if it is open. The session leaves a replica that owes a response."""
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None  # a task that was cancelled keeps its frames, and so this object
        if self._attempt is not None and self._is_due:
            self._session.leave(self._attempt.target)
        self._drop_hedge()
        self._close_attempt()

    async def _find(self) -> None:
        try:
            target = await self._session.find(self._spec, self._request)
            if target is not None:
                self._start(target)
                return
            failed = ev.Failed(self._request.request_id, self._session.problem(self._spec))
        except Exception as error:  # noqa: BLE001  # the session must not wait for ever
            failed = messages.broken_event(self._request.request_id, error)
        self._report([failed])

    def _start(self, target: TargetReplica) -> None:
        self._attempt = self._new_attempt(target)
        self._expect(target, self._loop.time())

    def _new_attempt(self, target: TargetReplica) -> _Attempt:
        return _Attempt(
            target,
            self._spec,
            self._request,
            self._remaining_ns,
            self._extensions,
            self._take,
            self._session,
        )

    def _take(self, attempt: _Attempt, events: list[VerifyEvent]) -> None:
        self._context.run(self._receive, attempt, events)

    def _receive(self, attempt: _Attempt, events: list[VerifyEvent]) -> None:
        """Report the results of an attempt; those of a hedge only if it is the first to respond."""
        if attempt is self._hedge:
            if not isinstance(events[0], ev.Verified) or self._has_response:
                return  # the attempt continues
            self._switch_to(attempt)
        elif attempt is not self._attempt:
            return
        self._drop_hedge()
        self._note(attempt, events)
        if not self._is_due:
            self.close()
        self._report(events)

    @property
    def _has_response(self) -> bool:
        return self._attempt is not None and self._attempt.has_response

    def _note(self, attempt: _Attempt, events: list[VerifyEvent]) -> None:
        """Note results that arrived together; say of a failure whether another replica can serve."""
        target, last = attempt.target, events[-1]
        self._is_due = isinstance(last, ev.Verified) and last.more
        now_s = self._loop.time()
        if not isinstance(events[0], ev.Failed):
            self._responded(attempt, now_s)
        verdict = next((event for event in reversed(events) if isinstance(event, ev.Verified)), None)
        if verdict is not None:
            self._session.served(verdict, self._spec.session_id, attempt.replica)
        if self._is_due:
            self._expect(target, now_s)
        elif isinstance(last, ev.Failed):
            self._session.leave(target, has_refused=not last.retryable)
            can_move = self._session.may_repeat(last) and self._can_move_from(target)
            events[-1] = replace(last, elsewhere=can_move)

    def _can_move_from(self, target: TargetReplica) -> bool:
        return self._session.other(self._spec, self._request, target) is not None

    def _close_attempt(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._replica = attempt.replica
            attempt.stop_counting()
            attempt.close()

    # ------------------------------------------------------------------------------------- timer --

    def _expect(self, target: TargetReplica, now_s: float) -> None:
        _, predicted_ns = self._expected = _expectation(target, now_s)
        limit_ns = self._session.timeout.limit_ns(target.times.slowed_ns(predicted_ns))
        self._late_s = now_s + limit_ns / SECOND
        hedge_ns = self._session.hedge_after_ns(target) if self._is_first else None
        self._set_timer(now_s, limit_ns if hedge_ns is None else min(limit_ns, hedge_ns))

    def _waited_ns(self, now_s: float) -> int:
        since_s, _ = self._expected
        return int((now_s - since_s) * SECOND)

    def _responded(self, attempt: _Attempt, now_s: float) -> None:
        target, waited_ns = attempt.target, self._waited_ns(now_s)
        _, predicted_ns = self._expected
        target.responded(now_s, attempt.rows)
        target.times.record(predicted_ns, waited_ns)
        if self._is_first:
            target.times.record_first(waited_ns)
            self._is_first = False
            self._extensions.clear()
        attempt.rows = 0  # a request continues with a few rows a step, which every step has room for

    def _set_timer(self, now_s: float, within_ns: int) -> None:
        self._timer_s = now_s + within_ns / SECOND
        # A timer that fires too early is set again, which saves a new one for each response.
        if self._timer is None or self._armed_s > self._timer_s:
            self._arm_timer()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Not `when` of the timer: uvloop's has none if it is due already.
        self._armed_s = self._timer_s
        self._timer = self._loop.call_at(self._timer_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._loop.time() < self._timer_s:
            self._arm_timer()
        elif (within_ns := self._act_on_delay()) is not None:
            self._set_timer(self._loop.time(), within_ns)

    def _act_on_delay(self) -> int | None:
        """Hedge, or leave a late replica for a better one. Return the next wait in ns, None for no more."""
        attempt = self._attempt
        if attempt is None:
            return None
        target = attempt.target
        times = target.times
        limit_ns = self._session.timeout.limit_ns(times.slowed_ns(times.predicted_ns(target.rows_ahead)))
        if attempt.has_response:  # and it was not read yet
            return limit_ns
        left_ns = round((self._late_s - self._loop.time()) * SECOND)
        if left_ns > 0:
            if attempt.sent is not None:
                self._start_hedge(target)
            return left_ns
        if attempt.sent is None or not self._session.leave_late(
            self._spec, self._request, target, self._expected[0]
        ):
            return limit_ns
        reason = f"no response from {target.address} in {limit_ns / SECOND:.1f} s"
        self._receive(attempt, [attempt.abandon(reason, "deadline_exceeded")])
        return None

    # ------------------------------------------------------------------------------------- hedge --

    def _start_hedge(self, target: TargetReplica) -> None:
        other = self._session.other_with_prefix(self._spec, self._request, target)
        if other is None or self._hedge is not None:
            return
        self._hedge = self._new_attempt(other)
        self._hedge_expected = _expectation(other, self._loop.time())
        request_observer().event(names.HEDGED, {names.POOL: "target", names.TO: other.address})

    def _switch_to(self, hedge: _Attempt) -> None:
        if self._attempt is not None:
            # At least that long: without the slowest, the quantile that decides on hedges would sink.
            self._attempt.target.times.record_first(self._waited_ns(self._loop.time()))
            self._attempt.abandon("another replica responded first", "cancelled")
        self._close_attempt()
        self._attempt, self._hedge = hedge, None
        self._expected = self._hedge_expected
        self._session.move_to(hedge.target, MOVE_HEDGED)

    def _drop_hedge(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.stop_counting()
            hedge.close()


def _expectation(target: TargetReplica, now_s: float) -> tuple[float, int]:
    """Return from when on a response of `target` is awaited, and in how many ns it is predicted."""
    return now_s, target.times.predicted_ns(target.rows_ahead)
