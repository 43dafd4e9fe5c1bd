"""What the session machine is told (events) and what it asks for (effects).

Requests to a pool carry a `request_id`; their replies echo it, and a reply to a request that has been given
up is dropped. A Verify stands until its answer without `more`: it may be told more by ExtendVerify, and
given up by CancelVerify. All times are nanoseconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from galley.core.answer.answer import Answer, Chunk, Ending, NumericsChanged
from galley.core.errors import GalleyError
from galley.core.hints import Hint
from galley.core.names import NO_STRATEGY
from galley.core.records import PositionLogprobs, TokenRecord


class Pool(enum.Enum):
    """Where a request goes."""

    DRAFT = "draft"
    TARGET = "target"


# --------------------------------------------------------------------------------------- events --


@dataclass(frozen=True, slots=True)
class Timing:
    """As the replica measured it; `linger_ns`, of `queue_ns`, is how long a target waited for a hint."""

    queue_ns: int = 0
    compute_ns: int = 0
    linger_ns: int = 0


@dataclass(frozen=True, slots=True)
class Proposed:
    """The draft's guesses for positions [position, position + len(tokens)).

    `survival`, of each: the chance that it and all before it are accepted; empty if the draft does not say.
    `sessions` shared the draft's steps. `most` is what it was asked for, where it takes no more. `strategy`
    is how they were guessed; empty if that is not known.
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


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's verdict: `accepted` draft tokens, then at most one token of its own.

    With `more`, further verdicts of the same request follow. `sessions` shared the pass, of which the rows of
    prompts took `prefill_ns`; a draft token more adds `row_ns` to one. The others are as in
    `galley.core.scheduler.messages.Confirmed`.
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
    batch_rows: int = 0
    kv_reused: int = 0
    batch_span: bytes = b""


@dataclass(frozen=True, slots=True)
class CacheMissed:
    """The replica holds `have` tokens of this hash, and not the prefix that the request named."""

    request_id: int
    have: int
    prefix_hash: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A request came to nothing: no reply in time, no connection, or a status of its own.

    `elsewhere`: another replica, which has not failed the session, can be asked at once.
    """

    request_id: int
    message: str
    retryable: bool = True
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The log now holds the first `length` tokens of the session."""

    length: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store refused (Fenced, UnknownSession, LogLost) or was away for too long (StoreUnavailable)."""

    error: GalleyError


@dataclass(frozen=True, slots=True)
class FinishStored:
    """The store knows that the session has ended."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The client's transport took all output tokens below `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time asked for by SetTimer has come."""


@dataclass(frozen=True, slots=True)
class Draining:
    """This gateway is going down: end at the next round boundary; the session stays resumable."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The client went away, or its deadline passed."""

    error: GalleyError


@dataclass(frozen=True, slots=True)
class Aborted:
    """The session was ended for good, and the store knows."""


Event = (
    Proposed
    | Verified
    | CacheMissed
    | Failed
    | Committed
    | StoreFailed
    | FinishStored
    | Sent
    | TimerFired
    | Draining
    | Interrupted
    | Aborted
)

# -------------------------------------------------------------------------------------- effects --


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
        return cls(start, tuple(answer.tokens[start:]), answer.prefix_hash(start))


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the draft for up to `k` tokens; the last `ahead` of the slice are guesses that it goes on from."""

    request_id: int
    slice: Slice
    k: int
    strategy: str
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the target to check `draft_tokens`, then to go on unasked for `credit` tokens.

    With `hint_due`, a hint for this request is being drafted. At most `max_verified` draft tokens are
    verified in a pass; 0 is as many as pay.
    """

    request_id: int
    slice: Slice
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...] = ()
    credit: int = 0
    hint_due: bool = False
    max_verified: int = 0


@dataclass(frozen=True, slots=True)
class ExtendVerify:
    """Tell the target more of a Verify that stands.

    It may confirm tokens at positions below `limit`; `hint` replaces the one before; `hint_due` says whether
    one is being drafted for what follows the last verdict, or will be as soon as `hint` has its verdict.
    """

    request_id: int
    limit: int
    hint: Hint | None
    hint_due: bool


