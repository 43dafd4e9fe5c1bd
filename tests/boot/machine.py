"""What this machine allows: namespaces of our own, a packet filter, a container runtime, or none of that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache

from tests.deploy.render import ROOT

TOOLS = ("crun", "ip", "mount", "nft", "setpriv", "unshare")
NO_NAMESPACES = "needs namespaces of its own"
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
def why_no_sandbox() -> str | None:
    """What is missing for pods with namespaces of their own; None if nothing is."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"{NO_NAMESPACES}: it runs as root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{NO_NAMESPACES}: {', '.join(missing)} not installed"
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        done = subprocess.run(
            [*OWN_NAMESPACES, sys.executable, "-P", "-m", "tests.boot.trial", "--check", "--folder", folder],
            cwd=ROOT,
            env=trial_environment(),
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    return None if done.returncode == 0 else f"{NO_NAMESPACES}: {done.stderr.strip()[-800:]}"


def trial_environment() -> dict[str, str]:
    """Of the process that holds a cluster: nothing of ours that could reach a pod by accident."""
    kept = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME", "GALLEY_CACHE_DIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONPATH": str(ROOT)}
