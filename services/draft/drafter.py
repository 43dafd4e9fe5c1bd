"""Run the steps of a draft: open new requests, advance open proposals, return the finished ones.

A request is open from the step that takes it until its response or cancellation. A session has at most one
open request: a newer one supersedes it. If more are open than fit into a step, the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from galley.common.logs import log_internal
from galley.core.content import Miss, SessionKey, look_up, prefix_hash
from galley.core.errors import Broken, GalleyError, Overloaded
from galley.core.scheduler.messages import Slice, Superseded
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy

_RETRY_AFTER_S = 1.0


class SessionTable:
    """Sessions by key, each accounted with the number of tokens that it may hold."""

    def __init__(self, max_sessions: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[SessionKey, DraftSession] = OrderedDict()
        self._tokens = 0

    def peek(self, key: SessionKey) -> DraftSession | None:
        """Return the session, or None, without counting a use."""
        return self._sessions.get(key)

    def admit(self, key: SessionKey, tokens: int, busy: Container[SessionKey]) -> DraftSession:
        """Return the session, new or not, with room for `tokens`; evict idle ones that are not `busy`.

        Raise Overloaded, having changed nothing, if that does not make room.
        """
        session = self._sessions.get(key)
        more_tokens = tokens - (session.room if session else 0)
        for victim in list(self._victims(key, session is None, more_tokens, busy)):
            self._tokens -= self._sessions.pop(victim).room
        if session is None:
            session = self._sessions[key] = DraftSession()
        self._sessions.move_to_end(key)
        session.room = tokens
        self._tokens += more_tokens
        return session

    def _victims(
        self, key: SessionKey, more_sessions: int, more_tokens: int, busy: Container[SessionKey]
    ) -> Iterator[SessionKey]:
        excess_sessions = len(self._sessions) + more_sessions - self._max_sessions
        excess_tokens = self._tokens + more_tokens - self._max_tokens
        for idle, session in self._sessions.items():
            if excess_sessions <= 0 and excess_tokens <= 0:
                return
            if idle != key and idle not in busy:
                yield idle
                excess_sessions -= 1
                excess_tokens -= session.room
        if excess_sessions > 0:
            raise Overloaded(f"all {self._max_sessions} sessions (--max-sessions) are busy", _RETRY_AFTER_S)
        if excess_tokens > 0:
            raise Overloaded(f"all {self._max_tokens} tokens (--max-kv-tokens) are in use", _RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class ProposeJob:
    """A validated request for at most `k` tokens; the last `ahead` tokens of the slice are not confirmed."""

    slice: Slice
    k: int
    strategy: str
    ahead: int = 0
    workload: str = ""


@dataclass(frozen=True, slots=True)
class Proposed:
    """Draft tokens for positions [position, position + len), after a prefix of this hash."""

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...]
    kv_len: int


# An error concerns its own request only.
ProposeOutcome: TypeAlias = "Proposed | Miss | Superseded | GalleyError"


@dataclass(slots=True)
class Stepped:
    answers: dict[int, ProposeOutcome] = field(default_factory=dict)
    so_far: dict[int, Proposed] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """An open request; `hash` is that of the tokens before its proposal."""

    item: int
    strategy: str
    job: DraftJob
    hash: bytes
    proposal: Proposal

    @property
    def has_ended(self) -> bool:
        return self.proposal.done or self.proposal.error is not None

    @property
    def so_far(self) -> Proposed:
        position, k = self.job.slice.position, self.job.k
        tokens, survival = tuple(self.proposal.tokens[:k]), tuple(self.proposal.survival[:k])
        return Proposed(position, self.hash, tokens, survival, kv_len=position)


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a request; `sessions` is the mean number in its steps, weighted by time."""

    outcome: ProposeOutcome
    queue_ns: int
    compute_ns: int
    sessions: int = 1


