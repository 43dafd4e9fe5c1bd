"""Errors of requests, in two families: the caller's fault and the server's.

`galley.common.wire.status` maps each type to a gRPC status; nothing else decides on codes.
"""

from __future__ import annotations

import math
from collections.abc import Sized


class GalleyError(Exception):
    """Base of the errors that have a gRPC status."""

    @property
    def public_message(self) -> str:
        return str(self)


class CallerFault(GalleyError):
    """The caller, its request or the load is at fault, not the server. Overloaded may be retried."""


class InvalidField(CallerFault):
    """A field of a request is out of bounds: INVALID_ARGUMENT with a BadRequest violation."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Unimplemented(CallerFault):
    """A field or call is part of the wire format but not served here: UNIMPLEMENTED."""

    def __init__(self, field: str, problem: str = "not implemented yet") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnknownSession(CallerFault):
    """No session of this id exists for this principal, or it has expired: NOT_FOUND."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session_id: no session {session_id!r}")


class Unauthenticated(CallerFault):
    """The call has no valid credentials: UNAUTHENTICATED. Never holds the presented credentials."""


class KeyReused(CallerFault):
    """An idempotency key was used again with another request body: ALREADY_EXISTS."""

    def __init__(self) -> None:
        super().__init__("idempotency_key: must be new, but was used with another request body")


class Fenced(CallerFault):
    """Another owner has claimed the session, so this one may no longer change it: FAILED_PRECONDITION."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} was claimed by another owner")


class NotFinished(CallerFault):
    """The call needs a finished session, and this one has not ended: FAILED_PRECONDITION."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} has not finished")


class OtherVersion(CallerFault):
    """The draft serves another version than the one that the call would replace: FAILED_PRECONDITION."""

    def __init__(self, served: str, replaces: str) -> None:
        super().__init__(f"the replica serves {served}, not {replaces}, which the load would replace")


class Overloaded(CallerFault):
    """No capacity, or none for this caller, is left, and nothing was done: RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, retry_after_s: float, reason: str = "") -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlinePassed(CallerFault):
    """The caller's deadline passed, or its request did not arrive in time: DEADLINE_EXCEEDED."""


class Cancelled(CallerFault):
    """The caller went away: CANCELLED."""


class ClientStalled(CallerFault):
    """The client did not read its stream for too long; the session can be resumed: UNAVAILABLE."""


class UnsupportedModel(CallerFault):
    """The engine does not serve this kind of model, or cannot get it; the message says why."""


class ServerFault(GalleyError):
    """The server failed; the request may be valid."""


class OutOfMemory(ServerFault):
    """A model and its KV pool do not fit into memory; the message names both and the remedy."""


class UnsafeCache(ServerFault):
    """Others could put code into the cache directory; the message names the directory and the remedy."""


class Unavailable(ServerFault):
    """A component is down or draining; the session can be resumed: UNAVAILABLE."""


class AuthenticationUnavailable(Unavailable):
    """The caller cannot be authenticated now, because the issuer's keys are out of reach."""


class StoreUnavailable(Unavailable):
    """The session store did not respond, or could not serve now. `why` names servers, for the log only."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self._what = what

    @property
    def public_message(self) -> str:
        return self._what


class TargetUnavailable(Unavailable):
    """No target replica has responded within target_timeout."""


class GrammarsUnavailable(Unavailable):
    """No target decodes by grammars of this kind; those of earlier versions do not."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"structured_output.{kind}: no target decodes by it; earlier versions do not")


class LogLost(ServerFault):
    """The token log no longer agrees with what the client has seen: DATA_LOSS."""


class Broken(ServerFault):
    """An invariant does not hold: INTERNAL."""


class TokenizerMismatch(ServerFault):
    """Two replicas do not share a tokenizer: FAILED_PRECONDITION, with both hashes."""

    def __init__(self, part_hash: str, target_hash: str, part: str = "draft") -> None:
        super().__init__(f"tokenizer: must be the target's ({target_hash}), got {part_hash} at the {part}")


def check_range(
    field: str,
    value: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Raise InvalidField unless `value` is finite, >= `least`, > `above` and <= `most`."""
    if math.isfinite(value) and least <= value <= most and value > above:
        return
    low, sign, opening = (least, ">=", "[") if math.isinf(above) else (above, ">", "(")
    bound = f"in {opening}{low:g}, {most:g}]"
    if math.isinf(most):
        bound = f"{sign} {low:g}"
    elif math.isinf(low):
        bound = f"<= {most:g}"
    finite = "" if math.isfinite(value) else "finite and "
    raise InvalidField(field, f"must be {finite}{bound}, got {value}")


def check_length(field: str, value: Sized, most: int, unit: str = "entries") -> None:
    """Raise InvalidField if `value` is longer than `most`."""
    if len(value) > most:
        raise InvalidField(field, f"must have at most {most} {unit}, got {len(value)}")
