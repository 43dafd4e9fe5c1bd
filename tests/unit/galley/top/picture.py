"""`make top-picture`: the dashboard, as it shows the committed sample, as docs/images/top.svg."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from galley.top.view import render
from tests.unit.galley.top.sample import screen

PATH = Path(__file__).parents[4] / "docs" / "images" / "top.svg"
WIDTH = 80
_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def picture() -> str:
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(render(screen(), WIDTH))
    return _FONTS.sub("", console.export_svg(title="galley top", unique_id="top")) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(picture())
