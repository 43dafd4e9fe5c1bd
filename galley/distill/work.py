"""The folder of a run: what it was made with, and files that are replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any

from galley.core.errors import InvalidField
from galley.distill.options import Options
from galley.distill.training.models import Target
from galley.engine.load.draft_directory import WEIGHTS

ORIGIN = "about.json"
CHECKPOINT, CURVE = "checkpoint.pt", "curve.jsonl"
# Options that may change when a run continues.
_MAY_DIFFER = {"against", "evaluate_every", "threads"}
_RESULTS = (
    "answers.jsonl",
    "prompts.jsonl",
    "train.npz",
    "heldout.npz",
    "labels",
    "features",
    CHECKPOINT,
    CURVE,
)
_READABLE = 0o644


def origin_of(options: Options, target: Target) -> dict[str, Any]:
    """Return what a run must agree on to continue another: options, contents of files, target's embedding.

    Raise InvalidField, naming the option, for a file that cannot be read.
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
    """Make `work` the folder of this run. Raise InvalidField if it holds results of another.

    A folder without results may be claimed again: a run whose prompts were refused left nothing.
    """
    path = work / ORIGIN
    if not any((work / name).exists() for name in _RESULTS):
        write_json(path, origin)
        return
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidField("work", f"{path}: must record a run: {error}; choose another directory") from error
    refuse_other(record, origin, path)


def refuse_other(record: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raise InvalidField, naming what differs, if the record in `path` is not `expected`."""
    other = sorted(name for name in expected.keys() | record.keys() if record.get(name) != expected.get(name))
    if other:
        got = ", ".join(f"{name} = {record.get(name)!r}" for name in other)
        constraint = f"must record the same options and inputs as this run, got {got}"
        raise InvalidField("work", f"{path}: {constraint}; choose another directory")


@contextmanager
def replacing(path: Path, mode: int = _READABLE) -> Iterator[Path]:
    """Yield a path to write to, which then replaces `path`: as a whole or not at all, even in a power cut."""
    unfinished = path.with_suffix(".part")
    yield unfinished
    unfinished.chmod(mode)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def kept_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file, if it exists; drop a last line that a kill cut.

    Raise InvalidField if a line cannot be read.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        os.truncate(path, end)
    try:
        return [json.loads(line) for line in text[:end].split(b"\n")[:-1]]
    except ValueError as error:
        raise InvalidField("work", f"{path}: a line cannot be read: {error}") from error
