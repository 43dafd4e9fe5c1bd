"""Build the images without a daemon, or print why this machine cannot: `make images`.

python -m scripts.images [--device cpu|cuda] [--roles target,draft,gateway] [--build-arg NAME=VALUE]...
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.images.build import FOLDER, ORDER, Workshop, revision
from scripts.images.host import lacking


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a build failed, 2 if this machine cannot build images."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--roles", default=",".join(ORDER), help="images, with commas; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="image store; default: %(default)s")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(argv)
    roles = given.roles.split(",")
    unknown = sorted(set(roles) - set(ORDER))
    if unknown:
        parser.error(f"--roles: must be among {', '.join(ORDER)}, got {', '.join(unknown)}")
    reason = lacking(given.folder, given.device)
    if reason is not None:
        sys.stderr.write(f"the images cannot be built here: {reason}\n")
        return 2
    workshop = Workshop(given.folder)
    try:
        workshop.make_bases()
        for role in (role for role in ORDER if role in roles):
            sys.stdout.write(f"== {workshop.build(role, given.device, revision(), given.build_arg)}\n")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{' '.join(error.cmd)}: exit status {error.returncode}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
