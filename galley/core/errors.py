"""What can go wrong, in two families: the caller's fault and ours.

`galley.common.wire.status` maps each type to a gRPC status in one place; nothing else decides on codes.
"""

from __future__ import annotations


class GalleyError(Exception):
    """Base of everything that Galley raises on purpose."""

    @property
    def public_message(self) -> str:
        """What a caller may read of it."""
        return str(self)


class CallerFault(GalleyError):
    """The caller asked for something that cannot be; asking again will not help."""


class InvalidField(CallerFault):
    """A field of a request is out of its bounds: INVALID_ARGUMENT with a BadRequest violation."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Unimplemented(CallerFault):
    """A field is part of the wire but not served yet: UNIMPLEMENTED."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not implemented yet")
        self.field = field


class UnknownSession(CallerFault):
    """No session of this id: it never was, it expired, or it is another principal's: NOT_FOUND."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session_id: no session {session_id!r}")
        self.session_id = session_id


class Unauthenticated(CallerFault):
    """The call does not say who asks, or not credibly: UNAUTHENTICATED. Never holds what was presented."""


class KeyReused(CallerFault):
    """An idempotency key came back with another body: ALREADY_EXISTS."""

    def __init__(self) -> None:
        super().__init__("idempotency_key: was used with another request body")


class Fenced(CallerFault):
    """Another owner has claimed the session; this one may no longer change it: FAILED_PRECONDITION."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} was claimed by another owner")
        self.session_id = session_id


class Overloaded(CallerFault):
    """No room for more work; nothing was done: RESOURCE_EXHAUSTED with RetryInfo.

    `reason` is of what there was too much, in a word, where metrics tell it.
    """

    def __init__(self, what: str, retry_after_s: float, reason: str = "") -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlinePassed(CallerFault):
    """The caller's deadline passed: DEADLINE_EXCEEDED."""


class Cancelled(CallerFault):
    """The caller went away: CANCELLED."""


class ClientStalled(CallerFault):
    """The client has left its stream unread for too long; the session stays resumable: UNAVAILABLE."""


class ServerFault(GalleyError):
    """Something of ours failed."""


class Unavailable(ServerFault):
    """A part is away or draining; the session stays resumable: UNAVAILABLE."""


class AuthenticationUnavailable(Unavailable):
    """Who calls cannot be told at present: what would show it is away."""


class StoreUnavailable(Unavailable):
    """The session store has not answered for store_timeout.

    `why` is for the log alone: it names servers.
    """

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self._what = what

    @property
    def public_message(self) -> str:
        """Without the `why`."""
        return self._what


class TargetUnavailable(Unavailable):
    """No target replica has answered for target_timeout."""


class LogLost(ServerFault):
    """The log no longer agrees with what the client has seen: DATA_LOSS."""


class Broken(ServerFault):
    """An invariant does not hold: INTERNAL."""


class TokenizerMismatch(ServerFault):
    """Two parts do not share a tokenizer: FAILED_PRECONDITION, with both hashes."""

    def __init__(self, part_hash: str, target_hash: str, part: str = "draft") -> None:
        super().__init__(f"the {part}'s tokenizer {part_hash} is not the target's {target_hash}")
        self.part_hash = part_hash
        self.target_hash = target_hash