class Drafter:
    """Keep the tokens of sessions and run strategies on them; used by one thread at a time."""

    def __init__(
        self, strategies: Mapping[str, Strategy], *, max_sessions: int, max_tokens: int, max_batch: int
    ) -> None:
        """Advance at most `max_batch` proposals a step."""
        # Tokens drafted for ended requests; those wasted were in no response.
        self.drafted = self.wasted = 0
        self.strategies = strategies
        self._max_batch = max_batch
        self._sessions = SessionTable(max_sessions, max_tokens)
        self._open: dict[int, _Open] = {}  # the oldest first
        self._open_by_session: dict[SessionKey, _Open] = {}

    def open(self, new: Mapping[int, ProposeJob], ended: Mapping[int, int]) -> Stepped:
        """Open the requests `new`, keyed by rising numbers, and start their proposals.

        `ended` maps each request that was cancelled, or got an early response, to its used tokens.
        """
        stepped = Stepped()
        for item, used in ended.items():
            if item in self._open:
                self._close(self._open[item], used)
        for item, job in new.items():
            self._admit(item, job, stepped)
        fresh = [self._open[item] for item in new if item in self._open]
        self._run(fresh, self._begin)
        self._conclude(fresh, stepped)
        return stepped

    def advance(self) -> Stepped:
        stepped, taking = Stepped(), list(islice(self._open.values(), self._max_batch))
        self._run(taking, self._advance)
        self._conclude(taking, stepped)
        return stepped

    def _admit(self, item: int, job: ProposeJob, stepped: Stepped) -> None:
        """Open the request and set the tokens of its session, or report why it cannot be opened."""
        sent = job.slice
        if (before := self._open_by_session.get(sent.key)) is not None:
            stepped.answers[before.item] = Superseded(before.job.slice.position, before.hash)
            self._close(before)
        session = self._sessions.peek(sent.key)
        known = look_up(session.tokens if session else (), sent.start, sent.tokens, sent.prefix_hash)
        if isinstance(known, Miss):
            stepped.answers[item] = known
            return
        # The target decides the last position alone.
        k = min(job.k, sent.max_position - sent.position - 1)
        try:
            session = self._sessions.admit(sent.key, sent.position + k, self._open_by_session)
        except GalleyError as overloaded:
            stepped.answers[item] = overloaded
            return
        session.tokens[sent.start :] = sent.tokens
        session.confirmed = sent.position - job.ahead
        own = DraftJob(sent, session, k, job.workload)
        one = _Open(item, job.strategy, own, prefix_hash(session.tokens), Proposal(own))
        self._open[item] = self._open_by_session[sent.key] = one

    def _run(self, group: Sequence[_Open], work: Callable[[Strategy, Sequence[_Open]], None]) -> None:
        """Run `work` by strategy; a failure concerns the requests of its strategy only."""
        by_strategy: dict[str, list[_Open]] = defaultdict(list)
        for one in group:
            by_strategy[one.strategy].append(one)
        for name, mine in by_strategy.items():
            try:
                work(self.strategies[name], mine)
            except Exception as error:  # noqa: BLE001  # a strategy is a plug-in: whatever it does stays here
                log_internal(error, strategy=name)
                for one in mine:
                    one.proposal.error = error if isinstance(error, GalleyError) else Broken(f"{name} failed")

    @staticmethod
    def _begin(strategy: Strategy, mine: Sequence[_Open]) -> None:
        for one, proposal in zip(mine, strategy.begin([one.job for one in mine]), strict=True):
            one.proposal = proposal

    @staticmethod
    def _advance(strategy: Strategy, mine: Sequence[_Open]) -> None:
        strategy.advance([one.proposal for one in mine])

    def _conclude(self, group: Sequence[_Open], stepped: Stepped) -> None:
        for one in group:
            if not one.has_ended:
                stepped.so_far[one.item] = one.so_far
                continue
            outcome = stepped.answers[one.item] = one.proposal.error or one.so_far
            self._close(one, len(outcome.draft_tokens) if isinstance(outcome, Proposed) else 0)

    def _close(self, one: _Open, used: int = 0) -> None:
        """Close the request; `used` of its tokens were in its response."""
        del self._open[one.item]
        if self._open_by_session.get(one.job.slice.key) is one:
            del self._open_by_session[one.job.slice.key]
        self.drafted += len(one.proposal.tokens)
        self.wasted += max(0, len(one.proposal.tokens) - used)
