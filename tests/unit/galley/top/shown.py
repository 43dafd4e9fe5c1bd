"""What a renderable looks like, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain(of: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(of)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())
