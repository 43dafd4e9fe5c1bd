"""The session store as the core sees it: a token log that two owners can never both extend.

1. A session has one owner at a time, named by an epoch and a random nonce. Every change names its owner and
   is refused once another has claimed the session.
2. A call becomes the owner only by compare-and-set: it names the owner that it has read, or that there was
   no session. It also names a latest time on the store's clock, after which it changes nothing: nobody owns
   a session by a call that its caller has given up.
3. The log holds prompt and output tokens. A commit names the length at which it appends, so repeating a
   commit whose response was lost changes nothing.
4. Each commit stores the hash of the whole log (`galley.core.content.prefix_hash`). Readers compare it with
   the log, and owners with their own.
5. Log, metadata and state of a session change in one step or not at all.
6. Sessions expire: a live one unless its owner renews it, a finished one some time after its end.

Any method may raise `StoreUnavailable`: the call was tried once, may or may not have taken effect, and can be
repeated as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from galley.core.content import HASH_BYTES
from galley.core.errors import Fenced, LogLost, Unavailable

State = Literal["live", "finished"]

SESSION_TTL_S = 3600.0
FINISHED_TTL_S = 900.0
"""Default times to live of a live session after its last commit or renewal, and of a finished one."""

LARGEST_CLOCK_STEP_S = 86_400.0
"""A step of the store's clock, forwards, after which it still knows that it aborted or deleted a session."""


class SessionEnded(Fenced):
    """The caller owns the session, but it has ended for good: nothing can be added."""


class ClaimLost(Unavailable):
    """The store restarted after a crash without this owner's claim. Claim it again to continue.

    No other owner needs to have claimed the session, so this is not Fenced.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the session store has lost the owner of session {session_id!r}; resume it")


class OwnerChanged(Unavailable):
    """Another call has claimed the session since the caller read it. Resume it to claim it again.

    Only a caller that still waits does so; the gateway does not repeat the claim on its behalf.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} was claimed by another call at the same time; resume it")


class LogBehind(LogLost):
    """The log holds only `have` tokens, with hash `log_hash`: fewer than the owner's commit assumed.

    A store that restarts after a crash may lose its last writes. The owner commits again from `have` if the
    hash is that of its own first tokens.
    """

    def __init__(self, session_id: str, have: int, log_hash: bytes) -> None:
        super().__init__(f"the log of session {session_id!r} holds only {have} tokens")
        self.have = have
        self.log_hash = log_hash


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to be created. `fields` is the stored request, opaque to the store."""

    session_id: str
    principal: str
    body_hash: bytes
    fields: Mapping[str, bytes]
    prompt: Sequence[int]

    @property
    def request_hash(self) -> bytes:
        return request_hash(self.principal, self.body_hash, len(self.prompt), self.fields)


def request_hash(principal: str, body_hash: bytes, prompt_len: int, fields: Mapping[str, bytes]) -> bytes:
    """Return the hash of all that is stored of a request besides its prompt."""
    named = [part for name in sorted(fields) for part in (name.encode(), fields[name])]
    hashed = blake2b(digest_size=HASH_BYTES, person=b"galley.request")
    for part in (principal.encode(), body_hash, b"%d" % prompt_len, *named):
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right to change a session until the next claim. `epoch` counts claims from 1."""

    session_id: str
    epoch: int
    nonce: bytes


class LogHashes(NamedTuple):
    """The hashes of a log before and after a commit."""

    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """The replica that caches a session, its incarnation, and its KV for positions [0, kv_len)."""

    replica: str
    incarnation: str
    kv_len: int


@dataclass(frozen=True, slots=True)
class KvDirectory:
    """The replicas that hold KV of a session. In a commit, None keeps the stored entry."""

    draft: CacheLocation | None = None
    target: CacheLocation | None = None


UNCHANGED = KvDirectory()


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it was read; `ownership` is that of its owner then.

    `tokens` is prompt and output; `meta` is what the commits appended (`galley.core.records`). `finish` is
    the opaque record of its end. `created_ms`, and `claimed_ms` of its owner, are the store's Unix times.
    `idle_ms` is how long ago a live session was last written; negative: unknown.
    """

    ownership: Ownership
    principal: str
    fields: Mapping[str, bytes]
    prompt_len: int
    tokens: list[int]
    meta: bytes = b""
    state: State = "live"
    finish: bytes = b""
    created_ms: int = 0
    claimed_ms: int = 0
    idle_ms: int = -1
    body_hash: bytes = b""
    directory: KvDirectory = field(default_factory=KvDirectory)

    def to_new_session(self) -> NewSession:
        """Return the session as it was before its first token."""
        return NewSession(
            self.ownership.session_id,
            self.principal,
            self.body_hash,
            self.fields,
            self.tokens[: self.prompt_len],
        )


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The token bucket of a principal: it fills with `per_s` tokens a second up to `burst`."""

    principal: str
    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A change of a bucket: return tokens, then take what a call needs, then lease up to `ahead` tokens.

    A negative `returned` is a charge. `needed` is None if no call waits; a refused call leases nothing.
    """

    returned: int
    needed: int | None
    ahead: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`level` is what the bucket holds after the exchange."""

    granted: bool
    leased: int
    level: float


class SessionStore(Protocol):
    """The operations of a session store; the module states their rules. Lengths include the prompt.

    `nonce` names an attempt to own a session, so a repeat does not fence off the first. A call that arrives
    after `latest_ms` of the store's clock changes nothing and raises StoreUnavailable.
    """

    async def ping(self) -> None:
        """Raise StoreUnavailable unless the store answers."""

    async def now_ms(self, session_id: str) -> int:
        """Return the time of the clock by which calls for this session are late, in ms."""

    async def read(self, session_id: str, principal: str) -> StoredSession:
        """Return the session and change nothing.

        Raise LogLost, or UnknownSession, also for another principal's.
        """

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        """Create the session and own it; if it exists, change nothing and return it as `read` does.

        An existing session has the nonce of its owner. Raise KeyReused if its body is another, or LogLost.
        """

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        """Own a session that `former` owned when it was read, and fence off `former`.

        Raise OwnerChanged, UnknownSession or LogLost; then nothing has changed, unless the log was damaged
        since it was read.
        """

    def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory = UNCHANGED,
    ) -> Awaitable[int]:
        """Append `tokens` and `meta` to a log of `expected_len` tokens; return its new length.

        `hashes` are those of the log as the owner knows it. The call itself raises nothing.

        Raises Fenced, ClaimLost, SessionEnded, UnknownSession (expired), LogBehind (can be repaired) or
        LogLost.
        """

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes, log_hash: bytes) -> None:
        """End a session whose log has `expected_len` tokens. Raises as `commit` does; can be repeated."""

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        """Create again, for its owner, a session that the store has lost, with only its prompt in the log.

        Raises Fenced, ClaimLost, SessionEnded or LogLost if it exists and is not the owner's. Raises
        SessionEnded if it was aborted or deleted. The caller must know that it was lost, and has not expired.
        """

    async def renew(self, owner: Ownership) -> None:
        """Postpone the expiry. Raises Fenced, ClaimLost, SessionEnded or UnknownSession."""

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        """End a session for good, whoever owns it; do nothing if it has ended. Raises UnknownSession."""

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        """Remove a session for good, whoever owns it. Raises UnknownSession; can be repeated."""

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        """Change a token bucket (`galley.core.admission.budget`); one that does not exist is full."""

    async def close(self) -> None: ...
