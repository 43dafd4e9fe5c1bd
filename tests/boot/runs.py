"""Trials in processes of their own, with namespaces; nothing of them is left, however they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from galley.stack import guard
from tests.boot.machine import OWN_NAMESPACES, trial_environment
from tests.boot.plan import Plan
from tests.deploy.render import ROOT, tool


class TrialFailed(Exception):
    """A trial came to no end; the message is what it said."""


def run_trial(plan: Plan, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The record of a trial; raises TrialFailed."""
    tool("helm")  # fetched from here, if need be: a trial has no way out
    folder.mkdir(parents=True, exist_ok=True)
    plan.write(folder / "plan.json")
    record, said = folder / "record.json", folder / "said"
    trial = [sys.executable, "-P", "-m", "tests.boot.trial", "--plan", str(folder / "plan.json")]
    trial += ["--record", str(record), "--folder", str(folder)]
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0"]
    before = OWN_NAMESPACES if plan.isolated else guarded
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*before, *trial], cwd=ROOT, env=trial_environment(), stdout=out, stderr=out
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
