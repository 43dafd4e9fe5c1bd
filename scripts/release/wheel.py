"""Compare a wheel with the tree that it was built from: `python -m scripts.release.wheel WHEEL`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("galley", "services")


def problems(wheel: Path, tree: set[str]) -> Iterator[str]:
    """Yield what the wheel lacks, and what it holds beside the files of the packages."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    content = {name for name in inside if ".dist-info/" not in name}
    yield from (f"{wheel.name}: {name} is missing" for name in sorted(tree - content))
    yield from (f"{wheel.name}: {name} is not in the tree" for name in sorted(content - tree))
    for field in ("Name", "Version", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not fields[field]:
            yield f"{wheel.name}: METADATA has no {field}"


def files_of_the_tree() -> set[str]:
    """Return the packages' files that git knows or would not ignore, relative to the root."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PACKAGES)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603  # fixed
    return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}


def main() -> int:
    """Return 1 if the wheel differs from the tree, 2 if no wheel is named."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m scripts.release.wheel WHEEL\n")
        return 2
    lines = [f"{problem}\n" for problem in problems(Path(sys.argv[1]), files_of_the_tree())]
    sys.stderr.writelines(lines)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
