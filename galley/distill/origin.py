"""What the folder of a run was begun with, so that no answers or labels of other options are taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField
from galley.distill.export import write_json
from galley.distill.options import Options
from galley.distill.training.teacher import Target
from galley.engine.load.draft_directory import WEIGHTS

ORIGIN = "about.json"
# What may differ between a run and the one that it goes on from.
_MAY_DIFFER = {"against", "evaluate_every", "threads"}
_RESULTS = (
    "answers.jsonl", "prompts.jsonl", "train.npz", "heldout.npz", "labels", "checkpoint.safetensors",
    "curve.jsonl",
)  # fmt: skip


def origin_of(options: Options, target: Target) -> dict[str, Any]:
    """What a run must agree on to go on from another: options, the files' contents, the target's embedding.

    Raises InvalidField, naming the option, for a file that cannot be read.
    """
    told = {name: value for name, value in options.as_dict().items() if name not in _MAY_DIFFER}
    held_out = () if options.held_out is None else (options.held_out,)
    return told | {
        "target_sha256": target.embedding_sha256(),
        "start_sha256": _digests("start", () if options.start is None else (options.start / WEIGHTS,)),
        "prompts_sha256": _digests("prompts", options.prompts),
        "corpus_sha256": _digests("corpus", options.corpus),
        "held_out_sha256": _digests("held_out", held_out),
    }


def _digests(option: str, files: Sequence[Path]) -> list[str]:
    found = []
    for path in files:
        try:
            with path.open("rb") as file:
                found.append(file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise InvalidField(option, f"{path} cannot be read: {error}") from error
    return found


def claim(work: Path, origin: dict[str, Any]) -> None:
    """Make `work` the folder of this run. Raises InvalidField if it holds results of another.

    A folder without results may be claimed anew: a run that was refused for its prompts left nothing.
    """
    path = work / ORIGIN
    if any((work / name).exists() for name in _RESULTS):
        refuse_other(_read(path), origin, path)
    else:
        write_json(path, origin)


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidField("work", f"{path.parent} does not say what its run was: {error}") from error
    if not isinstance(told, dict):
        raise InvalidField("work", f"{path} is no JSON object")
    return told


def refuse_other(told: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Raise InvalidField, naming what differs, if what `path` told is not what is wanted."""
    other = sorted(name for name in wanted.keys() | told.keys() if told.get(name) != wanted.get(name))
    if other:
        was = ", ".join(f"{name} was {told.get(name)!r}" for name in other)
        raise InvalidField("work", f"{path} is of another run: {was}")
