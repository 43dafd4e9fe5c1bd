"""The checks of a trial's record can fail: each is shown one that it must not let pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.boot import verdict
from tests.boot.trial import FAULTS

ANSWER = {
    "question": 0,
    "began_s": 110.0,
    "ended_s": 111.0,
    "error": "",
    "tokens": [1, 2],
    "calls": 1,
    "finished": True,
    "numerics_changed": 0,
}
DOOR = {
    "visitor": "stranger",
    "namespace": "galley",
    "pod": "db-0",
    "port": 1,
    "came_in": False,
    "may": False,
}


def record(**told: Any) -> dict[str, Any]:
    """Of a trial in which all went well."""
    return {
        "isolated": True,
        "began_s": 100.0,
        "namespace": "galley",
        "workloads": {"db": 1},
        "owners": {"db-0": "db", "load": "load"},
        "services": ["db"],
        "reference": {"0": ANSWER},
        "answers": [ANSWER],
        "phases": {"roll db": [{"began_s": 9.0, "seconds": 3.0}]},
        "events": [event("ready"), event("ending"), event("ended", status=0), event("ready")],
        "hooks": [{"name": "test", "status": 0, "output": ""}],
        "unknown_names": ["db.cluster.local"],
        "made": [connection("load", through=["in"])],
        "refused": [connection("stranger", through=None)],
        "openings": [{"name": "in", "ports": ["TCP/1"], "peers": []}],
        "doors": [DOOR],
        **told,
    }


def event(what: str, **details: Any) -> dict[str, Any]:
    return {"at_s": 1.0, "pod": "db-0", "what": what, **details}


def connection(source: str, through: list[str] | None) -> dict[str, Any]:
    return {"source": source, "destination": "db-0", "protocol": "TCP", "port": 1, "through": through}


def test_nothing_is_wrong_where_all_went_well() -> None:
    assert {check.__name__: check(record()) for check in verdict.CHECKS} == {
        check.__name__: [] for check in verdict.CHECKS
    }


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (verdict.lost_or_other_answers, {"answers": [{**ANSWER, "error": "UNAVAILABLE"}]}),
        (verdict.lost_or_other_answers, {"answers": [{**ANSWER, "finished": False}]}),
        (verdict.lost_or_other_answers, {"answers": [{**ANSWER, "tokens": [1, 3]}]}),
        (verdict.lost_or_other_answers, {"answers": [{**ANSWER, "numerics_changed": 1}]}),
        (verdict.cut_calls, {"answers": [{**ANSWER, "calls": 2}]}),
        (verdict.forbidden_attempts, {"refused": [connection("load", through=None)]}),
        (verdict.uncovered_connections, {"made": [connection("load", through=None)]}),
        (verdict.idle_openings, {"made": []}),
        (verdict.idle_openings, {"made": [connection("stranger", through=["in"])]}),
        (verdict.wrong_doors, {"doors": [{**DOOR, "came_in": True}]}),
        (verdict.wrong_doors, {"doors": [{**DOOR, "may": True}]}),
        (verdict.cut_short, {"events": [event("SIGKILL", seconds=30.0)]}),
        (verdict.bad_ends, {"events": [event("ended", status=1)]}),
        (verdict.failed_hooks, {"events": [event("preStop", problem="exit 1")]}),
        (verdict.failed_hooks, {"hooks": [{"name": "test", "status": 1, "output": "no"}]}),
        (verdict.untold_faults, {"events": [event("fault", signal="SIGSTOP"), event("ready")]}),
        (verdict.untold_faults, {"events": [event("fault", signal="SIGKILL"), event("ended")]}),
        (verdict.foreign_names, {"unknown_names": ["huggingface.co"]}),
        (verdict.without_a_ready_pod, {"events": [event("ready"), event("ending"), event("gone")]}),
    ],
)
def test_what_went_wrong_is_said(check: Any, told: dict[str, Any]) -> None:
    assert len(check(record(**told))) == 1


def test_a_call_may_be_cut_by_a_fault_and_a_stranger_may_be_refused() -> None:
    faults = {FAULTS: [{"began_s": 10.5, "seconds": 3.0}]}
    assert verdict.cut_calls(record(answers=[{**ANSWER, "calls": 2}], phases=faults)) == []
    assert verdict.forbidden_attempts(record()) == []
