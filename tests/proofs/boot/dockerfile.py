"""How an image runs, read from its Dockerfile: ENTRYPOINT, CMD, ENV, USER and WORKDIR of the last stage."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage has said so far."""

    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": _BASE_PATH})
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""
    workdir: str = "/"

    def ids(self) -> tuple[int, int]:
        """User and group by number; raises ValueError for one by name, which `runAsNonRoot` refuses."""
        user, _, group = self.user.partition(":")
        return int(user or 0), int(group or user or 0)


def last_stage(path: Path) -> Stage:
    """Of the Dockerfile at `path`; raises ValueError where there is none."""
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
            stage = _told(stage, word, rest, args)
        if stage is not None and name:
            stages[name] = stage
    if stage is None:
        raise ValueError(f"{path} has no FROM")
    return stage


def _told(stage: Stage, word: str, rest: str, args: Mapping[str, str]) -> Stage:
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
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[3], found[2] or ""), text)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()
