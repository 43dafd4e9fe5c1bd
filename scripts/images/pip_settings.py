"""Pass this machine's pip settings (indexes, wheels, certificates) to the pip of a build."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

_TAKEN = ("cert", "extra-index-url", "find-links", "index-url", "no-index", "proxy", "trusted-host")
_LINE = re.compile(r"^(?:global|install|:env:)\.([a-z-]+)=(.+)$", re.MULTILINE)


def here() -> str:
    """Return the settings of `pip config list`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603  # fixed words


def pip_conf(listed: str) -> str:
    """Return a pip.conf with the sources in `listed`, of which later lines (the environment) win."""
    settings = {name: str(ast.literal_eval(value)) for name, value in _LINE.findall(listed)}
    lines = [f"{name} = {' '.join(settings[name].split())}" for name in _TAKEN if name in settings]
    return "\n".join(["[global]", *lines, ""])


def folders(conf: str) -> tuple[Path, ...]:
    """Return the folders that the settings name, which a build must see."""
    paths = (Path(urlsplit(word).path) for word in conf.split() if word.startswith(("/", "file://")))
    # An index on disk links to files beside it.
    return tuple(sorted({path.parent if path.name == "simple" else path for path in paths if path.exists()}))
