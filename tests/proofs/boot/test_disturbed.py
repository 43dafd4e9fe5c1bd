"""With TLS on every hop: roles are rolled under load, pods killed and stopped, and no stream notices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proofs.boot import verdict

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

Record = dict[str, Any]


def test_no_stream_fails_or_says_anything_else(disturbed: Record) -> None:
    assert len(disturbed["answers"]) > 20
    assert verdict.lost_or_other_answers(disturbed) == []
    assert verdict.failed_clients(disturbed) == []


def test_a_roll_cuts_no_call(disturbed: Record) -> None:
    assert verdict.cut_calls(disturbed) == []


def test_there_is_always_a_gateway_and_a_target(disturbed: Record) -> None:
    # A draft may be missing for a while (its GPU has no twin), and so may the one pod of the trial store.
    away = verdict.without_a_ready_pod({**disturbed, "events": _rolls(disturbed)})
    assert not {line.split()[0] for line in away} & {"galley-gateway", "galley-target"}


def test_pods_end_within_their_grace(disturbed: Record) -> None:
    assert verdict.cut_short(disturbed) == []
    assert verdict.bad_ends(disturbed) == []
    assert verdict.failed_hooks(disturbed) == []


def test_probes_tell_of_killed_and_stopped_pods(disturbed: Record) -> None:
    faults = [event for event in disturbed["events"] if event["what"] == "fault"]
    assert {event["signal"] for event in faults} == {"SIGKILL", "SIGSTOP", "SIGCONT"}
    assert verdict.untold_faults(disturbed) == []
    assert verdict.needless_restarts(disturbed) == []


def test_the_policies_fit_the_connections(disturbed: Record) -> None:
    assert verdict.forbidden_attempts(disturbed) == []
    assert verdict.uncovered_connections(disturbed) == []
    assert verdict.idle_openings(disturbed) == []
    assert verdict.wrong_doors(disturbed) == []


def _rolls(record: Record) -> list[dict[str, Any]]:
    """What happened until the first fault."""
    events: list[dict[str, Any]] = record["events"]
    first = next((number for number, event in enumerate(events) if event["what"] == "fault"), len(events))
    return events[:first]
