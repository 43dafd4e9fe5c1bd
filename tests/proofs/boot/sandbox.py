"""Run trials in namespaces of their own, and commands within them; nothing is left when they end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.deploy.render import ROOT, tool
from tests.proofs.boot.plan import Plan

TIMED_OUT = -1
_PATIENCE_S = 30.0


class CommandFailed(Exception):
    """A command of the node failed."""


async def output_of(*command: str, timeout_s: float = _PATIENCE_S, stdin: str = "") -> tuple[int, str]:
    """Return exit status (TIMED_OUT if it was killed for that) and output, errors included."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(stdin.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return TIMED_OUT, f"no end after {timeout_s:g} s"
    return process.returncode or 0, output.decode(errors="replace")


async def run(*command: str, stdin: str = "") -> str:
    status, output = await output_of(*command, stdin=stdin)
    if status != 0:
        raise CommandFailed(f"{' '.join(command)}: {status}: {output.strip()[:2000]}")
    return output


TOOLS = ("crun", "ip", "mount", "nft", "setpriv", "unshare")
_CHECK_S = 60.0

OWN_NAMESPACES = (
    # Whoever starts it may be killed: everything inside is killed with it, and nothing outside was changed.
    *("setpriv", "--pdeathsig", "KILL"),
    *(
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child=KILL",
        "--mount-proc",
    ),
    # crun wants to know one kind of control groups, and some machines have both.
    *("sh", "-c", 'mount -t cgroup2 none /sys/fs/cgroup && exec "$@"', "sh"),
)


@cache
def sandbox_problem() -> str | None:
    """Return what keeps this machine from running pods, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "pods: must run as root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"pods: {', '.join(missing)} not installed"
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        done = subprocess.run(
            [
                *OWN_NAMESPACES,
                sys.executable,
                "-P",
                "-m",
                "tests.proofs.boot.trial",
                "--check",
                "--folder",
                folder,
            ],
            cwd=ROOT,
            env=trial_environment(),
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    return None if done.returncode == 0 else f"pods: no namespaces: {done.stderr.strip()[-800:]}"


def trial_environment() -> dict[str, str]:
    """Return the environment of a trial's process, without variables that could reach a pod."""
    kept = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME", "GALLEY_CACHE_DIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONPATH": str(ROOT)}


class TrialFailed(Exception):
    """A trial did not finish; the message is its output."""


def run_trial(plan: Plan, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run a trial and return its record. Raises TrialFailed, also if this machine cannot run pods."""
    problem = sandbox_problem()
    if problem is not None:
        raise TrialFailed(problem)
    tool("helm")  # fetched from here, if need be: a trial has no way out
    folder.mkdir(parents=True, exist_ok=True)
    plan.write(folder / "plan.pickle")
    record, output = folder / "record.json", folder / "output"
    trial = [sys.executable, "-P", "-m", "tests.proofs.boot.trial", "--plan", str(folder / "plan.pickle")]
    trial += ["--record", str(record), "--folder", str(folder)]
    with output.open("wb") as out:
        process = subprocess.Popen(
            [*OWN_NAMESPACES, *trial], cwd=ROOT, env=trial_environment(), stdout=out, stderr=out
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"no end after {timeout_s:g} s:\n{output.read_text()[-4000:]}") from None
        finally:
            process.kill()
            process.wait()
    if not record.exists():
        raise TrialFailed(f"no record:\n{output.read_text()[-4000:]}")
    data: dict[str, Any] = json.loads(record.read_text())
    if "failed" in data:
        raise TrialFailed(data["failed"][-12000:])
    return data
