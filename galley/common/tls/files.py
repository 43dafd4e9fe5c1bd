"""Read the files that settings name, and again when they change, as when a mounted Secret is replaced.

Clients import this, so it logs by the standard library (`galley.common.logs` formats both).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
Version = tuple[int, int, int]

CHECK_INTERVAL_S = 1.0
"""The time between two checks of files whose content is needed all the time."""

_MAX_BYTES = 4 * 2**20
"""Far more than any certificate, key, list of keys or bundle of authorities; a device has no end."""
_ATTEMPTS = 3
_RETRY_S = 1.0

_LOG = logging.getLogger(__name__)


class BadFile(ValueError):
    """A file cannot be used: `setting` is the field that names it, `problem` the reason, without content.

    With `may_pass` the same file may be usable later.
    """

    def __init__(self, setting: str, problem: str, *, may_pass: bool = False) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting
        self.problem = problem
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class NamedFile:
    setting: str
    path: str

    def bad(self, why: str, *, may_pass: bool = False) -> BadFile:
        return BadFile(self.setting, f"{self.path}: {why}", may_pass=may_pass)

    def read(self) -> bytes:
        try:
            with Path(self.path).open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise self.bad(error.strerror or "cannot be read", may_pass=True) from None
        if len(content) > _MAX_BYTES:
            raise self.bad(f"must be at most {_MAX_BYTES} bytes")
        return content

    def version(self) -> Version | None:
        """Return a value that differs whenever the file does; None while there is no file."""
        try:
            stat = Path(self.path).stat()
        except OSError:
            return None
        # The change time, not the modification time: permissions may have changed.
        return stat.st_ctime_ns, stat.st_ino, stat.st_size


class WatchedFiles(Generic[T]):
    """The value that `read` makes of some files, made again when one of them changes.

    Files are checked when `current` is called. If the new files cannot be read, the earlier value stays. The
    failure is logged once for each version and reason; a passing one is retried. Safe for several threads.
    """

    def __init__(
        self,
        files: Sequence[NamedFile],
        read: Callable[[], T],
        *,
        check_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files; check them at most every `check_interval_s`. Raise BadFile, as `read` does."""
        self._files = files
        self._read = read
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_s = clock()
        self._retry_at_s = math.inf
        self._logged: object = None
        self._versions_read, self._value = self._read_together()

    def current(self) -> T:
        """Return the value; the same object as long as what is read is equal."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= self._check_interval_s:
                self._checked_s = now_s
                self._check(now_s)
            return self._value

    def _check(self, now_s: float) -> None:
        versions = self._versions()
        if versions == self._versions_read and now_s < self._retry_at_s:
            return
        self._versions_read = versions
        try:
            self._versions_read, value = self._read_together()
        except BadFile as error:
            # Too many files are open, or the certificate is not valid yet. Else only another file can help.
            self._retry_at_s = now_s + _RETRY_S if error.may_pass else math.inf
            self._log_once(error)
            return
        self._retry_at_s, self._logged = math.inf, None
        if value != self._value:
            self._value = value
            _LOG.info("files reloaded", extra={"settings": [file.setting for file in self._files]})

    def _log_once(self, error: BadFile) -> None:
        if self._logged != (failure := (self._versions_read, str(error))):
            self._logged = failure
            _LOG.error("files not reloaded; the earlier ones stay in use", extra={"error": str(error)})

    def _read_together(self, attempts: int = _ATTEMPTS) -> tuple[Sequence[Version | None], T]:
        """Return versions and value of one moment: a new key and an old certificate would not match."""
        before = self._versions()
        try:
            value: T | BadFile = self._read()
        except BadFile as error:
            value = error
        if attempts > 1 and self._versions() != before:
            return self._read_together(attempts - 1)
        if isinstance(value, BadFile):
            raise value
        return before, value

    def _versions(self) -> Sequence[Version | None]:
        return [file.version() for file in self._files]
