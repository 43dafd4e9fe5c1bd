"""What a record of a trial must show. Each function says what is wrong, one line each; nothing is right."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.boot.trial import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Record = Mapping[str, Any]

_PROBED = {"SIGKILL": "ended", "SIGSTOP": "unready"}


def lost_or_other_answers(record: Record) -> list[str]:
    """Streams that failed, ended early, or said other tokens than when undisturbed."""
    found = []
    for answer in [*record["reference"].values(), *record.get("answers", ())]:
        expected = record["reference"][str(answer["question"])]["tokens"]
        if answer["error"] or not answer["finished"]:
            found.append(f"question {answer['question']}: {answer['error'] or 'no end'}")
        elif answer["tokens"] != expected or answer["numerics_changed"]:
            found.append(f"question {answer['question']}: {answer['tokens']}, not {expected}")
    return found


def cut_calls(record: Record) -> list[str]:
    """Answers that took more than one call though no pod was killed or stopped while they came.

    A stream was cut, or begun where it would not be had.
    """
    return [
        f"question {answer['question']}: {answer['calls']} calls, during {', '.join(during) or 'nothing'}"
        for answer in record.get("answers", ())
        for during in [_phases(record, answer)]
        if answer["calls"] > 1 and FAULTS not in during
    ]


def forbidden_attempts(record: Record) -> list[str]:
    """Connections that a pod of the chart, or a client, tried and the policies stopped.

    Not those to where a pod has been: there is nobody at the address whom a policy could name.
    """
    return [
        f"{tried['source']} to {tried['destination']} {tried['protocol']}/{tried['port']}"
        for tried in record["refused"]
        if tried["through"] is None and not _knocks(record, tried["source"])
    ]


def uncovered_connections(record: Record) -> list[str]:
    """Connections that came through the filter though no opening is for them."""
    return [
        f"{made['source']} to {made['destination']} {made['protocol']}/{made['port']}"
        for made in record["made"]
        if made["through"] is None
    ]


def idle_openings(record: Record) -> list[str]:
    """Openings that nobody needed, where there is a filter that would know.

    A visitor may use those for others than the chart's own pods (Prometheus), not in the place of one.
    """
    if not record["isolated"]:
        return []
    doors = record.get("doors", ())
    inside = {door["visitor"] for door in doors if door["namespace"] == record["namespace"]}
    used = {name for made in record["made"] if made["source"] not in inside for name in made["through"] or ()}
    return [
        f"{opening['name']}: {opening['ports'] or 'all ports'} for {opening['peers'] or 'everyone'}"
        for opening in record["openings"]
        if opening["name"] not in used
    ]


def wrong_doors(record: Record) -> list[str]:
    """Where somebody came in who may not, or did not who may."""
    return [
        f"{door['visitor']} at {door['pod']}:{door['port']}: came in: {door['came_in']}, may: {door['may']}"
        for door in record.get("doors", ())
        if door["came_in"] != door["may"]
    ]


def cut_short(record: Record) -> list[str]:
    """Pods of the chart that were told to end and were killed for taking longer than their grace."""
    hung = {event["pod"] for event in record["events"] if event["what"] == "failed"}
    return [
        f"{event['pod']} after {event['seconds']} s"
        for event in _of_workloads(record)
        if event["what"] == "SIGKILL" and event["pod"] not in hung
    ]


def bad_ends(record: Record) -> list[str]:
    """Pods of the chart that ended with an error when they were told to end, or by themselves at any time."""
    struck = {event["pod"] for event in record["events"] if event["what"] == "fault"}
    ended = (event for event in _of_workloads(record) if event["what"] == "ended")
    return [f"{e['pod']}: exit {e['status']}" for e in ended if e["status"] != 0 and e["pod"] not in struck]


def failed_hooks(record: Record) -> list[str]:
    """preStop hooks that failed, and tests of the chart that did."""
    hooks = [
        f"{e['pod']}: {e['problem']}" for e in record["events"] if e["what"] == "preStop" and e["problem"]
    ]
    return hooks + [
        f"{hook['name']}: exit {hook['status']}: {hook['output']}"
        for hook in record["hooks"]
        if hook["status"]
    ]


def without_a_ready_pod(record: Record) -> list[str]:
    """Workloads that had no ready pod at some time after the boot."""
    ready: dict[str, set[str]] = defaultdict(set)
    up: set[str] = set()
    found = []
    for event in _of_workloads(record):
        owner = record["owners"][event["pod"]]
        if event["what"] == "ready":
            ready[owner].add(event["pod"])
            if len(ready[owner]) == record["workloads"][owner]:
                up.add(owner)
        elif event["what"] in ("unready", "ending", "ended", "gone"):
            ready[owner].discard(event["pod"])
            if owner in up and not ready[owner]:
                up.discard(owner)
                found.append(f"{owner} at {event['at_s']} s")
    return found


def untold_faults(record: Record) -> list[str]:
    """Faults that no probe noticed, or after which the pod was not ready again."""
    found = []
    events = record["events"]
    for number, event in enumerate(events):
        if event["what"] != "fault" or event["signal"] not in _PROBED:
            continue
        after = [later["what"] for later in events[number + 1 :] if later["pod"] == event["pod"]]
        noticed = _PROBED[event["signal"]]
        if noticed not in after or "ready" not in after[after.index(noticed) :]:
            found.append(f"{event['pod']} {event['signal']}: then {after[:6]}")
    return found


def foreign_names(record: Record) -> list[str]:
    """Names that pods looked up and that are none of the chart's: something wants to go outside."""
    return [name for name in record["unknown_names"] if name.split(".")[0] not in record["services"]]


CHECKS: tuple[Callable[[Record], list[str]], ...] = (
    *(
        lost_or_other_answers,
        cut_calls,
        forbidden_attempts,
        uncovered_connections,
        idle_openings,
        wrong_doors,
    ),
    *(cut_short, bad_ends, failed_hooks, untold_faults, foreign_names),
)
"""What holds for every trial with all of its parts."""


def _of_workloads(record: Record) -> Iterator[Mapping[str, Any]]:
    return (event for event in record["events"] if record["owners"][event["pod"]] in record["workloads"])


def _knocks(record: Record, pod: str) -> bool:
    return any(door["visitor"] == pod for door in record.get("doors", ()))


def _phases(record: Record, answer: Mapping[str, Any]) -> list[str]:
    """What was being done while an answer came."""
    began_s, ended_s = (answer[name] - record["began_s"] for name in ("began_s", "ended_s"))
    return [
        str(name)
        for name, times in record["phases"].items()
        for told in times
        if began_s <= told["began_s"] + told["seconds"] and told["began_s"] <= ended_s
    ]
