"""The inputs (events) and outputs (effects) of the session machine, and the ports of the gateway behind them.

A request to a replica carries a `request_id`, which its responses echo; a response to a request that was
given up is dropped. A Verify stays open until its response without `more`; ExtendVerify adds to it, and
CancelVerify ends it. All times are nanoseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, TypeAlias

from galley.core.answer.answer import Answer, Ending, SessionSpec
from galley.core.errors import GalleyError
from galley.core.hints import Hint
from galley.core.names import NO_STRATEGY
from galley.core.records import PositionLogprobs, TokenRecord
from galley.core.store import LogHashes
from galley.core.trees import CHAIN, Parents
from galley.core.values import value


class Pool(enum.Enum):
    DRAFT = "draft"
    TARGET = "target"


@value
class Timing:
    """Times as the replica measured them; `linger_ns` is the part of `queue_ns` spent waiting for a hint."""

    queue_ns: int = 0
    compute_ns: int = 0
    linger_ns: int = 0


@dataclass(frozen=True, slots=True)
class Proposed:
    """Draft tokens from `position` on: a chain, or a tree of these `parents` (`galley/core/trees.py`).

    `survival[i]` is the estimated chance that token i and all before it on its path are accepted; empty if
    unknown. `sessions` is the mean number of sessions in the draft's steps. `max_tokens` is the most draft
    tokens that the replica returns for a request; None: no limit. `strategy` says what proposed the tokens;
    empty if unknown. `sources` names what proposed each of them; empty: the strategy. `used_features`: the
    draft read the target's state of the token before the last confirmed one.
    """

    request_id: int
    position: int
    prefix_hash: bytes
    tokens: tuple[int, ...]
    cache_len: int
    timing: Timing = field(default_factory=Timing)
    survival: tuple[float, ...] = ()
    sessions: int = 1
    max_tokens: int | None = None
    strategy: str = ""
    sources: tuple[str, ...] = ()
    parents: Parents = CHAIN
    used_features: bool = False


@value
class Verified:
    """A verdict of the target: `accepted` draft tokens, then at most one token of its own.

    With `more`, further verdicts follow. `sessions` is the number of sessions in the step; `fingerprint`
    names the target build; `cache_len` is `kv_len` of `galley.core.scheduler.messages.Confirmed`, which
    explains the rest. `trees` is False if the target was sent chains, the main paths of trees.
    """

    request_id: int
    position: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    cache_len: int
    fingerprint: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    timing: Timing = field(default_factory=Timing)
    more: bool = False
    sessions: int = 1
    row_ns: int = 0
    prefill_ns: int = 0
    plain_ns: int = 0
    kv_reused: int = 0
    batch_span: bytes = b""
    trees: bool = True


@dataclass(frozen=True, slots=True)
class CacheMissed:
    """The replica lacks the prefix that the request named; it has `have` tokens with this hash."""

    request_id: int
    have: int
    prefix_hash: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed: no response in time, no connection, or an error status.

    If `retryable`, the same replica may serve it later. With `elsewhere`, it can be repeated at once, at a
    replica that has not failed this session. If `late`, the replica was silent: it has failed since it got
    the request, not just now. A `refusal` is the error of the session's caller, or of the gateway: no replica
    could serve it. Of a draft, it only says that this one takes no such session.
    """

    request_id: int
    message: str
    retryable: bool = True
    elsewhere: bool = False
    late: bool = False
    refusal: GalleyError | None = None


@value
class Committed:
    """The log holds the first `length` tokens of the session."""

    length: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store refused (Fenced, UnknownSession, LogLost) or was away for too long (StoreUnavailable)."""

    error: GalleyError


@dataclass(frozen=True, slots=True)
class FinishStored: ...


@value
class Sent:
    """The client's transport has taken all output tokens below `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class TimerFired: ...


@dataclass(frozen=True, slots=True)
class Draining:
    """The gateway is shutting down: end after this round; the session can be resumed."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The client went away, or its deadline passed."""

    error: GalleyError


@dataclass(frozen=True, slots=True)
class Aborted:
    """The session was aborted, and the store has recorded it."""


