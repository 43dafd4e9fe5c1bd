"""Looks for known vulnerabilities in what the images are made of: `python -m scripts.audit`.

pip-audit asks PyPI, which knows the advisories of each version, and where PyPI does not answer, OSV. It
never takes "could not ask" for "nothing found": exit status 0 where every package was looked up and none is
vulnerable, 1 where some are, 2 where some or all could not be looked up, and why.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.locks import LOCKS, entries

SERVICES = ("pypi", "osv")
_TIMEOUT_S = 15


@dataclass(frozen=True)
class Finding:
    """What one service said: vulnerabilities, and what it could not look up; `failure` if it said nothing."""

    service: str
    vulnerable: Sequence[str] = ()
    skipped: Mapping[str, str] | None = None
    failure: str = ""

    @property
    def complete(self) -> bool:
        """Was every package looked up?"""
        return not self.failure and not self.skipped


def main() -> int:
    """See the module."""
    requirements = "".join(f"{pin}\n" for pin in pins())
    found: Finding | None = None
    for service in SERVICES:
        found = ask(service, requirements)
        sys.stdout.write(f"{told(found)}\n")
        if found.complete or found.vulnerable:
            break
    if found is None or not found.complete:
        sys.stderr.write("the audit could not be made in full on this machine: see above\n")
    return status(found)


def pins() -> list[str]:
    """NAME==VERSION of everything that is locked, each once, without the label of a local build."""
    locked = (entry for lock in sorted(LOCKS.glob("*.txt")) for entry in entries(lock.read_text()).values())
    return sorted({entry.split()[0].partition("+")[0] for entry in locked})


def ask(service: str, requirements: str) -> Finding:
    """What `service` knows of them, by pip-audit."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        options = ("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off")
        done = subprocess.run(  # noqa: S603  # our own words
            (
                *(sys.executable, "-m", "pip_audit", "--vulnerability-service", service, *options),
                *("--timeout", str(_TIMEOUT_S), "--requirement", file.name),
            ),
            capture_output=True,
            text=True,
            check=False,
        )
    return finding(service, done.stdout, done.stderr)


def finding(service: str, said: str, complaint: str) -> Finding:
    """`said` is pip-audit's JSON, `complaint` its last words where there is none."""
    try:
        packages: list[dict[str, Any]] = json.loads(said)["dependencies"]
    except ValueError:
        last = complaint.strip().splitlines()[-1:] or ["no answer"]
        return Finding(service, failure=last[0].strip())
    vulnerable = [
        f"{package['name']} {package['version']}: {one['id']}, mended in {one['fix_versions']}"
        for package in packages
        for one in package.get("vulns", ())
    ]
    skipped = {package["name"]: package["skip_reason"] for package in packages if "skip_reason" in package}
    return Finding(service, vulnerable, skipped)


def told(found: Finding) -> str:
    """For people."""
    if found.failure:
        return f"{found.service}: could not be asked: {found.failure}"
    lines = [f"{found.service}: {len(found.vulnerable)} known vulnerabilities", *found.vulnerable]
    if found.skipped:
        name, reason = next(iter(found.skipped.items()))
        lines.append(f"not looked up: {len(found.skipped)} packages, the first of them {name}: {reason}")
    return "\n  ".join(lines)


def status(found: Finding | None) -> int:
    """The exit status of what was found last."""
    if found is not None and found.vulnerable:
        return 1
    return 0 if found is not None and found.complete else 2


if __name__ == "__main__":
    sys.exit(main())
