"""Read the files that settings name, and again when they change, as when a mounted Secret is replaced.

After the start, files are looked at and read in threads only: a mount may hang, and content may be slow to
parse. Clients import this, so it logs by the standard library (`galley.common.logs` formats both).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from galley.common.regular_file import read_regular

T = TypeVar("T")
Version = tuple[int, int, int]

CHECK_INTERVAL_S = 1.0
"""The time between two checks of files whose content is needed all the time."""

CALL_PATIENCE_S = 0.1
"""The longest that a call waits for a check: others notice what delays their calls."""

_MAX_BYTES = 4 * 2**20
"""Far more than any certificate, key, list of keys or bundle of authorities."""
_ATTEMPTS = 3
_RETRY_S = 1.0
_CHECK_PATIENCE_S = 1.0
_STALLED_S = 10.0

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
        """Return the content. Raise BadFile."""
        try:
            return read_regular(self.path, _MAX_BYTES)
        except OSError as error:
            raise self.bad(error.strerror or "cannot be read", may_pass=True) from None
        except ValueError as error:
            raise self.bad(str(error)) from None

    def version(self) -> Version | None:
        """Return a value that differs whenever the file does; None while there is no file."""
        try:
            stat = Path(self.path).stat()
        except OSError:
            return None
        # The change time, not the modification time: permissions may have changed.
        return stat.st_ctime_ns, stat.st_ino, stat.st_size


@dataclass(slots=True)
class _Check:
    """One look at the files, which runs in a thread of its own until `done`."""

    done: Future[None] = field(default_factory=Future)
    started_s: float = field(default_factory=time.monotonic)
    is_logged: bool = False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def left_s(self, patience_s: float) -> float:
        """Return how long callers may still wait for it: only the first ones wait for a mount that hangs."""
        return max(0.0, patience_s - self.age_s)


class WatchedFiles(Generic[T]):
    """The value that `read` makes of some files, made again when one of them changes.

    Files are checked, in a thread, when the value is asked for. If the new files cannot be read, or not yet,
    the earlier value stays. The failure is logged once for each version and reason; a passing one is retried.
    Safe for several threads.
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
        self._running: _Check | None = None
        self._retry_at_s = math.inf
        self._logged: object = None
        self._versions_read, self._value = self._read_together()

    def current(self) -> T:
        """Return the value, after a wait of at most 1 s for a check that is due. Call it in a thread.

        It is the same object as long as what is read is equal.
        """
        if (check := self._check()) is not None:
            wait([check.done], check.left_s(_CHECK_PATIENCE_S))
        return self._value

    async def checked(self, patience_s: float = _CHECK_PATIENCE_S) -> T:
        """Return what `current` returns, without holding the event loop; wait for at most `patience_s`."""
        if (check := self._check()) is not None and (left_s := check.left_s(patience_s)):
            await asyncio.wait([asyncio.wrap_future(check.done)], timeout=left_s)
        return self._value

    def latest(self) -> T:
        """Return the value of the last check that has ended; begin one if it is due. Never wait."""
        self._check()
        return self._value

    def _check(self) -> _Check | None:
        """Return the check that runs, begun now if one is due; None if the value is recent enough."""
        with self._lock:
            now_s = self._clock()
            if self._running is not None:
                self._log_if_stalled(self._running)
            elif now_s - self._checked_s >= self._check_interval_s:
                self._checked_s = now_s
                self._running = self._begin(now_s)
            return self._running

    def _begin(self, now_s: float) -> _Check | None:
        check = _Check()
        # No pool: at the end of the process it would wait for a mount that hangs.
        thread = threading.Thread(target=self._run, args=(check, now_s), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter ends: the next call tries again
            return None
        return check

    def _log_if_stalled(self, check: _Check) -> None:
        if check.age_s > _STALLED_S and not check.is_logged:
            check.is_logged = True
            paths = [file.path for file in self._files]
            _LOG.error("files cannot be checked; the earlier ones stay in use", extra={"paths": paths})

    def _run(self, check: _Check, now_s: float) -> None:
        try:
            self._read_changes(now_s)
        finally:
            with self._lock:
                self._running = None
            check.done.set_result(None)

    def _read_changes(self, now_s: float) -> None:
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
