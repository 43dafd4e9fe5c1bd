"""The folder of a learner: the drafts that it trained, and a record of its cycles without any content.

cycles.jsonl      one line a cycle: inputs as hashes and counts, options, figures, decision
drafts/VERSION    the drafts of the latest cycles
key               the key of the hashes that stand for principals and sessions in the record
lock              locked by the learner that runs
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from galley.core.content import token_bytes
from galley.core.errors import InvalidField
from galley.distill.follow.inputs import Chosen
from galley.distill.work import kept_lines, replacing

RECORD = "cycles.jsonl"
_KEY, _LOCK, _DRAFTS, _UNFINISHED = "key", "lock", "drafts", ".unfinished"
_KEY_BYTES = 32
_MOST_CYCLES = 1000
_KEPT_DRAFTS = 4
_OWNER_ONLY = 0o600


class Journal:
    def __init__(self, work: Path) -> None:
        """Create the folder, if it is new. Raise InvalidField if its record cannot be read."""
        self._work = work
        self._drafts = work / _DRAFTS
        self._drafts.mkdir(parents=True, exist_ok=True)
        self._key = _key_in(work / _KEY)
        self._cycles = kept_lines(work / RECORD)

    @property
    def cycles(self) -> Sequence[dict[str, Any]]:
        return self._cycles

    @property
    def next_cycle(self) -> int:
        return int(self._cycles[-1]["cycle"]) + 1 if self._cycles else 1

    def cycle(self, number: int) -> dict[str, Any]:
        """Return the line of a cycle. Raise InvalidField if there is none."""
        for cycle in self._cycles:
            if cycle["cycle"] == number:
                return cycle
        raise InvalidField("replay", f"must be a cycle in {self._work / RECORD}, got {number}")

    def append(self, cycle: dict[str, Any]) -> None:
        """Add a line; drop the oldest ones beyond the bound. Raise OSError; the file is then as it was."""
        self._cycles.append(cycle)
        if len(self._cycles) > _MOST_CYCLES:
            del self._cycles[: _MOST_CYCLES // 10]
            with replacing(self._work / RECORD) as unfinished:
                unfinished.write_text("".join(map(_line, self._cycles)), encoding="utf-8")
            return
        _append(self._work / RECORD, _line(cycle))

    # ------------------------------------------------------------------------------------ drafts --

    @property
    def unfinished(self) -> Path:
        """Return an empty folder for a draft that has no version yet."""
        folder = self._drafts / _UNFINISHED
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def keep(self, folder: Path, version: str) -> Path:
        """Make an unfinished draft the one of a version; return its folder."""
        kept = self._drafts / version
        shutil.rmtree(kept, ignore_errors=True)
        return folder.rename(kept)

    def folder_of(self, version: str) -> Path | None:
        """Return the folder of a draft that was trained here and is still kept."""
        folder = self._drafts / version
        return folder if version and (folder / "config.json").exists() else None

    def has_made(self, version: str) -> bool:
        """Return True for a draft that was trained here, also if it is no longer kept."""
        return bool(self.folder_of(version)) or any(cycle["version"] == version for cycle in self._cycles)

    def prune(self, needed: Collection[str]) -> None:
        """Remove all drafts but the needed ones and those of the latest cycles."""
        latest = [cycle["version"] for cycle in self._cycles[-_KEPT_DRAFTS:]]
        for folder in self._drafts.iterdir():
            if folder.name not in {*needed, *latest}:
                shutil.rmtree(folder)

    # ------------------------------------------------------------------------------------ hashes --

    def pseudonym(self, principal: str) -> str:
        return "p-" + self._hash(b"principal", principal.encode(), 4)

    def mark(self, session_id: str) -> str:
        """Return what stands for a session in the record."""
        return self._hash(b"session", session_id.encode(), 8)

    def digest(self, chosen: Sequence[Chosen]) -> str:
        """Return a hash of the content of sessions, in their order."""
        parts = [token_bytes([one.session.prompt_len, *one.session.tokens]) for one in chosen]
        return self._hash(b"content", b"".join(blake2b(part).digest() for part in parts), 16)

    def _hash(self, kind: bytes, data: bytes, size: int) -> str:
        return blake2b(data, digest_size=size, key=self._key, person=kind).hexdigest()


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Hold the lock of the folder, which is created. Raise InvalidField if another learner has it.

    The system releases it however the process ends.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{work}: must not be in use by another learner; stop that one first"
            raise InvalidField("out", problem) from None
        yield


def _key_in(path: Path) -> bytes:
    """Return the key in a file, which is made whole or not at all."""
    if not path.exists():
        with replacing(path, _OWNER_ONLY) as unfinished, open(unfinished, "wb", opener=_owner_only) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise InvalidField("out", f"{path}: must have {_KEY_BYTES} bytes, got {len(key)}")
    return key


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, _OWNER_ONLY)


def _append(path: Path, line: str) -> None:
    """Add a line to a file, to the disk. Raise OSError; the file is then as it was."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(FileNotFoundError):
            os.truncate(path, size)  # the next line would follow a part of this one
        raise


def _line(cycle: dict[str, Any]) -> str:
    return json.dumps(cycle, separators=(",", ":")) + "\n"
