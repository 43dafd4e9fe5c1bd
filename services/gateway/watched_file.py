"""A file that is read anew where it has changed, as a mounted Secret does.

It is looked at in passing, as calls come in, at most once a second. One that cannot be read then is reported,
and what was read before stays in force.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from services.common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = get_logger(__name__)
_LOOK_AGAIN_S = 1.0

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """What `read` makes of the file at `path`; `what` is how the log calls it.

    Raises what `read` raises, ValueError or OSError, if it cannot be read at first.
    """

    def __init__(
        self, path: Path, what: str, read: Callable[[Path], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._what = what
        self._read = read
        self._clock = clock
        self._looked_s = clock()
        self._seen = _version(path)
        self._held = read(path)

    def now(self) -> T:
        """As it is by now, or was a second ago."""
        if self._clock() - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = self._clock()
            self._look_again()
        return self._held

    def _look_again(self) -> None:
        """A small local file, seldom: not worth a thread."""
        try:
            version = _version(self._path)
            if version == self._seen:
                return
            self._seen = version
            self._held = self._read(self._path)
        except (OSError, ValueError) as error:
            _log.error(f"{self._what} could not be read anew; what was read before stays", problem=str(error))
        else:
            _log.info(f"read {self._what} anew")


def _version(path: Path) -> tuple[int, int, int]:
    """Another whenever the file is: a mounted Secret is replaced as a whole."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
