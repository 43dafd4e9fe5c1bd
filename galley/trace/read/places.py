"""Find this user's trace files on this machine; the newest is the default."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from galley.trace.read.otlp_file import rotated

_PATTERN = "traces-*.jsonl"
_KEPT = 4


def trace_dir() -> Path:
    """$GALLEY_TRACE_DIR, else galley/traces in $XDG_STATE_HOME or ~/.local/state. It may not exist yet."""
    own = os.environ.get("GALLEY_TRACE_DIR")
    if own:
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "galley" / "traces"


def new_file(directory: Path) -> Path:
    """Return the path of a new file; only the newest few of the others are kept. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in _newest_first(directory)[_KEPT - 1 :]:
        old.unlink(missing_ok=True)
        rotated(old).unlink(missing_ok=True)
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return directory / f"traces-{began}-{os.getpid()}.jsonl"


def newest_file(directory: Path) -> Path | None:
    """Return the file that was written to last."""
    return next(iter(_newest_first(directory)), None)


def _newest_first(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob(_PATTERN), key=_written_ns, reverse=True)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # another stack has just removed it
