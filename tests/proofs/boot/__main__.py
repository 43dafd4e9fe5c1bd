"""Prove that the chart boots, rolls and heals: `make prove-boot`.

An upgrade from the chart before its last change, under load. One replica of a gated model with two pools of
drafts, rolled while its streams wait and the hub is gone. A cluster without IPv4. Pods whose users the
cluster assigns, with all that values can add to them. With the whole default model: every role rolled twice
under load; pods of every role killed, frozen until readiness fails, and hung until liveness restarts them;
empty caches. With a few of its layers: targets of several ranks, in a pod and over pods, rolled and killed;
TLS, callers, policies, drafts, traces, monitoring and scaling in combinations. Writes
bench/results/boot.json; exits 1 if a check fails or time runs out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import BENCH, commit, result_path, write_record
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model
from tests.deploy.matrix import SWITCHES, laid_over
from tests.deploy.render import Manifest
from tests.proofs.boot import verdict
from tests.proofs.boot.plan import Plan
from tests.proofs.boot.sandbox import TrialFailed, run_trial, sandbox_problem
from tests.proofs.boot.scenarios import (
    ANY_USER,
    ASSIGNED_USER,
    BY_IPV6,
    EXTENDED,
    GATED,
    ONE_REPLICA,
    TWO_POOLS,
    UPGRADED,
)
from tests.proofs.boot.upgrade import earlier_revision, rendered_at
from tests.proofs.boot.worlds import RANKS, SECURED, SMALL, TWICE, few_layers_of, plan

_ROLES = ("gateway", "draft", "redis", "target")
_LEAST_S = 60.0
# What runs here: the store of the chart, the model of the images. Each setting of the other switches that
# shape connections is in some of these, or in a trial before them.
_SHAPING = ("tls", "callers", "draft", "edge", "seen", "scaled")
_COMBINATIONS = (
    ("off", "keys", "none", "ingress", "annotations", ""),
    ("mutual", "anybody", "lookup", "balancer", "annotations", "hpa"),
    ("mutual", "keys", "none", "inside", "pods", "keda"),
    ("servers alone", "keys", "lookup", "route", "services", "keda"),
    ("servers alone", "anybody", "none", "ingress", "not at all", "hpa"),
    ("callers too", "anybody", "lookup", "route", "pods", ""),
)
_TRACED: Manifest = {"otel": {"sampleRatio": 1.0}}
_RANKS_IN_A_POD: Manifest = {"target": {"tensorParallel": 3, "replicas": 2}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.boot", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of rolls and faults")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it")
    parser.add_argument(
        "--only", default="", help="trials whose name begins so; the others keep their record"
    )
    given = parser.parse_args(argv)
    why = sandbox_problem()
    if why is not None:
        print(f"cannot prove it here: {why}")
        return 1
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        trials = _trials(Path(folder), given.rounds)
        outcomes = {
            name: _outcome(name, each, Path(folder) / str(number), end)
            for number, (name, each) in enumerate(trials.items())
            if name.startswith(given.only)
        }
    path = result_path("boot", BENCH / "results")
    record = _merged(json.loads(path.read_text()) if path.exists() else {}, outcomes, list(trials))
    write_record(path, record)
    held = bool(outcomes) and all(not outcome["problems"] for outcome in outcomes.values())
    print(f"{'held' if held else 'NOT held'}; record: {path}")
    return 0 if held else 1


def _merged(before: dict[str, Any], outcomes: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the record with new outcomes; a trial that did not run keeps its own, with its commit."""
    known = {name: {"commit": before.get("commit"), **old} for name, old in before.get("trials", {}).items()}
    known |= outcomes
    trials = {name: known[name] for name in names if name in known}
    return {
        "trials": trials,
        "not_run": [name for name in names if name not in known],
        "held": all(not trial["problems"] for trial in trials.values()),
    }


def _trials(folder: Path, rounds: int) -> dict[str, Plan]:
    whole = resolve_model(DEFAULT_MODEL)
    few = few_layers_of(whole, folder / "few")

    def make(name: str, *values: Manifest, model: Path = whole, **options: Any) -> Plan:
        return plan(model, folder / "made" / name.replace(" ", "-"), laid_over([SMALL, *values]), **options)

    trials = {
        "rolls and faults": make(
            "rolls",
            *(SECURED, TWICE),
            rounds=rounds,
            brief=1,
            rolls=_ROLES,
            killed=("target", "draft"),
            frozen=("gateway",),
        ),
        "hangs": make("hangs", SECURED, TWICE, hung=("gateway", "target", "draft"), killed=("redis",)),
        "targets over three pods": make(
            *("groups", SECURED, TWICE, RANKS),
            model=few,
            rolls=("target",),
            killed=("target",),
            patience_s=180.0,
        ),
        "targets of three ranks": make("ranks", SECURED, _RANKS_IN_A_POD, model=few, killed=("target",)),
        "defaults, empty caches": make("cold", warm=False),
    }
    earlier = rendered_at(earlier_revision(), folder / "chart", laid_over([SMALL, SECURED, TWICE]))
    trials["upgrade from the earlier chart"] = make(
        "upgrade", SECURED, TWICE, UPGRADED, model=few, brief=1, before=tuple(earlier)
    )
    trials |= {
        "one replica, gated model, two draft pools, rolled without the hub": make(
            *("one", ONE_REPLICA, GATED, TWO_POOLS),
            model=few,
            rolls=("gateway", "draft", "target"),
            hub_outage=True,
        ),
        "IPv6 alone": make("ipv6", SECURED, BY_IPV6, model=few, ipv6=True),
        "assigned users, extended pods": make(
            *("users", ANY_USER, EXTENDED), model=few, assigned_user=ASSIGNED_USER
        ),
    }
    for number, row in enumerate(_COMBINATIONS):
        given = [SWITCHES[switch][setting] for switch, setting in zip(_SHAPING, row, strict=True) if setting]
        trials[", ".join(filter(None, row))] = make(str(number), *(_TRACED, *given), model=few)
    return trials


def _outcome(name: str, each: Plan, folder: Path, end: float) -> dict[str, Any]:
    began = time.monotonic()
    print(f"{name} ...", flush=True)
    if end - began < _LEAST_S:
        return {"commit": commit(), "problems": ["there was no time for it"]}
    try:
        record = run_trial(each, folder, end - began)
    except TrialFailed as failure:
        print(failure)
        return {"commit": commit(), "problems": [str(failure)[-2000:]]}
    problems = {check.__name__: check(record) for check in verdict.CHECKS}
    answers = [*record["reference"].values(), *record.get("answers", ())]
    outcome = {
        "commit": commit(),
        "seconds": round(time.monotonic() - began, 1),
        "phases": record["phases"],
        "answers": len(answers),
        "tokens": sum(len(answer["tokens"]) for answer in answers),
        "longest_pause_s": max(answer["longest_pause_s"] for answer in answers),
        "pods_started": sum(event["what"] == "started" for event in record["events"]),
        "probes": record["probes"],
        "connections": len(record["made"]),
        "openings": len(record["openings"]),
        "doors": len(record.get("doors", ())),
        "problems": {check: result for check, result in problems.items() if result},
    }
    print({key: value for key, value in outcome.items() if key not in ("phases", "probes")}, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
