"""The session store as the core sees it: a token log that two owners can never both extend.

1. A session has one owner at a time, named by an epoch and a random nonce. Every change names its owner and
   is refused once another has claimed the session.
2. The log holds prompt and output tokens. A commit names the length at which it appends, so repeating a
   commit whose response was lost changes nothing.
3. Log, metadata and state of a session change in one step or not at all.
4. Sessions expire: a live one unless its owner renews it, a finished one some time after its end.

Any method may raise `StoreUnavailable`: the call was tried once, may or may not have taken effect, and can be
repeated as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from galley.core.errors import Fenced, LogLost, Unavailable

State = Literal["live", "finished"]

SESSION_TTL_S = 3600.0
FINISHED_TTL_S = 900.0
"""Default times to live of a live session after its last commit or renewal, and of a finished one."""

LARGEST_CLOCK_STEP_S = 86_400.0
"""A step of the store's clock, forwards, after which it still knows that it aborted a session."""


class SessionEnded(Fenced):
    """The caller owns the session, but it has ended for good: nothing can be added."""


class ClaimLost(Unavailable):
    """The store restarted after a crash without this owner's claim. Claim it again to continue.

    No other owner needs to have claimed the session, so this is not Fenced.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the session store has lost the owner of session {session_id!r}; resume it")


class LogBehind(LogLost):
    """The log holds only the first `have` of the owner's tokens, fewer than the commit assumed.

    A store that restarts after a crash may lose its last writes. The owner commits again from `have`.
    """

    def __init__(self, session_id: str, have: int) -> None:
        super().__init__(f"the log of session {session_id!r} holds only {have} tokens")
        self.have = have


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to be created. `fields` is the stored request, opaque to the store."""

    session_id: str
    principal: str
    body_hash: bytes
    fields: Mapping[str, bytes]
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right to change a session until the next claim. `epoch` counts claims from 1."""

    session_id: str
    epoch: int
    nonce: bytes


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
    """A session as its new owner reads it.

    `tokens` is prompt and output; `meta` is what the commits appended (`galley.core.records`). `finish` is
    the opaque record of its end. `created_ms` is the store's Unix time.
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


class SessionStore(Protocol):
    """The operations of a session store; the module states their rules. Lengths include the prompt.

    `nonce` (None: a random one) names an attempt to own a session, so a repeat does not fence off the first.
    """

    async def ping(self) -> None:
        """Raise StoreUnavailable unless the store answers."""

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        """Create the session and own it; if it exists, claim it. Raise KeyReused for another body."""

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        """Own the session, and fence off its owner. Raise UnknownSession, also for another principal's."""

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        """Append `tokens` and `meta` to a log of `expected_len` tokens; return its new length.

        Raises Fenced, ClaimLost, SessionEnded, UnknownSession (expired), LogBehind (can be repaired) or
        LogLost.
        """

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:
        """End a session whose log has `expected_len` tokens. Raises as `commit` does; can be repeated."""

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        """Create again, for its owner, a session that the store has lost, with only its prompt in the log.

        Raises Fenced, ClaimLost, SessionEnded or LogLost if it exists and is not the owner's. Raises
        SessionEnded if it was aborted. The caller must know that it was lost, and has not expired.
        """

    async def renew(self, owner: Ownership) -> None:
        """Postpone the expiry. Raises Fenced, ClaimLost, SessionEnded or UnknownSession."""

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        """End a session for good, whoever owns it; do nothing if it has ended. Raises UnknownSession."""

    async def close(self) -> None: ...
