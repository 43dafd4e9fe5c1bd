"""`galley audit` against a scripted gateway over real gRPC."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from galley.core.audit import AuditCounts
from galley.core.errors import UnknownSession
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SESSION, FakeGateway
from tests.integration.galley.cli.test_commands import ask, own_state

__all__ = ["own_state"]

SAME = pb.AuditResponse.VERDICT_SAME
DIFFERS = pb.AuditResponse.VERDICT_DIFFERS


def differing(*, deterministic: bool, count: int = 1) -> pb.AuditResponse:
    first = pb.AuditDifference(
        index=17, logged_token_id=311, computed_token_id=415, logged_logprob=-0.6931, computed_logprob=-0.7
    )
    return pb.AuditResponse(
        verdict=DIFFERS,
        output_tokens=128,
        compared=128,
        differing=count,
        differences=[first],
        fingerprint="build-1",
        deterministic=deterministic,
    )


def test_the_same_tokens_are_said_to_be_the_same() -> None:
    gateway = FakeGateway()
    done = ask(gateway, "audit", SESSION)
    assert done.exit_code == 0
    assert done.stdout == (
        "same: a target computed 4 of 4 output tokens again, and each is that of the token log\n"
        "build build-1, deterministic\n"
    )
    assert gateway.requests == [pb.AuditRequest(session_id=SESSION)]


def test_tokens_that_were_not_compared_are_said_to_be_left_out() -> None:
    audit = pb.AuditResponse(verdict=SAME, output_tokens=2000, compared=800)
    done = ask(FakeGateway(audit=audit), "audit", SESSION)
    assert done.exit_code == 0
    assert "computed 800 of 2,000 output tokens again" in done.stdout
    assert done.stdout.endswith(
        "; the other 1,200 were not compared (of other builds, or the target failed)\n"
    )


def test_a_difference_is_shown_with_both_logprobs_and_the_build() -> None:
    done = ask(FakeGateway(audit=differing(deterministic=True, count=3)), "audit", SESSION)
    assert done.exit_code == 1
    verdict, headings, row, more, build = done.stdout.splitlines()
    assert verdict.startswith(
        "differs: a target computed 128 of 128 output tokens again, and 3 are not those"
    )
    assert headings.split() == ["index", "logged", "token", "logprob", "computed", "token", "logprob"]
    assert row.split() == ["17", "311", "-0.6931", "415", "-0.7000"]
    assert more == "and 2 more"
    assert build.startswith("build build-1, deterministic: each difference is an incident (docs/runbooks/")


def test_a_difference_of_another_build_is_no_incident() -> None:
    done = ask(FakeGateway(audit=differing(deterministic=False)), "audit", SESSION)
    assert done.exit_code == 1
    assert "build build-1, not deterministic: its tokens may depend on the batch" in done.stdout
    assert "incident" not in done.stdout


def test_an_unknown_logprob_is_said_to_be_unknown() -> None:
    audit = differing(deterministic=True)
    audit.differences[0].ClearField("computed_logprob")
    row = ask(FakeGateway(audit=audit), "audit", SESSION).stdout.splitlines()[2]
    assert row.split() == ["17", "311", "-0.6931", "415", "unknown"]


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (pb.AuditResponse.VERDICT_DAMAGED, "damaged: the stored session does not agree with its hash"),
        (pb.AuditResponse.VERDICT_NOT_COMPARED, "not compared: no target is up that has the build"),
    ],
)
def test_a_session_that_could_not_be_compared_is_a_failure(
    verdict: pb.AuditResponse.Verdict.ValueType, said: str
) -> None:
    done = ask(FakeGateway(audit=pb.AuditResponse(verdict=verdict)), "audit", SESSION)
    assert done.exit_code == 1
    assert done.stdout.startswith(said)


def test_json_of_a_report() -> None:
    done = ask(FakeGateway(audit=differing(deterministic=True)), "audit", SESSION, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert (report["session_id"], report["verdict"]) == (SESSION, "differs")
    assert report["differences"][0]["index"] == 17
    assert report["fingerprint"] == "build-1"


def test_an_unknown_session_is_a_failure_in_one_line() -> None:
    done = ask(FakeGateway(error=UnknownSession("nobody")), "audit", "nobody")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "no session 'nobody'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_totals_without_a_session() -> None:
    counts = AuditCounts(sessions=1200, tokens=1_204_331, differing=0, damaged=1)
    gateway = FakeGateway(audit_counts=pb.GetAuditCountsResponse(**asdict(counts)))
    done = ask(gateway, "audit")
    assert done.exit_code == 0
    assert done.stdout == (
        "audited sessions: 1,200, damaged in the store: 1\n"
        "deterministic builds: 0 of 1,204,331 tokens differ\n"
    )
    assert json.loads(ask(gateway, "audit", "--json").stdout) == asdict(counts)
    gateway.audit_counts.loose_tokens, gateway.audit_counts.loose_differing = 5000, 2
    assert ask(gateway, "audit").stdout.endswith("other builds: 2 of 5,000 tokens differ\n")


def test_no_audit_yet() -> None:
    assert ask(FakeGateway(), "audit").stdout == "no session was audited yet\n"
