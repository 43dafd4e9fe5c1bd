"""Build images with buildah, from a base made by debootstrap, without a daemon or a registry.

Everything lies below one folder: the image store (vfs works on any file system; STORAGE_DRIVER=overlay is
faster where it works), and the pip.conf that is mounted into builds. Each build runs in a mount namespace of
its own, so that nothing stays mounted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galley.version import __version__
from scripts.images import pip_settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "images"
# The target first: the other images take the tokenizer from its image.
ORDER = ("target", "draft", "gateway")
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
BASE, BUILD_BASE = "localhost/galley-base:python", "localhost/galley-base:build"
# Debian's packages for what python:3.11-slim has, and for what only the first stages use.
_PACKAGES, _BUILD_PACKAGES = "ca-certificates,python3", "python3-venv"
# As in Debian's own slim images.
_UNWANTED = "/var/cache/apt/* /var/lib/apt/lists/* /var/log/* /usr/share/doc /usr/share/man /usr/share/locale"
_NAMESPACE = ("unshare", "--mount", "--propagation", "private")


def revision() -> str:
    """Return the commit that is checked out, for the images' labels."""
    command = ("git", "rev-parse", "HEAD")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # fixed
    return done.stdout.strip() or "unknown"


def image(role: str, device: str = "cpu") -> str:
    """Return the name of a role's image."""
    suffix = "" if device == "cpu" or role == "gateway" else f"-{device}"
    return f"localhost/galley-{role}:{__version__}{suffix}"


@dataclass(frozen=True)
class Workshop:
    """The folder in which images are built and kept."""

    folder: Path

    def buildah(self, *arguments: str, apart: bool = False) -> str:
        """Run buildah and return its output; `apart` runs it in a mount namespace and shows the output.

        Raises CalledProcessError after buildah has printed the reason.
        """
        where = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        # With --root, buildah ignores the variable.
        driver = ("--storage-driver", os.environ.get("STORAGE_DRIVER", "vfs"))
        done = subprocess.run(  # noqa: S603  # our own words
            (*(_NAMESPACE if apart else ()), "buildah", *where, *driver, *arguments),
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            cwd=ROOT,
            check=True,
            text=True,
            stdout=None if apart else subprocess.PIPE,
        )
        return done.stdout or ""

    def has(self, name: str) -> bool:
        """Return True if there is an image of this name."""
        kept = json.loads(self.buildah("images", "--json") or "[]")
        return any(name in (image["names"] or ()) for image in kept)

    def config(self, name: str) -> Mapping[str, Any]:
        """Return an image's configuration: Entrypoint, Env, User, Healthcheck and so on."""
        inspected = json.loads(self.buildah("inspect", "--type", "image", name))
        config: Mapping[str, Any] = inspected["Docker"]["config"]
        return config

    def make_bases(self) -> None:
        """Build the base images, with Python and with pip's bootstrap, unless they exist."""
        if self.has(BASE) and self.has(BUILD_BASE):
            return
        context = self.folder / "base"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        bootstrap = ("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", SUITE, "root", MIRROR)
        subprocess.run((*_NAMESPACE, *bootstrap), cwd=context, check=True)  # noqa: S603  # our own words
        (context / "python").write_text(f"FROM scratch\nCOPY root /\nRUN rm -rf {_UNWANTED}\n")
        install = f"apt-get update && apt-get install -y --no-install-recommends {_BUILD_PACKAGES}"
        (context / "build").write_text(f"FROM {BASE}\nRUN {install}\n")
        for name, file in ((BASE, "python"), (BUILD_BASE, "build")):
            self._bud(context / file, name, str(context))
        shutil.rmtree(context)

    def build(self, role: str, device: str, revision: str, arguments: Sequence[str] = ()) -> str:
        """Build the image of a role and return its name; `arguments` are further NAME=VALUE."""
        conf = self.folder / "pip.conf"
        conf.write_text(pip_settings.pip_conf(pip_settings.here()))
        mounts = [f"{conf.absolute()}:/etc/pip.conf:ro"]
        mounts += [f"{path}:{path}:ro" for path in pip_settings.folders(conf.read_text())]
        given = [f"BASE={BASE}", f"BUILD_BASE={BUILD_BASE}", f"REVISION={revision}"]
        given += [] if role == "target" else [f"TARGET_IMAGE={image('target', device)}"]
        given += [] if role == "gateway" else [f"DEVICE={device}"]
        # The CUDA build comes from PyPI.
        given += ["TORCH_INDEX="] if device == "cuda" and role != "gateway" else []
        name = image(role, device)
        options = [word for path in mounts for word in ("--volume", path)]
        options += [word for argument in (*given, *arguments) for word in ("--build-arg", argument)]
        self._bud(ROOT / "services" / role / "Dockerfile", name, *options, ".")
        return name

    def _bud(self, file: Path, name: str, *more: str) -> None:
        # The OCI format has no HEALTHCHECK.
        command = ("bud", "--format", "docker", "--pull-never", "--file", str(file), "--tag", name)
        self.buildah(*command, *more, apart=True)

    def unpack(self, name: str) -> tuple[str, Path]:
        """Create a container of the image `name`; return its id and its root folder. End it by `remove`."""
        container = self.buildah("from", "--pull-never", name).strip()
        return container, Path(self.buildah("mount", container).strip())

    def remove(self, container: str) -> None:
        """Remove a container that `unpack` created."""
        self.buildah("rm", container)
