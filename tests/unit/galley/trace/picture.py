"""Draws docs/images/trace.png: the page of the committed sample, in a headless Chromium.

With `sample`, writes the sample anew from the spans of a file that `galley up --trace` has written:
`python -m tests.unit.galley.trace.picture sample FILE SESSION_ID`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from galley.trace.read.build import stories_of
from galley.trace.read.library import find, index_of
from galley.trace.read.model import Story
from galley.trace.read.otlp_file import Lines, spans_in
from galley.trace.show.html import page
from tests.fakes.browser import Browser, find_browser
from tests.fakes.trace_builder import Scene, write

_HIGHEST = 1500
SAMPLE = Path(__file__).with_name("sample.jsonl")
PICTURE = Path(__file__).parents[4] / "docs" / "images" / "trace.png"


def sample() -> Story:
    lines = Lines(SAMPLE)
    results = [find(lines, entry.session_id) for entry in index_of(lines).entries]
    stories = [stories_of(one.spans, one.session_id, one.index.sessions_of) for one in results]
    return max((story for (story,) in stories), key=lambda story: len(story.rounds))


def draw() -> None:
    path = find_browser()
    if path is None:
        raise SystemExit("there is no chromium here")
    story = sample()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.html"
        file.write_text(page(story), encoding="utf-8")
        with Browser(path, Path(directory) / "profile", height=1000) as browser:
            browser.open(file.as_uri())
            browser.value("document.querySelector('.slowest').open = true")
            PICTURE.parent.mkdir(exist_ok=True)
            PICTURE.write_bytes(browser.picture(_HIGHEST))


def take_sample(file: Path, session_id: str) -> None:
    result = find(Lines(file), session_id).spans
    traces = {span.trace_id for span in result} | {link.trace_id for span in result for link in span.links}
    everything = (span for line in Lines(file) for span in spans_in(line.document()))
    company = [span for span in everything if span.is_request and span.trace_id in traces]
    SAMPLE.unlink(missing_ok=True)
    write(Scene(spans=list({span.key: span for span in (*result, *company)}.values())), SAMPLE)


def main() -> None:
    match sys.argv[1:]:
        case []:
            draw()
        case ["sample", file, session_id]:
            take_sample(Path(file), session_id)
        case given:
            raise SystemExit(f"what is {given}? {__doc__}")


if __name__ == "__main__":
    main()
