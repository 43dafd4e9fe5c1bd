"""The checks of a trial's record can fail: each is shown one that it must not let pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proofs.boot import verdict
from tests.proofs.boot.trial import FAULTS

ANSWER = {
    "question": 0,
    "began_s": 110.0,
    "ended_s": 111.0,
    "error": "",
    "max_tokens": 2,
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


PORT = "in port TCP/1"
SCRAPED = {"pod": "db-0", "port": 9, "status": 200, "samples": 7}


CONFINED = {
    "users": [10001],
    "capabilities": 0,
    "gains_no_privileges": True,
    "filtered": True,
    "reads_its_root_alone": True,
    "peak_bytes": 60,
}


def census(**process: Any) -> dict[str, Any]:
    told = {"pod": "db-0", "namespace": "galley", "container": "db", "limit_bytes": 100.0}
    return {**told, "processes": [{**CONFINED, **process}]}


def record(**told: Any) -> dict[str, Any]:
    """Of a trial in which all went well."""
    return {
        "began_s": 100.0,
        "namespace": "galley",
        "workloads": {"db": 1},
        "owners": {"db-0": "db", "load": "load"},
        "groups": {"db-0": "db-0", "db-1": "db-0", "load": "load"},
        "services": ["db"],
        "reference": {"0": ANSWER},
        "answers": [ANSWER],
        "phases": {"roll db": [{"began_s": 9.0, "seconds": 3.0}]},
        "events": [event("ready"), event("ending"), event("ended", status=0), event("ready")],
        "hooks": [{"name": "test", "status": 0, "output": ""}],
        "unknown_names": ["db.cluster.local"],
        "made": [connection("load", through=["in"])],
        "refused": [connection("stranger", through=None)],
        "openings": [{"name": "in", "ports": ["TCP/1"], "peers": [{}], "parts": ["in", "in peer 0", PORT]}],
        "doors": [DOOR],
        "scraped": [SCRAPED],
        "filters": True,
        "census": [census()],
        "clients": {"reference": 0, "load": 0},
        **told,
    }


def event(what: str, pod: str = "db-0", **details: Any) -> dict[str, Any]:
    return {"at_s": 1.0, "pod": pod, "what": what, **details}


def connection(
    source: str, through: list[str] | None, uses: tuple[str, ...] = ("in", "in peer 0", PORT)
) -> dict[str, Any]:
    told = {"source": source, "destination": "db-0", "protocol": "TCP", "port": 1}
    return {**told, "through": through, "uses": list(uses if through else ())}


STRUCK = [event("ready"), event("fault", signal="SIGKILL"), event("ended", status=137), event("ready")]
PROBED = {"probe": "liveness", "problem": "no answer"}


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
        (verdict.idle_openings, {"made": [connection("load", ["in"], ("in", "in peer 0"))]}),
        (verdict.idle_openings, {"made": [connection("load", ["in"], ("in", PORT))]}),
        (verdict.cut_short, {"events": [event("SIGKILL", seconds=30.0)]}),
        (verdict.cut_short, {"events": [*STRUCK, event("SIGKILL", seconds=30.0)]}),
        (verdict.bad_ends, {"events": [event("ended", status=1)]}),
        (verdict.bad_ends, {"events": [*STRUCK, event("ended", status=1)]}),
        (verdict.needless_restarts, {"events": [event("failed", **PROBED)]}),
        (verdict.failed_scrapes, {"scraped": [{**SCRAPED, "status": "timed out"}]}),
        (verdict.failed_scrapes, {"scraped": [{**SCRAPED, "samples": 0}]}),
        (verdict.loose_containers, {"census": [census(users=[0, 10001])]}),
        (verdict.loose_containers, {"census": [census(capabilities=0x2000)]}),
        (verdict.loose_containers, {"census": [census(gains_no_privileges=False)]}),
        (verdict.loose_containers, {"census": [census(filtered=False)]}),
        (verdict.loose_containers, {"census": [census(reads_its_root_alone=False)]}),
        (verdict.loose_containers, {"census": [census(peak_bytes=101)]}),
        (verdict.failed_clients, {"clients": {"load": 1}}),
        (verdict.failed_clients, {"reference": {}}),
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


def test_what_was_struck_and_those_who_die_with_it_may_end_badly() -> None:
    # It has no probe: ready as soon as it runs again, until its group is made anew.
    with_it = [
        *(event("ended", "db-1", status=1), event("ready", "db-1"), event("ended", "db-1", status=137)),
        *(event("made", "db-1"), event("ready", "db-1")),
    ]
    told = record(
        owners={"db-0": "db", "db-1": "db"},
        events=[*STRUCK[:3], *with_it, event("SIGKILL", seconds=9.0), event("failed", **PROBED)],
    )
    for check in (verdict.bad_ends, verdict.cut_short, verdict.needless_restarts):
        assert check(told) == []


def test_names_are_asked_for_by_tcp_only_where_answers_are_long() -> None:
    parts = ["in port UDP/53", "in port TCP/53"]
    opening = {"name": "in", "ports": ["UDP/53", "TCP/53"], "peers": [], "parts": parts}
    made = [connection("load", ["in"], ("in port UDP/53",))]
    assert verdict.idle_openings(record(openings=[opening], made=made)) == []
    assert len(verdict.idle_openings(record(openings=[opening], made=[]))) == 1


def test_a_call_may_be_cut_by_a_fault_and_a_stranger_may_be_refused() -> None:
    faults = {FAULTS: [{"began_s": 10.5, "seconds": 3.0}]}
    assert verdict.cut_calls(record(answers=[{**ANSWER, "calls": 2}], phases=faults)) == []
    assert verdict.forbidden_attempts(record()) == []
