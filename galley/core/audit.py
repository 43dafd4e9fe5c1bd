"""The result of an audit: the answer of a finished session, computed again and compared with its token log.

An answer is a function of target build, prompt, sampling parameters and seed. So a target of the same build
that reads the log's tokens as draft tokens, in other steps and beside other sessions, must draw each of them
again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

AUDIT_PRIORITY = -(2**31)
"""Priority of audits at targets, the lowest there is."""
MAX_DIFFERENCES = 16
"""Differences that a report names; more are only counted."""


class Verdict(enum.Enum):
    SAME = "same"
    DIFFERS = "differs"
    DAMAGED = "damaged"
    """The stored session does not agree with its hash."""
    NOT_COMPARED = "not_compared"
    """No token could be compared, because no target of its build is there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that was computed otherwise than the log has it; `index` counts output tokens from 0.

    The logprobs are those of both tokens in the model's own distribution, as computed now; None: unknown.
    """

    index: int
    logged: int
    computed: int
    logged_logprob: float | None = None
    computed_logprob: float | None = None


def difference_fields(one: Difference) -> dict[str, Any]:
    """Return a difference by the names that gRPC and HTTP have for its fields."""
    return {
        "index": one.index,
        "logged_token_id": one.logged,
        "computed_token_id": one.computed,
        "logged_logprob": one.logged_logprob,
        "computed_logprob": one.computed_logprob,
    }


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of one audit. Counts are of output tokens; `fingerprint` is the build that computed them."""

    session_id: str
    verdict: Verdict
    output_tokens: int = 0
    compared: int = 0
    differing: int = 0
    differences: tuple[Difference, ...] = ()
    fingerprint: str = ""
    deterministic: bool = False
    replica: str = ""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """The totals of all audits of a deployment.

    `tokens` and `differing` are of deterministic builds, where each difference is an incident; `loose_tokens`
    and `loose_differing` are of other builds. `damaged` counts sessions.
    """

    sessions: int = 0
    tokens: int = 0
    differing: int = 0
    loose_tokens: int = 0
    loose_differing: int = 0
    damaged: int = 0
