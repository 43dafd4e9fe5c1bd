"""The session store as the core sees it: a token log that two owners can never both extend.

Rules. A session has one owner at a time, named by an epoch and a random nonce. Every change names its owner
and is refused once another has claimed the session. The log holds prompt and output tokens; a commit says at
which length it appends, so that a repeat of a commit whose answer was lost changes nothing. What a session
must not lose (log, meta, state) changes in one step or not at all. Sessions expire: a live one unless its
owner renews it, a finished one some time after its end.

Any method may raise `StoreUnavailable`: the call was tried once, may or may not have taken effect, and can
be repeated as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from galley.core.errors import Fenced, LogLost, Unavailable

State = Literal["live", "finished"]

SESSION_TTL_S = 3600.0
FINISHED_TTL_S = 900.0
"""How long sessions outlast their owner's last sign of life, and their end, where nothing else is said."""


class SessionEnded(Fenced):
    """The caller owns the session, and it was ended for good: nothing can be added to it."""


class ClaimLost(Unavailable):
    """The store knows an earlier owner only: it came back from a crash without this one's claim.

    Nobody need have claimed the session since, so this is no fencing. Whoever wants it claims it again.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the session store has lost who owns session {session_id!r}; resume it")


class LogBehind(LogLost):
    """The log holds `have` tokens, not as many as the commit assumed; they agree with the owner's own.

    It happens when a store comes back from a crash without its last moments. The owner repairs it by
    committing again from `have`.
    """

    def __init__(self, session_id: str, have: int) -> None:
        super().__init__(f"the log of session {session_id!r} holds {have} tokens only")
        self.have = have


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to be made. `fields` is the request as stored, opaque here; its names are the caller's."""

    session_id: str
    principal: str
    body_hash: bytes
    fields: Mapping[str, bytes]
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right to change a session, until the next claim. `epoch` counts claims from 1."""

    session_id: str
    epoch: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """Where a pool caches the session: the replica, which of its lives, and KV for positions [0, kv_len)."""

    replica: str
    incarnation: str
    kv_len: int


@dataclass(frozen=True, slots=True)
class KvDirectory:
    """Who holds KV of a session. In a commit, a pool that is None keeps the entry that it has."""

    draft: CacheLocation | None = None
    target: CacheLocation | None = None


UNCHANGED = KvDirectory()


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as its new owner finds it.

    `tokens` is prompt and output; `meta` what the commits appended (`galley.core.records`); `finish` the
    opaque record of its end, empty while `state` is "live"; `created_ms` the store's Unix time in
    milliseconds when the session was made.
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
        """As it was asked for."""
        return NewSession(
            self.ownership.session_id,
            self.principal,
            self.body_hash,
            self.fields,
            self.tokens[: self.prompt_len],
        )


class SessionStore(Protocol):
    """See the module's rules. Lengths count tokens of the whole log, prompt included.

    `nonce`, where given, names one attempt to own: a repeated call with the same one finds itself already
    the owner instead of fencing off its first, unanswered try.
    """

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        """Make the session and own it; if it exists with the same body, claim it.

        Raises KeyReused if it exists with another body.
        """
        ...

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        """Own the session; whoever did is fenced off. Raises UnknownSession (also if it is another's)."""
        ...

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        """Append `tokens` and `meta` to a log of `expected_len` tokens; returns its length thereafter.

        Raises Fenced, ClaimLost, SessionEnded, UnknownSession (expired), LogBehind (can be repaired) or
        LogLost.
        """
        ...

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:
        """End a session whose log has `expected_len` tokens. Raises as `commit` does; repeatable."""
        ...

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        """Make anew, for its owner, a session that the store has lost: with its prompt alone in the log.

        Nothing if it is there and the owner's. Raises Fenced, ClaimLost, SessionEnded or LogLost where it is
        there and is not. Whether it was lost, and has not just expired, is the owner's to know.
        """
        ...

    async def renew(self, owner: Ownership) -> None:
        """Put off the expiry. Raises Fenced, ClaimLost, SessionEnded or UnknownSession."""
        ...

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        """End a session for good, whoever owns it; nothing if it has ended already. Raises UnknownSession."""
        ...

    async def close(self) -> None:
        """Let go of connections, after the calls under way."""
        ...
