"""Prove that the images are built and serve as their Dockerfiles say: `make prove-images`.

Builds the three images without a daemon (`make images`), checks what they hold, and runs them by their own
ENTRYPOINT, ENV, USER and VOLUME, with a read-only root and no capability: the gateway beside an embedded
store, then a target and a draft. The gateway's HEALTHCHECK must fail without a target and succeed with one. A
stream must have the same tokens with and without drafting. Each container must exit with status 0 after
SIGTERM. Writes bench/results/images.json; exits 1 if any of this does not hold, 2 if nothing can be built
here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import BENCH, result_path, write_record
from bench.image_stack import serve
from scripts.images.build import FOLDER, ORDER, Workshop, image, revision
from scripts.images.container import Container
from scripts.images.host import lacking
from scripts.images.inside import contents, privileges

GATEWAY_MB = 300
_WRITABLE = ("/tmp", "/var/cache/galley")  # noqa: S108  # as the Dockerfiles say
_TRIED = ("/", "/venv", "/models", *_WRITABLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if all of it holds, 2 if the images cannot be built here."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_images", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--kept", action="store_true", help="use the images in --folder, build none")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    reason = None if given.kept else lacking(given.folder, "cpu")
    if reason is not None:
        sys.stderr.write(f"the images cannot be built here: {reason}\n")
        return 2
    workshop = Workshop(given.folder)
    built_s = {} if given.kept else build(workshop)
    with ExitStack() as held:
        containers = {role: unpacked(workshop, role, held) for role in ORDER}
        held_by = {role: contents(container) for role, container in containers.items()}
        allowed = {role: privileges(container, _TRIED) for role, container in containers.items()}
        served, wrong = serve(containers)
    faults = [*faults_of(held_by, allowed), *wrong]
    record = {
        "build_s": built_s,
        "images": held_by,
        "privileges": allowed,
        "served": served,
        "faults": faults,
        "held": not faults,
    }
    path = result_path("images", given.results)
    write_record(path, record)
    print({role: found["megabytes"] for role, found in held_by.items()}, served, faults)
    print(f"record: {path}")
    return int(bool(faults))


def build(workshop: Workshop) -> dict[str, float]:
    """Build the base and the three images; return the seconds of each."""
    took = {}
    for role in ("base", *ORDER):
        began = time.monotonic()
        if role == "base":
            workshop.make_bases()
        else:
            workshop.build(role, "cpu", revision())
        took[role] = round(time.monotonic() - began, 1)
    return took


def unpacked(workshop: Workshop, role: str, held: ExitStack) -> Container:
    """Return a role's image as a folder, until `held` is closed."""
    container, root = workshop.unpack(image(role))
    held.callback(workshop.remove, container)
    return Container(root, workshop.config(image(role)))


def faults_of(held_by: dict[str, dict[str, Any]], allowed: dict[str, dict[str, str]]) -> list[str]:
    """Return what the images contain or permit but must not."""
    unwanted = ("compilers", "headers_of_python", "pip", "set_uid_in_environment", "writable_by_the_user")
    faults = [
        f"{role}: {name}: {found[name]}"
        for role, found in held_by.items()
        for name in unwanted
        if found[name]
    ]
    if held_by["gateway"]["torch"]:
        faults.append("gateway: has torch")
    if held_by["gateway"]["megabytes"] > GATEWAY_MB:
        faults.append(f"gateway: {held_by['gateway']['megabytes']} MB, of at most {GATEWAY_MB}")
    for role, facts in allowed.items():
        expected = {
            folder: "written" if folder in _WRITABLE else "Read-only file system" for folder in _TRIED
        }
        expected |= {"Uid": "10001 10001 10001 10001", "Groups": "", "CapEff": "0" * 16, "NoNewPrivs": "1"}
        faults += [
            f"{role}: {name}: {facts[name]}" for name, value in expected.items() if facts[name] != value
        ]
    return faults


if __name__ == "__main__":
    sys.exit(main())
