"""The draft of one session: the session keeps its replica while that serves it, then moves to another.

A replica that fails a request, or is late with it, loses that session. A late one is probed as well, and so
is one that sends nothing during many requests that are cancelled sooner; if it does not respond, it loses all
its sessions at once. While no draft is available, the gateway drafts by lookup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc

from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.content import Miss, PrefixHasher, look_up
from galley.core.errors import Unavailable
from galley.core.features import FeatureForm, States
from galley.core.lookup.lookup import SessionLookup
from galley.core.names import (
    FEATURES,
    HYBRID,
    LOOKUP,
    MODEL,
    MOVE_FAILED,
    MOVE_LATE,
    MOVE_LEFT,
    NGRAM,
    READS_FEATURES,
)
from galley.core.session import events as ev
from galley.core.session.events import Replica
from galley.core.store import CacheLocation
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND
from services.gateway.replicas import messages
from services.gateway.replicas.drafts import DraftPool, DraftReplica
from services.gateway.replicas.messages import ProposeEvent
from services.gateway.replicas.states import WaitingStates
from services.gateway.telemetry.observer import request_observer

_MODEL_STRATEGIES = (MODEL, HYBRID, FEATURES)

_AS_REQUESTED, _PLAIN = "draft", "plain"
"""Ways to draft a session, in trace events; the third is NGRAM in place of the requested strategy."""
_UNAVAILABLE, _RESPONDED = "away", "answered"

_MAX_TOKENS_FOLLOWED = 1024
"""Tokens indexed in one proposal, some ms of work: a long prompt must not delay other sessions."""
_MIN_MATCH = 2
"""A shorter match is mere chance."""


class DraftSession:
    """Draft for one session.

    It stays at a replica until a request fails there, or the replica drains or is let go. A failed request is
    retried once at another draft. A draft that failed the session is used again only if there is no other.
    Without a draft for the session's strategy, one that drafts by lookup is used, or else the gateway itself.
    As soon as a better draft is available, the session uses it.
    """

    def __init__(
        self, drafts: DraftPool, held: CacheLocation | None = None, *, may_look_up: bool = False
    ) -> None:
        """`held` is from the KV directory: where a resumed session has its tokens."""
        self._drafts = drafts
        self._home = None if held is None else Replica(held.replica, held.incarnation)
        self._at: DraftReplica | None = None
        self._strategy = ""
        self._failed: set[str] = set()
        self._why_left = MOVE_LEFT
        self._may_look_up = may_look_up
        self._lookup: LocalLookup | None = None
        self._drafted_with = _AS_REQUESTED
        self._states = WaitingStates()
        self._placement = -1
        self._silent: tuple[DraftReplica, int] | None = None
        """A draft, and the number of its responses to all sessions, when its silence began."""
        self._silent_ns = 0
        """How long requests were open there since then."""
        self.failures = 0
        """Requests that a draft failed, or was late with."""

    @property
    def replica(self) -> Replica | None:
        """Return the process that caches the session's tokens, None if none does."""
        return None if self._lookup is not None else self._home

    def form_for(self, spec: SessionSpec) -> FeatureForm | None:
        """Return the target's states that the session's draft reads; None if it reads none."""
        if spec.strategy not in {"", *READS_FEATURES}:
            return None
        draft = self._place(spec, spec.strategy)
        return None if draft is None else draft.form_of(self._strategy)

    def receive(self, form: FeatureForm, answers: Sequence[pb.VerifyAnswer]) -> None:
        """Keep the states of verdicts for the next request."""
        self._states.add(form, answers)

    async def propose(self, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None) -> ProposeEvent:
        """Return draft tokens, a cache miss or a failure; retry once at another draft."""
        started_ns = self._drafts.now_ns()
        draft = self._place(spec, request.strategy)
        if draft is None:
            failed = ev.Failed(request.request_id, self._drafts.problem)
            return self._report(request, self._look_up(spec, request, failed), _UNAVAILABLE)
        response = await self._try(draft, spec, request, remaining_ns)
        if not isinstance(response, ev.Failed) or not response.retryable:
            return self._report(request, response)
        other = self._place(spec, request.strategy)
        if other is None or other.address in self._failed:
            return self._report(request, self._look_up(spec, request, response))
        left_ns = None if remaining_ns is None else remaining_ns - (self._drafts.now_ns() - started_ns)
        if left_ns is not None and left_ns <= 0:
            return self._report(request, response)
        request_observer().retried(ev.Pool.DRAFT, response.message)
        return self._report(request, await self._try(other, spec, request, left_ns))

    def _place(self, spec: SessionSpec, strategy: str) -> DraftReplica | None:
        """Return the session's draft or None; set `_strategy`. Leave a draft by lookup for a better one."""
        now = self._drafts.now_ns()
        is_placed = self._strategy == strategy and self._placement == self._drafts.placement
        if self._at is None or not is_placed or not self._at.is_serving(now):
            self._placement = self._drafts.placement
            is_canary = self._drafts.is_canary(spec)
            for offered in (strategy, NGRAM) if strategy in _MODEL_STRATEGIES else (strategy,):
                self._at = self._drafts.choose(
                    offered, self._home, self._failed, spec.session_id, is_canary=is_canary
                )
                self._strategy = offered
                if self._at is not None:
                    break
        return self._at

    def _look_up(self, spec: SessionSpec, request: ev.Propose, failed: ev.Failed) -> ProposeEvent:
        if not self._may_look_up or request.strategy not in {"", NGRAM, *_MODEL_STRATEGIES}:
            return failed
        if self._lookup is None:
            self._lookup = LocalLookup()
        return self._lookup.propose(spec, request)

    async def _try(
        self, draft: DraftReplica, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ProposeEvent:
        started_ns = self._drafts.now_ns()
        draft.sessions.add(spec.session_id, started_ns)
        breaker, replica = draft.breaker, draft.client.replica
        attempt = self._drafts.begin(draft, breaker)
        confirmed = request.slice.start + len(request.slice.tokens) - request.ahead
        states = self._states.take(draft.form_of(self._strategy), confirmed)
        request = replace(request, strategy=self._strategy)
        try:
            response = await _send(draft, spec, request, states, remaining_ns)
        except asyncio.CancelledError:
            if self._drafts.is_late(started_ns):
                self._drafts.failed(draft, breaker, attempt)
                self._leave(draft, spec, MOVE_LATE)
                self._draft_with(_PLAIN, MOVE_LATE)
                self._drafts.start_probe(draft)
            else:
                breaker.record_cancelled(attempt)
                self._probe_if_silent(draft, started_ns)
            raise
        draft.responses += 1
        if isinstance(response, ev.Failed):
            if response.refusal is None:
                self._drafts.failed(draft, breaker, attempt)
            else:  # it serves other sessions
                breaker.record_cancelled(attempt)
            self._leave(draft, spec, MOVE_FAILED)
            if draft.client.replica is None:
                self._drafts.start_refresh()
        else:
            self._drafts.succeeded(draft, breaker, attempt)
            self._stay(replica, spec)
        return response

    def _probe_if_silent(self, draft: DraftReplica, started_ns: int) -> None:
        """Check a draft that has sent nothing for long: with credit, the target may be first each time.

        One that reads a long prompt responds to the check, and stays.
        """
        now_ns = self._drafts.now_ns()
        if self._silent != (draft, draft.responses):
            self._silent, self._silent_ns = (draft, draft.responses), 0
        self._silent_ns += now_ns - started_ns
        if self._drafts.is_late(now_ns - self._silent_ns):
            self._silent_ns = 0
            self._drafts.start_probe(draft)

    def _stay(self, replica: Replica | None, spec: SessionSpec) -> None:
        if self._home is not None and replica is not None and self._home != replica:
            self._drafts.moved(spec.session_id, self._home, replica, self._why_left)
        self._home = replica
        self._why_left = MOVE_LEFT
        self._lookup = None
        self._failed.clear()

    def _leave(self, draft: DraftReplica, spec: SessionSpec, reason: str) -> None:
        self.failures += 1
        draft.sessions.remove(spec.session_id)
        self._states.clear()
        self._failed.add(draft.address)
        if self._at is draft:
            self._at = None
            self._why_left = reason

    def _report(self, request: ev.Propose, response: ProposeEvent, reason: str = MOVE_FAILED) -> ProposeEvent:
        if isinstance(response, ev.Failed):
            self._draft_with(_PLAIN, reason)
        elif self._lookup is not None or self._strategy != request.strategy:
            self._draft_with(NGRAM, reason)
        else:
            self._draft_with(_AS_REQUESTED)
        return response

    def _draft_with(self, how: str, reason: str = "") -> None:
        if how != self._drafted_with:
            self._drafted_with = how
            request_observer().event(
                names.DRAFT_DEGRADED, {names.TO: how, names.REASON: reason or _RESPONDED}
            )


async def _send(
    draft: DraftReplica, spec: SessionSpec, request: ev.Propose, states: States, remaining_ns: int | None
) -> ProposeEvent:
    """Send the request to the draft, with states of the target; only cancellation raises."""
    client = draft.client
    span = request_observer().call(names.PROPOSE, draft.address)
    k = min(request.k, client.info.max_draft_tokens)
    started_s = asyncio.get_running_loop().time()
    try:
        item = await messages.propose_item(spec, request, k, remaining_ns, span.traceparent, states)
        if client.replica is None:  # another process at this address may have another tokenizer
            span.failed("unavailable")
            return ev.Failed(request.request_id, f"the draft at {draft.address} is unavailable")
        response = await client.send(item)
    except asyncio.CancelledError:
        waited_s = asyncio.get_running_loop().time() - started_s
        if remaining_ns is not None and waited_s >= remaining_ns / SECOND:
            span.failed("deadline_exceeded")  # else the session needs it no more
        raise
    except (grpc.aio.AioRpcError, Unavailable) as error:
        client.lost()
        return messages.failed_event(request.request_id, error, span)
    else:
        messages.note_status(span, response)
    finally:
        span.end()
    return messages.propose_event(request, response, client.info)


class LocalLookup:
    """Prompt lookup in the tokens of one session, at the gateway; a draft's also knows other sessions.

    It responds as a draft does: it caches the tokens that it was sent, reports a miss by content, and
    continues draft tokens. The time of a proposal depends on the tokens that are new since the last one.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._hasher = PrefixHasher()
        self._followed = SessionLookup()
        """The index of the confirmed tokens, as far as they are indexed."""

    def propose(self, spec: SessionSpec, request: ev.Propose) -> ev.Proposed | ev.CacheMissed:
        """Return a proposal, which may be empty, or a cache miss."""
        part = request.slice
        found = look_up(self._tokens, part.start, part.tokens, part.prefix_hash, self._hasher)
        if isinstance(found, Miss):
            return ev.CacheMissed(request.request_id, found.have, found.prefix_hash)
        position = part.start + len(part.tokens)
        self._replace(found.agree, part.tokens[found.agree - part.start :])
        tokens = self._continue(spec, position - request.ahead, request.k)
        return ev.Proposed(
            request.request_id,
            position,
            self._hasher.digest(self._tokens, position),
            tokens,
            cache_len=position,
            strategy=LOOKUP,
        )

    def _replace(self, start: int, tokens: Sequence[int]) -> None:
        self._hasher.truncate(start)
        self._tokens[start:] = tokens
        if start < len(self._followed):
            self._followed = SessionLookup()

    def _continue(self, spec: SessionSpec, confirmed: int, k: int) -> tuple[int, ...]:
        """Return at most `k` tokens to follow `_tokens`, of which the first `confirmed` are confirmed."""
        if not self._follow(confirmed):
            return ()
        room = max(0, spec.max_position - len(self._tokens) - 1)
        found = self._followed.find(self._tokens[confirmed:], min(k, room))
        return found.tokens if found.matched >= _MIN_MATCH else ()

    def _follow(self, confirmed: int) -> bool:
        """Index further confirmed tokens; return True once all are indexed, and no others."""
        if confirmed < len(self._followed):
            self._followed = SessionLookup()
        at = len(self._followed)
        self._followed.follow(self._tokens[at : min(confirmed, at + _MAX_TOKENS_FOLLOWED)])
        return len(self._followed) == confirmed