Event: TypeAlias = (
    "Proposed | Verified | CacheMissed | Failed | Committed | StoreFailed | FinishStored | Sent | TimerFired"
    " | Draining | Interrupted | Aborted"
)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + len(tokens)) after a prefix of hash `prefix_hash`."""

    start: int
    tokens: tuple[int, ...]
    prefix_hash: bytes

    @classmethod
    def after(cls, answer: Answer, cache_len: int) -> Self:
        """Return what a cache that holds `cache_len` tokens of the answer lacks: at least the last token."""
        start = min(cache_len, len(answer.tokens) - 1)
        is_prompt = start == 0 and answer.output_len == 0  # which need not be copied
        tokens = answer.spec.prompt if is_prompt else tuple(answer.tokens[start:])
        return cls(start, tokens, answer.prefix_hash(start))


@dataclass(frozen=True, slots=True)
class Propose:
    """Request up to `k` tokens from the draft, at most `width` of them for one position.

    The last `ahead` tokens of the slice are not confirmed yet.
    """

    request_id: int
    slice: Slice
    k: int
    strategy: str
    ahead: int = 0
    width: int = 1


@dataclass(frozen=True, slots=True)
class Verify:
    """Have the target verify `draft_tokens`, then decode `credit` tokens more without a new request.

    With `hint_due`, a hint for it is being drafted. `max_verified` bounds the draft tokens of a step; 0: as
    many as pay. `is_drafting`: a draft works for the session, or caches it.
    """

    request_id: int
    slice: Slice
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...] = ()
    credit: int = 0
    hint_due: bool = False
    max_verified: int = 0
    parents: Parents = CHAIN
    is_drafting: bool = False


@value
class ExtendVerify:
    """Add to an open Verify: tokens may be confirmed below `limit`, and `hint` replaces the one before.

    With `hint_due`, another hint is being drafted for what follows the last verdict, or will be once `hint`
    has its verdict.
    """

    request_id: int
    limit: int
    hint: Hint | None
    hint_due: bool


@dataclass(frozen=True, slots=True)
class CancelPropose:
    """Give up a pending Propose: it continues from a wrong token, or is not needed."""

    request_id: int


@dataclass(frozen=True, slots=True)
class CancelVerify:
    """Give up an open Verify; what it still confirms is dropped."""

    request_id: int


@value
class Commit:
    """Append `tokens` to a log of `expected_len`; the cache lengths go to the KV directory."""

    expected_len: int
    tokens: tuple[int, ...]
    records: tuple[TokenRecord, ...]
    hashes: LogHashes
    draft_cache_len: int = 0
    target_cache_len: int = 0


@value
class Emit:
    """Send the client output tokens [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoreFinish:
    ending: Ending
    log_len: int
    log_hash: bytes


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired at this time."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """End the stream: with an ending, or with an error after which the session may be resumed."""

    ending: Ending | None = None
    error: GalleyError | None = None


Overlap = Literal["hit", "miss", "none"]
"""Draft tokens were ready when the round began, were still being drafted, or were neither."""


@value
class SourceTokens:
    """Draft tokens of one source: sent to the target, verified and accepted."""

    source: str
    drafted: int
    verified: int
    accepted: int


@value
class VerifiedTree:
    """The draft tokens of a verdict, where several were candidates for a position.

    `depth` is the length of its longest path. The counts are of nodes, by rank among their siblings.
    """

    depth: int
    verified_by_rank: tuple[int, ...]
    accepted_by_rank: tuple[int, ...]


@value
class RoundEnded:
    """One finished round, for telemetry.

    `accepted` counts the draft tokens of the `verdict` among the `confirmed` tokens. `drafted` counts the
    draft tokens sent to the target in this round. `draft_wait_ns` is the time from its start to its last
    proposal, 0 without one; with credit it overlaps `verify_wait_ns`. `exposed_draft_ns` is how long the
    draft held up the target. `orchestration_ns` is what neither replica accounts for: without credit the
    round less their computing, with credit the wait for the verdict less the target's queueing and computing.
    `k` is the last number of tokens requested. `strategy` is what proposed draft tokens last ("none" without
    any); `sources` divides them by what proposed each. `tree` is None for a chain.
    With `reads_prompt`, the target read more than the session's last token before this verdict.
    `undrafted` counts tokens that the target verified besides those of the `verdict`, though nothing had
    drafted them.
    """

    verdict: Verified
    started_ns: int
    ended_ns: int
    drafted: int
    accepted: int
    confirmed: int
    draft_wait_ns: int
    exposed_draft_ns: int
    verify_wait_ns: int
    orchestration_ns: int
    draft: Timing
    k: int = 0
    strategy: str = NO_STRATEGY
    overlap: Overlap = "none"
    reads_prompt: bool = False
    sources: tuple[SourceTokens, ...] = ()
    tree: VerifiedTree | None = None
    undrafted: int = 0

    @property
    def wasted_rows(self) -> int:
        """Return how many rows the target computed without confirming a token."""
        return self.verdict.verified + self.undrafted + 1 - self.confirmed

    @property
    def depth(self) -> int:
        """Return the number of positions for which draft tokens were verified."""
        return self.verdict.verified if self.tree is None else self.tree.depth

    @property
    def parts(self) -> RoundParts:
        """Return the parts of the round's time, which sum to it."""
        target = self.verdict.timing
        queue_ns = max(0, target.queue_ns - target.linger_ns)
        duration_ns = max(0, self.ended_ns - self.started_ns)
        return RoundParts.within(duration_ns, self.exposed_draft_ns, queue_ns, target.compute_ns)


@value
class RoundParts:
    """The time of a round: waiting for the draft (or lingering), queueing, computing and the rest.

    With credit, a step may begin before the round does; that time does not count.
    """

    draft_ns: int
    queue_ns: int
    compute_ns: int
    wire_ns: int

    @classmethod
    def within(cls, duration_ns: int, draft_ns: int, queue_ns: int, compute_ns: int) -> RoundParts:
        """Return the parts, cut to what the others leave of the duration; the rest is `wire_ns`."""
        compute_ns = min(compute_ns, duration_ns)
        draft_ns = min(draft_ns, duration_ns - compute_ns)
        queue_ns = min(queue_ns, duration_ns - compute_ns - draft_ns)
        return cls(draft_ns, queue_ns, compute_ns, duration_ns - compute_ns - draft_ns - queue_ns)


Effect: TypeAlias = (
    "Propose | CancelPropose | Verify | ExtendVerify | CancelVerify | Commit | Emit | StoreFinish | SetTimer"
    " | RoundEnded | End"
)


@dataclass(frozen=True, slots=True)
class Replica:
    address: str
    incarnation: str


class Clock(Protocol):
    def now_ns(self) -> int: ...


class DraftPort(Protocol):
    """The draft of a session. Raises only CancelledError; failures are returned as Failed."""

    @property
    def replica(self) -> Replica | None:
        """Return the replica that responds, for the KV directory; None if there is none."""

    async def propose(
        self, spec: SessionSpec, request: Propose, remaining_ns: int | None
    ) -> Proposed | CacheMissed | Failed:
        """Request draft tokens; the response is useless after `remaining_ns` (None: never)."""


VerifyEvent: TypeAlias = "Verified | CacheMissed | Failed"
ReportResults: TypeAlias = Callable[[Sequence[VerifyEvent]], None]


class Verification(Protocol):
    """One open Verify at a target.

    Its results are reported in order, several at once if they have arrived together, with `more` set on all
    but the last; a CacheMissed or Failed also ends them. None is reported before `verify` has returned.
    """

    @property
    def replica(self) -> Replica | None:
        """Return the replica that responds, also after the end; None if there is none."""

    def extend(self, request: ExtendVerify) -> None:
        """Send more of the request, without blocking, also before it was sent; ignored after its end."""

    def expire(self) -> bool:
        """Close the request, which has no response in time; return True if another replica can serve it."""

    def close(self) -> None:
        """Give the request up, unless it has ended; nothing is reported afterwards."""


class TargetPort(Protocol):
    def verify(
        self, spec: SessionSpec, request: Verify, remaining_ns: int | None, report: ReportResults
    ) -> Verification:
        """Open a Verify at once; its results are useless after `remaining_ns` (None: never)."""