@dataclass(frozen=True, slots=True)
class CancelPropose:
    """Give up a Propose that is under way: what it goes on from has turned out wrong, or is not needed."""

    request_id: int


@dataclass(frozen=True, slots=True)
class CancelVerify:
    """Give up a Verify that stands; what it still confirms is dropped."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Append `tokens` to a log of `expected_len`; what the pools cache goes to the KV directory."""

    expected_len: int
    tokens: tuple[int, ...]
    records: tuple[TokenRecord, ...]
    draft_cache_len: int = 0
    target_cache_len: int = 0


@dataclass(frozen=True, slots=True)
class Emit:
    """Send to the client; the log holds it."""

    items: tuple[Chunk | NumericsChanged, ...]


@dataclass(frozen=True, slots=True)
class StoreFinish:
    """Mark the session as ended, at `log_len` tokens."""

    ending: Ending
    log_len: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Tell the machine when this time has come."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """The stream is over: with an ending, or with an error after which the session may be resumable."""

    ending: Ending | None = None
    error: GalleyError | None = None


Overlap = Literal["hit", "miss", "none"]
"""Draft tokens were ready; they were still being drafted; none were wanted or to be had."""


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """For telemetry: one round, from its first request to its verdict; under credit, from verdict to verdict.

    `drafted` counts the draft tokens that the target was sent in this round. `verify_wait_ns` is how long the
    verdict was awaited. `draft_wait_ns` is how long into the round its last proposal came: without credit the
    target is asked only then; with it, it may have waited so long, and the two waits overlap.
    `exposed_draft_ns` is how long the target was held up: the wait for a proposal, or its lingering.
    `orchestration_ns` is what neither of the two accounts for: without credit the round less their computing,
    with it the wait for the verdict less the target's queueing and computing.

    `k` is how many tokens the draft was last asked for, 0 if none were wanted; `strategy` guessed those that
    were sent ("none" if none were). `overlap` says whether draft tokens were ready when the round began.
    `plain_ns`, `prefill_ns`, `kv_reused`, `batch_span` and `batch_sessions` are the verdict's. With
    `reads_prompt`, the target read more than the last token of the session before it came to this verdict.
    """

    position: int
    started_ns: int
    ended_ns: int
    drafted: int
    verified: int
    accepted: int
    confirmed: int
    draft_wait_ns: int
    exposed_draft_ns: int
    verify_wait_ns: int
    orchestration_ns: int
    draft: Timing
    target: Timing
    k: int = 0
    strategy: str = NO_STRATEGY
    overlap: Overlap = "none"
    plain_ns: int = 0
    prefill_ns: int = 0
    kv_reused: int = 0
    batch_span: bytes = b""
    batch_sessions: int = 1
    reads_prompt: bool = False

    @property
    def parts(self) -> RoundParts:
        """What its time went into; the parts sum to it."""
        left = max(0, self.ended_ns - self.started_ns)
        compute_ns = min(self.target.compute_ns, left)
        left -= compute_ns
        draft_ns = min(self.exposed_draft_ns, left)
        left -= draft_ns
        queue_ns = min(max(0, self.target.queue_ns - self.target.linger_ns), left)
        return RoundParts(draft_ns, queue_ns, compute_ns, wire_ns=left - queue_ns)


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The time of a round: a draft was awaited, the target had it wait, computed, and all the rest.

    A target that lingers awaits a draft. What it did before the round began (under credit a pass may begin
    before the last verdict has arrived) is not of the round.
    """

    draft_ns: int
    queue_ns: int
    compute_ns: int
    wire_ns: int


Effect: TypeAlias = (
    "Propose | CancelPropose | Verify | ExtendVerify | CancelVerify | Commit | Emit | StoreFinish | SetTimer"
    " | RoundEnded | End"
)
