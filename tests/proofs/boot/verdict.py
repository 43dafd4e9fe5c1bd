"""What a record of a trial must show. Each function says what is wrong, one line each; nothing is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.proofs.boot.trial import FAULTS

Record = Mapping[str, Any]

_PROBED = {"SIGKILL": "ended", "SIGSTOP": "unready"}
_OK = 200
_REVERSE = (".in-addr.arpa", ".ip6.arpa")


def lost_or_other_answers(record: Record) -> list[str]:
    results = []
    for answer in [*record["reference"].values(), *record.get("answers", ())]:
        reference = record["reference"].get(str(answer["question"]))
        if reference is None:
            results.append(f"question {answer['question']}: no answer to compare with")
            continue
        expected = reference["tokens"][: answer["max_tokens"]]
        if answer["error"] or not answer["finished"]:
            results.append(f"question {answer['question']}: {answer['error'] or 'no end'}")
        elif answer["tokens"] != expected or answer["numerics_changed"]:
            results.append(f"question {answer['question']}: {answer['tokens']}, not {expected}")
    return results


def cut_calls(record: Record) -> list[str]:
    return [
        f"question {answer['question']}: {answer['calls']} calls, during {', '.join(during) or 'nothing'}"
        for answer in record.get("answers", ())
        for during in [_phases(record, answer)]
        if answer["calls"] > 1 and FAULTS not in during
    ]


def forbidden_attempts(record: Record) -> list[str]:
    return [
        f"{tried['source']} to {tried['destination']} {tried['protocol']}/{tried['port']}"
        for tried in record["refused"]
        if tried["through"] is None and not _knocks(record, tried["source"])
    ]


def uncovered_connections(record: Record) -> list[str]:
    """Connections that passed the filter without an opening."""
    return [
        f"{made['source']} to {made['destination']} {made['protocol']}/{made['port']}"
        for made in record["made"]
        if made["through"] is None
    ]


def idle_openings(record: Record) -> list[str]:
    """Openings, and peers and ports of openings, that nothing used."""
    used = {part for made in record["made"] if not _knocks(record, made["source"]) for part in made["uses"]}
    used |= {part.replace("UDP/53", "TCP/53") for part in used}
    idle = {o["name"]: [part for part in o["parts"] if part not in used] for o in record["openings"]}
    return [
        f"{', '.join(idle[o['name']])}: of {o['peers'] or 'everyone'}, {o['ports'] or 'all ports'}"
        for o in record["openings"]
        if idle[o["name"]]
    ]


def unused_workloads(record: Record) -> list[str]:
    """Workloads to which nobody connected, but for Prometheus and those who try every port."""
    callers = (m for m in record["made"] if m["source"] != "prometheus" and not _knocks(record, m["source"]))
    called = {record["owners"].get(made["destination"]) for made in callers}
    return [name for name in record["workloads"] if name not in called]


def failed_scrapes(record: Record) -> list[str]:
    """Pods whose metrics Prometheus could not fetch, or without metrics of ours."""
    return [
        f"{scraped['pod']}:{scraped['port']}: {scraped['status']}, {scraped['samples']} samples"
        for scraped in record["scraped"]
        if scraped["status"] != _OK or not scraped["samples"]
    ]


def loose_containers(record: Record) -> list[str]:
    """Containers of the chart with needless privileges, or above their memory limit."""
    results = []
    for container in record["census"]:
        chart = container["namespace"] == record["namespace"]
        if not chart or record["owners"][container["pod"]] not in record["workloads"]:
            continue
        wrong = {what for process in container["processes"] for what in _liberties(record, process)}
        peak, limit = sum(each["peak_bytes"] for each in container["processes"]), container["limit_bytes"]
        if limit is not None and peak > limit:
            wrong.add(f"holds {peak} bytes of {limit:.0f}")
        results += [f"{container['pod']}/{container['container']}: {each}" for each in sorted(wrong)]
    return results


def _liberties(record: Record, process: Mapping[str, Any]) -> Iterator[str]:
    if 0 in process["users"]:
        yield "is root"
    if process["capabilities"]:
        yield f"has capabilities {process['capabilities']:x}"
    for what in ("gains_no_privileges", "reads_its_root_alone", *(["filtered"] if record["filters"] else [])):
        if not process[what]:
            yield f"{what}: no"


def needless_restarts(record: Record) -> list[str]:
    """Containers that a probe restarted without a fault."""
    return [
        f"{event['pod']}: {event['probe']} failed: {event['problem']}"
        for event in record["events"]
        if event["what"] == "failed" and not _excused(record, event)
    ]


def failed_clients(record: Record) -> list[str]:
    """Clients of the trial that failed, and missing reference answers."""
    results = [f"{name}: exit {status}" for name, status in record["clients"].items() if status != 0]
    return results if record["reference"] else [*results, "no answers"]


def wrong_doors(record: Record) -> list[str]:
    """Ports that a forbidden visitor reached, or an admitted one did not."""
    return [
        f"{door['visitor']} at {door['pod']}:{door['port']}: came in: {door['came_in']}, may: {door['may']}"
        for door in record.get("doors", ())
        if door["came_in"] != door["may"]
    ]


def cut_short(record: Record) -> list[str]:
    return [
        f"{event['pod']} after {event['seconds']} s"
        for event in _of_workloads(record)
        if event["what"] == "SIGKILL" and not _excused(record, event)
    ]


def bad_ends(record: Record) -> list[str]:
    """Pods of the chart that ended with an error outside a fault."""
    ended = (event for event in _of_workloads(record) if event["what"] == "ended")
    return [f"{e['pod']}: exit {e['status']}" for e in ended if e["status"] != 0 and not _excused(record, e)]


def failed_hooks(record: Record) -> list[str]:
    """Failed preStop hooks, and failed tests of the chart."""
    hooks = [
        f"{e['pod']}: {e['problem']}" for e in record["events"] if e["what"] == "preStop" and e["problem"]
    ]
    return hooks + [
        f"{hook['name']}: exit {hook['status']}: {hook['output']}"
        for hook in record["hooks"]
        if hook["status"]
    ]


def without_a_ready_pod(record: Record) -> list[str]:
    """Workloads of several replicas without a ready pod, from the boot to the first fault or the end."""
    ready: dict[str, set[str]] = defaultdict(set)
    up: set[str] = set()
    results = []
    for event in _of_workloads(record):
        owner = record["owners"][event["pod"]]
        if event["what"] == "fault" or event["at_s"] >= record["closed_at_s"]:
            break
        if event["what"] == "ready":
            ready[owner].add(event["pod"])
            if len(ready[owner]) == record["workloads"][owner] > 1:
                up.add(owner)
        elif event["what"] in ("unready", "ending", "ended", "gone"):
            ready[owner].discard(event["pod"])
            if owner in up and not ready[owner]:
                up.discard(owner)
                results.append(f"{owner} at {event['at_s']} s")
    return results


def unnoticed_faults(record: Record) -> list[str]:
    """Faults that no probe noticed, or after which the pod was not ready again."""
    results = []
    events = record["events"]
    for number, event in enumerate(events):
        if event["what"] != "fault" or event["signal"] not in _PROBED:
            continue
        after = [later["what"] for later in events[number + 1 :] if later["pod"] == event["pod"]]
        noticed = _PROBED[event["signal"]]
        if noticed not in after or "ready" not in after[after.index(noticed) :]:
            results.append(f"{event['pod']} {event['signal']}: then {after[:6]}")
    return results


def foreign_names(record: Record) -> list[str]:
    """Names outside the chart that pods looked up; reverse lookups, which torch makes, do not count."""
    known = {*record["services"], *record["owners"]}
    requests = [name for name in record["unknown_names"] if not name.endswith(_REVERSE)]
    return [name for name in requests if name.split(".")[0] not in known]


def missing_observations(record: Record) -> list[str]:
    """Parts of the record that no trial leaves empty, and probes that never passed."""
    parts = [part for part in ("hooks", "census", "made", "doors", "probes", "reference") if not record[part]]
    never = [
        kind for kind in ("startup", "readiness", "liveness") if not record["probes"].get(f"{kind} passed")
    ]
    # An upgrade that changes no pod proves nothing.
    return [*parts, *never, *(["upgraded"] if record.get("upgraded") == [] else [])]


CHECKS: tuple[Callable[[Record], list[str]], ...] = (
    *(lost_or_other_answers, cut_calls, forbidden_attempts, uncovered_connections, idle_openings),
    *(wrong_doors, cut_short, bad_ends, failed_hooks, without_a_ready_pod, unnoticed_faults, foreign_names),
    *(
        unused_workloads,
        failed_scrapes,
        needless_restarts,
        failed_clients,
        loose_containers,
        missing_observations,
    ),
)
"""The checks of every trial."""


def _of_workloads(record: Record) -> Iterator[Mapping[str, Any]]:
    return (event for event in record["events"] if record["owners"][event["pod"]] in record["workloads"])


def _excused(record: Record, event: Mapping[str, Any]) -> bool:
    """Return True if the pod's group had a fault and the pod was neither ready nor created since."""
    pod, groups = event["pod"], record["groups"]
    struck = False
    for each in record["events"]:
        if each is event:
            break
        if each["what"] == "fault" and groups[each["pod"]] == groups[pod]:
            struck = True
        elif each["pod"] == pod and (
            each["what"] == "made"
            # Who follows a leader has no probe: it is "ready" as soon as it runs, also while its group goes.
            or (each["what"] == "ready" and groups[pod] == pod)
        ):
            struck = False
    return struck


def _knocks(record: Record, pod: str) -> bool:
    return any(door["visitor"] == pod for door in record.get("doors", ()))


def _phases(record: Record, answer: Mapping[str, Any]) -> list[str]:
    began_s, ended_s = (answer[name] - record["began_s"] for name in ("began_s", "ended_s"))
    return [
        str(name)
        for name, times in record["phases"].items()
        for phase in times
        if began_s <= phase["began_s"] + phase["seconds"] and phase["began_s"] <= ended_s
    ]
