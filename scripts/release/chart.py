"""Package the chart of a release: `python -m scripts.release.chart --help`.

It reads the digest of each image by its name, the trial store's included. The package has the registry, and
lists the images for Artifact Hub. Beside it, a file of values for each variant names its images by digest.

It needs nothing but the standard library and helm, so that the job that signs the chart installs no packages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "helm" / "galley"
ROLES = ("gateway", "draft", "target")
VARIANTS = {
    "cpu": ("galley-gateway", "galley-draft", "galley-target"),
    "cuda": ("galley-gateway", "galley-draft-cuda", "galley-target-cuda"),
    "vllm-cuda": ("galley-gateway", "galley-draft-cuda", "galley-target-vllm-cuda"),
}
"""The images of gateway, draft and target; a gateway needs no GPU, so it has no build for CUDA."""
NAMES = tuple(dict.fromkeys(name for names in VARIANTS.values() for name in names))
"""The images of a release."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def version() -> str:
    """Return the version in Chart.yaml."""
    return _only(r"^version: (\S+)$", (CHART / "Chart.yaml").read_text())[1]


def store_image() -> str:
    """Return the image of the trial store, as values.yaml names it."""
    return _only(r"^    image: (\S*valkey\S+)$", (CHART / "values.yaml").read_text())[1]


def values(variant: str, registry: str, digests: Mapping[str, str]) -> str:
    """Return values that name each image of a variant by digest, and the target's engine."""
    store = store_image()
    lines = [
        f"# The images of Galley {version()} by digest, for {variant}: pass this file with --values.",
        f"image: {{registry: {registry}}}",
    ]
    for role, name in zip(ROLES, VARIANTS[variant], strict=True):
        engine = f"engine: {'vllm' if '-vllm' in name else 'paged'}, " if role == "target" else ""
        lines.append(f'{role}: {{{engine}image: {{repository: {name}, tag: "{version()}@{digests[name]}"}}}}')
    lines.append(f'redis: {{embedded: {{image: "{store}@{digests[store]}"}}}}')
    return "\n".join(lines) + "\n"


def check(registry: str, digests: Mapping[str, str]) -> None:
    """Raise ValueError if an image is missing, or if a digest or the registry's name is not valid."""
    expected = {*NAMES, store_image()}
    if digests.keys() != expected:
        raise ValueError(f"images: must be {', '.join(sorted(expected))}, got {', '.join(sorted(digests))}")
    for name, digest in digests.items():
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"images: {name}: must be sha256: and 64 hex digits, got {digest}")
    if not re.fullmatch(r"[a-z0-9.:-]+(/[a-z0-9._-]+)*", registry):
        raise ValueError(f"registry: must be lower case and without a scheme, got {registry}")


@dataclass(frozen=True, slots=True)
class Release:
    """The registry, the repository and the images of a version; `schema` replaces that of the chart."""

    registry: str
    repository: str
    digests: Mapping[str, str]
    schema: Path | None = None

    def package(self, out: Path, helm: str) -> None:
        """Write the chart's package and the files of values into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            chart = Path(scratch) / "galley"
            shutil.copytree(CHART, chart)
            self._write(chart)
            command = [helm, "package", str(chart), "--destination", str(out)]
            subprocess.run(command, check=True)  # noqa: S603  # our own words
        for variant in VARIANTS:
            text = values(variant, self.registry, self.digests)
            (out / f"values-{variant}-images.yaml").write_text(text)

    def _write(self, chart: Path) -> None:
        """Put registry, address, images and schema into a copy of the chart."""
        default = chart / "values.yaml"
        text = _replaced(r'^  registry: ""$', f"  registry: {self.registry}", default.read_text())
        default.write_text(text)
        lines = [f"home: {self.repository}", f"sources: [{self.repository}]", "annotations:"]
        lines.append("  artifacthub.io/images: |")
        for name in NAMES:
            image = f"{self.registry}/{name}:{version()}@{self.digests[name]}"
            lines.append(f"    - {{name: {name}, image: {image}}}")
        metadata = chart / "Chart.yaml"
        metadata.write_text(_replaced(r"^annotations:$", "\n".join(lines), metadata.read_text()))
        if self.schema is not None:
            shutil.copy(self.schema, chart / "values.schema.json")


def _only(pattern: str, text: str) -> re.Match[str]:
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if len(found) != 1:
        raise ValueError(f"chart: must have one line {pattern}, got {len(found)}")
    return found[0]


def _replaced(pattern: str, line: str, text: str) -> str:
    match = _only(pattern, text)
    return text[: match.start()] + line + text[match.end() :]


def main(argv: list[str] | None = None) -> int:
    """Return 2 if an argument is not valid."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release.chart")
    parser.add_argument("--registry", required=True, help="where the images are, for example ghcr.io/owner")
    parser.add_argument("--repository", required=True, help="address of the repository, for Artifact Hub")
    parser.add_argument("--images", type=Path, required=True, help="JSON: names of images and digests")
    parser.add_argument("--schema", type=Path, help="replaces values.schema.json in the package")
    parser.add_argument("--out", type=Path, required=True, help="folder for the package and the values")
    parser.add_argument("--helm", default="helm", help="helm's path; default: %(default)s")
    given = parser.parse_args(argv)
    digests = json.loads(given.images.read_text())
    try:
        check(given.registry, digests)
    except ValueError as error:
        parser.error(str(error))
    Release(given.registry, given.repository, digests, given.schema).package(given.out, given.helm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
