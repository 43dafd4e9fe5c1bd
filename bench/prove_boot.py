"""Prove that the chart boots, rolls and heals, by the long form of tests/boot: `make prove-boot`.

The whole default model; caches that are empty at first; every role rolled three times under load, with the
pauses that the chart itself sets; pods of every role killed, stopped until readiness tells, and hung until
liveness has them started again; TLS, callers, policies, drafts, traces and monitoring in combinations; and
the chart on loopback. Writes bench/results/boot/<commit>.json; exits 1 if anything shows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import BENCH, commit, machine, result_path, write_record
from services.common.defaults import DEFAULT_MODEL
from services.engine.prepare import resolve_model
from tests.boot import verdict
from tests.boot.machine import why_no_sandbox
from tests.boot.runs import TrialFailed, run_trial
from tests.boot.worlds import SECURED, SMALL, TWICE, plan
from tests.deploy.matrix import SWITCHES, laid_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.boot.plan import Plan
    from tests.deploy.render import Manifest

_ROLES = ("gateway", "draft", "redis", "target")
_TRIAL_S = 3600.0
# What runs here: one pod a target, the store of the chart, the model of the images. Each setting of the other
# switches that shape connections is in some of these.
_COMBINATIONS: tuple[dict[str, str], ...] = (
    {"tls": "off", "callers": "keys", "draft": "none", "edge": "ingress", "seen": "annotations"},
    {"tls": "mutual", "callers": "anybody", "draft": "lookup", "edge": "balancer", "seen": "annotations"},
    {"tls": "mutual", "callers": "keys", "draft": "none", "edge": "inside", "seen": "pods"},
    {"tls": "servers alone", "callers": "keys", "draft": "lookup", "edge": "route", "seen": "services"},
    {"tls": "servers alone", "callers": "anybody", "draft": "none", "edge": "ingress", "seen": "not at all"},
    {"tls": "callers too", "callers": "anybody", "draft": "lookup", "edge": "route", "seen": "pods"},
    {"tls": "callers too", "callers": "keys", "draft": "none", "edge": "inside", "seen": "annotations"},
    {"tls": "off", "callers": "anybody", "draft": "lookup", "edge": "inside", "seen": "not at all"},
)
_TRACED: Manifest = {"otel": {"sampleRatio": 1.0}}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every trial shows what it must."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_boot", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of rolls and faults")
    parser.add_argument("--only", default="", help="trials whose name begins so")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    why = why_no_sandbox()
    if why is not None:
        print(f"cannot prove it here: {why}")
        return 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        outcomes = {
            name: _outcome(name, each, Path(folder) / str(number))
            for number, (name, each) in enumerate(_trials(Path(folder), given.rounds).items())
            if name.startswith(given.only)
        }
    held = bool(outcomes) and all(not outcome["problems"] for outcome in outcomes.values())
    record = {
        "name": "boot",
        "commit": commit(),
        "machine": machine(),
        "trials": outcomes,
        "seconds": round(time.monotonic() - began, 1),
        "held": held,
    }
    path = result_path("boot", commit(), given.results)
    write_record(path, record)
    print(f"{'held' if held else 'NOT held'}; record: {path}")
    return 0 if held else 1


def _trials(folder: Path, rounds: int) -> dict[str, Plan]:
    model = resolve_model(DEFAULT_MODEL)

    def make(name: str, *values: Manifest, **told: Any) -> Plan:
        return plan(model, folder / "made" / name.replace(" ", "-"), laid_over([SMALL, *values]), **told)

    trials = {
        "defaults, empty caches": make("cold", warm=False),
        "defaults on loopback": make("loopback", isolated=False),
        "rolls and faults": make(
            "rolls",
            *(SECURED, TWICE),
            rounds=rounds,
            rolls=_ROLES,
            killed=("target", "draft"),
            frozen=("gateway",),
        ),
        "hangs": make("hangs", SECURED, TWICE, hung=("gateway", "target", "draft"), killed=("redis",)),
    }
    for number, row in enumerate(_COMBINATIONS):
        values = laid_over([_TRACED, *(SWITCHES[switch][setting] for switch, setting in row.items())])
        trials[", ".join(row.values())] = make(str(number), values)
    return trials


def _outcome(name: str, each: Plan, folder: Path) -> dict[str, Any]:
    """What a trial showed, in short."""
    print(f"{name} ...", flush=True)
    try:
        record = run_trial(each, folder, _TRIAL_S)
    except TrialFailed as failure:
        print(failure)
        return {"problems": [str(failure)[-2000:]]}
    problems = {check.__name__: check(record) for check in verdict.CHECKS}
    answers = [*record["reference"].values(), *record.get("answers", ())]
    outcome = {
        "phases": record["phases"],
        "answers": len(answers),
        "tokens": sum(len(answer["tokens"]) for answer in answers),
        "longest_pause_s": max(answer["longest_pause_s"] for answer in answers),
        "pods_started": sum(event["what"] == "started" for event in record["events"]),
        "probes": record["probes"],
        "connections": len(record["made"]),
        "openings": len(record["openings"]),
        "doors": len(record.get("doors", ())),
        "problems": {check: found for check, found in problems.items() if found},
    }
    print({key: value for key, value in outcome.items() if key not in ("phases", "probes")}, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
