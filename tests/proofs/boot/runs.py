"""Trials in processes of their own, with namespaces; nothing of them is left, however they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deploy.render import ROOT, tool
from tests.proofs.boot.machine import OWN_NAMESPACES, sandbox_problem, trial_environment
from tests.proofs.boot.plan import Plan


class TrialFailed(Exception):
    """A trial did not finish; the message is its output."""


def run_trial(plan: Plan, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run a trial and return its record; raises TrialFailed, also where this machine cannot run pods."""
    problem = sandbox_problem()
    if problem is not None:
        raise TrialFailed(problem)
    tool("helm")  # fetched from here, if need be: a trial has no way out
    folder.mkdir(parents=True, exist_ok=True)
    plan.write(folder / "plan.json")
    record, said = folder / "record.json", folder / "said"
    trial = [sys.executable, "-P", "-m", "tests.proofs.boot.trial", "--plan", str(folder / "plan.json")]
    trial += ["--record", str(record), "--folder", str(folder)]
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*OWN_NAMESPACES, *trial], cwd=ROOT, env=trial_environment(), stdout=out, stderr=out
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"no end after {timeout_s:g} s:\n{said.read_text()[-4000:]}") from None
        finally:
            process.kill()
            process.wait()
    if not record.exists():
        raise TrialFailed(f"no record:\n{said.read_text()[-4000:]}")
    told: dict[str, Any] = json.loads(record.read_text())
    if "failed" in told:
        raise TrialFailed(told["failed"][-12000:])
    return told
