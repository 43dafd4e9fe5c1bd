"""Check that this machine can run pods: namespaces, a packet filter and a container runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache

from tests.deploy.render import ROOT

TOOLS = ("crun", "ip", "mount", "nft", "setpriv", "unshare")
_CHECK_S = 60.0
_TRIAL = "tests.proofs.boot.trial"

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
    """Return the environment of the process that holds a cluster: nothing may reach a pod by accident."""
    kept = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME", "GALLEY_CACHE_DIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONPATH": str(ROOT)}
