"""Files that settings name, read anew when they change: a mounted Secret is replaced while processes run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from galley.common.server.logs import get_logger

T = TypeVar("T")
Version = tuple[int, int, int]

LOOK_EVERY_S = 1.0
"""How often those who ask all the time have their files looked at."""

_MAX_BYTES = 4 * 2**20
"""No certificate, key, list of keys or bundle of authorities is nearly as large; a device has no end."""
_TRIES = 3
_TRY_AGAIN_S = 1.0

_log = get_logger(__name__)


class BadFile(ValueError):
    """A file is of no use: `setting` is the field that names it, `problem` says why, without its content.

    `may_pass`: the very same file may be of use later.
    """

    def __init__(self, setting: str, problem: str, *, may_pass: bool = False) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting
        self.problem = problem
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class NamedFile:
    """The file at `path`, which the field `setting` names."""

    setting: str
    path: str

    def bad(self, why: str, *, may_pass: bool = False) -> BadFile:
        """What to raise of it."""
        return BadFile(self.setting, f"{self.path}: {why}", may_pass=may_pass)

    def read(self) -> bytes:
        """Its content. Raises BadFile."""
        try:
            with Path(self.path).open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise self.bad(error.strerror or "cannot be read", may_pass=True) from None
        if len(content) > _MAX_BYTES:
            raise self.bad(f"is larger than {_MAX_BYTES} bytes")
        return content

    def version(self) -> Version | None:
        """Another whenever the file is; None while there is none."""
        try:
            stat = Path(self.path).stat()
        except OSError:
            return None
        # Not when it was written: a file that was forbidden may be allowed since.
        return stat.st_ctime_ns, stat.st_ino, stat.st_size


class WatchedFiles(Generic[T]):
    """What `read` makes of some files, made anew when one of them has changed.

    They are looked at in passing, whenever somebody asks for it. What cannot be read by then is logged, once
    for each version of the files and each reason, and tried again where the same files may be of use later;
    meanwhile what was read before stays. For any thread.
    """

    def __init__(
        self,
        files: Sequence[NamedFile],
        read: Callable[[], T],
        *,
        look_every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` raises BadFile, and so does this; files are looked at every `look_every_s` at most."""
        self._files = files
        self._read = read
        self._look_every_s = look_every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = clock()
        self._try_again_s = math.inf
        self._told: object = None
        self._seen, self._value = self._read_together()

    def current(self) -> T:
        """The same object for as long as what is read is the same."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._looked_s >= self._look_every_s:
                self._looked_s = now_s
                self._look(now_s)
            return self._value

    def _look(self, now_s: float) -> None:
        seen = self._versions()
        if seen == self._seen and now_s < self._try_again_s:
            return
        self._seen = seen
        try:
            self._seen, value = self._read_together()
        except BadFile as error:
            # Too many files are open, say, or its time has not come yet. Else only another file can help.
            self._try_again_s = now_s + _TRY_AGAIN_S if error.may_pass else math.inf
            self._tell(error)
            return
        self._try_again_s, self._told = math.inf, None
        if value != self._value:
            self._value = value
            _log.info("read files anew", settings=[file.setting for file in self._files])

    def _tell(self, error: BadFile) -> None:
        if self._told != (told := (self._seen, str(error))):
            self._told = told
            _log.error("files could not be read anew; those read before stay", problem=str(error))

    def _read_together(self, tries: int = _TRIES) -> tuple[Sequence[Version | None], T]:
        """All of one moment: a key of now and a certificate of before would not fit together."""
        before = self._versions()
        try:
            value: T | BadFile = self._read()
        except BadFile as error:
            value = error
        if tries > 1 and self._versions() != before:
            return self._read_together(tries - 1)
        if isinstance(value, BadFile):
            raise value
        return before, value

    def _versions(self) -> Sequence[Version | None]:
        return [file.version() for file in self._files]
