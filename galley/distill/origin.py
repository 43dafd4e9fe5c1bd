"""Record what a run's folder was made with, so that results of other options are not reused."""

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
# Options that may change when a run continues.
_MAY_DIFFER = {"against", "evaluate_every", "threads"}
_RESULTS = (
    "answers.jsonl", "prompts.jsonl", "train.npz", "heldout.npz", "labels", "checkpoint.safetensors",
    "curve.jsonl",
)  # fmt: skip


def origin_of(options: Options, target: Target) -> dict[str, Any]:
    """Return what a run must agree on to continue another: options, contents of files, target's embedding.

    Raises InvalidField, naming the option, for a file that cannot be read.
    """
    values = {name: value for name, value in options.as_dict().items() if name not in _MAY_DIFFER}
    held_out = () if options.held_out is None else (options.held_out,)
    return values | {
        "target_sha256": target.embedding_sha256(),
        "start_sha256": _digests("start", () if options.start is None else (options.start / WEIGHTS,)),
        "prompts_sha256": _digests("prompts", options.prompts),
        "corpus_sha256": _digests("corpus", options.corpus),
        "held_out_sha256": _digests("held_out", held_out),
    }


def _digests(option: str, files: Sequence[Path]) -> list[str]:
    digests = []
    for path in files:
        try:
            with path.open("rb") as file:
                digests.append(file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise InvalidField(option, f"{path}: cannot be read: {error}") from error
    return digests


def claim(work: Path, origin: dict[str, Any]) -> None:
    """Make `work` the folder of this run. Raises InvalidField if it holds results of another.

    A folder without results may be claimed again: a run whose prompts were refused left nothing.
    """
    path = work / ORIGIN
    if any((work / name).exists() for name in _RESULTS):
        refuse_other(_read(path), origin, path)
    else:
        write_json(path, origin)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidField("work", f"{path.parent}: the record of its run cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise InvalidField("work", f"{path}: must hold a JSON object")
    return record


def refuse_other(record: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raise InvalidField, naming what differs, if the record in `path` is not `expected`."""
    other = sorted(name for name in expected.keys() | record.keys() if record.get(name) != expected.get(name))
    if other:
        was = ", ".join(f"{name} was {record.get(name)!r}" for name in other)
        raise InvalidField("work", f"{path}: belongs to another run: {was}")
