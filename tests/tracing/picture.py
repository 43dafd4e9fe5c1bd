"""Draws docs/images/trace.png: the page of the committed sample, in a headless Chromium.

With `sample`, writes the sample anew from the spans of a file that `galley up --trace` has written:
`python -m tests.tracing.picture sample FILE SESSION_ID`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from services.tracing.build import stories_of
from services.tracing.html import page
from services.tracing.library import find, index_of
from services.tracing.otlp_file import Lines
from tests.tracing.browser import Browser, find_browser
from tests.tracing.builder import Scene
from tests.tracing.files import write

SAMPLE = Path(__file__).with_name("sample.jsonl")
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "trace.png"


def draw() -> None:
    """Write the picture."""
    path = find_browser()
    if path is None:
        raise SystemExit("there is no chromium here")
    (newest,) = index_of(Lines(SAMPLE)).latest(1)
    found = find(Lines(SAMPLE), newest.session_id)
    (story,) = stories_of(found.spans, found.session_id, found.index.sessions_of)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.html"
        file.write_text(page(story), encoding="utf-8")
        with Browser(path, Path(directory) / "profile", height=1000) as browser:
            browser.open(file)
            browser.value("document.querySelector('.slowest').open = true")
            PICTURE.parent.mkdir(exist_ok=True)
            PICTURE.write_bytes(browser.picture(whole=True))


def take_sample(file: Path, session_id: str) -> None:
    """Keep what `galley trace` would show of a session."""
    found = find(Lines(file), session_id)
    SAMPLE.unlink(missing_ok=True)
    write(Scene(spans=list(found.spans)), SAMPLE)


def main() -> None:
    """As the file says."""
    match sys.argv[1:]:
        case []:
            draw()
        case ["sample", file, session_id]:
            take_sample(Path(file), session_id)
        case given:
            raise SystemExit(f"what is {given}? {__doc__}")


if __name__ == "__main__":
    main()
