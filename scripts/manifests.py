"""Render the chart for kubectl and kustomize: `python scripts/manifests.py OUT`, for deploy/k8s.

Each file of deploy/k8s/values is one overlay. Documents that all of them render alike form the base. Base and
overlay together are what the chart renders with these values, so that nothing has to be patched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "deploy" / "k8s" / "values"
_HELM = Path(sys.prefix) / "bin" / "helm"
_SOURCE = re.compile(r"^# Source: galley/templates/(\S+)\n", re.MULTILINE)
_HEADER = "# Rendered from helm/galley by `make manifests`: change the chart, or deploy/k8s/values.\n"

Documents = list[tuple[str, str]]
"""The file name of a template and one document that it rendered, for each document."""


def main() -> int:
    """Write base and overlays anew; return 2 if no folder is named."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python scripts/manifests.py OUT\n")
        return 2
    out = Path(sys.argv[1])
    overlays = {file.stem: _rendered(file) for file in sorted(VALUES.glob("*.yaml"))}
    first, *others = overlays.values()
    common = [document for document in first if all(document in other for other in others)]
    _write(out / "base", common, [])
    for name, documents in overlays.items():
        own = [document for document in documents if document not in common]
        _write(out / "overlays" / name, own, ["../../base"])
    return 0


def _rendered(values: Path) -> Documents:
    command = [str(_HELM), "template", "galley", str(ROOT / "helm" / "galley"), "--namespace", "galley"]
    command += ["--skip-tests", "--values", str(values)]
    # helm prints its errors on stderr.
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    return [_named(part) for part in re.split(r"^---$", text, flags=re.MULTILINE) if part.strip()]


def _named(part: str) -> tuple[str, str]:
    source = _SOURCE.search(part)
    if source is None:
        raise ValueError(f"helm: must name the source of each document, got {part[:80]!r}")
    lines = _SOURCE.sub("", part).splitlines()
    # Templates leave blank lines.
    return source[1], "\n".join(line.rstrip() for line in lines if line.strip())


def _write(folder: Path, documents: Documents, others: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files: dict[str, list[str]] = {}
    for name, document in documents:
        files.setdefault(name, []).append(document)
    for name, parts in files.items():
        (folder / name).write_text("\n---\n".join(parts) + "\n")
    resources = "".join(f"  - {name}\n" for name in [*others, *sorted(files)])
    kind = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    (folder / "kustomization.yaml").write_text(f"{_HEADER}{kind}namespace: galley\nresources:\n{resources}")


if __name__ == "__main__":
    sys.exit(main())
