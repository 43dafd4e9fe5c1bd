"""Results of audits, from the responses of gateways."""

from __future__ import annotations

from dataclasses import fields

from galley.core.audit import AuditCounts, AuditReport, Difference, Verdict
from galley.pb.galley.v1 import galley_pb2 as pb

__all__ = ["AuditCounts", "AuditReport", "Difference", "Verdict", "audit_counts", "audit_report"]

_VERDICTS = {
    pb.AuditResponse.VERDICT_SAME: Verdict.SAME,
    pb.AuditResponse.VERDICT_DIFFERS: Verdict.DIFFERS,
    pb.AuditResponse.VERDICT_DAMAGED: Verdict.DAMAGED,
}


def audit_report(session_id: str, response: pb.AuditResponse) -> AuditReport:
    """Return the report of a session. A verdict that this version does not know compares nothing."""
    return AuditReport(
        session_id=session_id,
        verdict=_VERDICTS.get(response.verdict, Verdict.NOT_COMPARED),
        output_tokens=response.output_tokens,
        compared=response.compared,
        differing=response.differing,
        differences=tuple(map(_difference, response.differences)),
        fingerprint=response.fingerprint,
        deterministic=response.deterministic,
    )


def audit_counts(response: pb.GetAuditCountsResponse) -> AuditCounts:
    return AuditCounts(**{one.name: getattr(response, one.name) for one in fields(AuditCounts)})


def _difference(one: pb.AuditDifference) -> Difference:
    return Difference(
        one.index,
        one.logged_token_id,
        one.computed_token_id,
        one.logged_logprob if one.HasField("logged_logprob") else None,
        one.computed_logprob if one.HasField("computed_logprob") else None,
    )
