"""What a terminal is shown: as committed, in 80 columns, with colours and without, and nothing that it obeys.

Rewrite the committed outputs with GALLEY_REWRITE_GOLDEN=1.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from galley.core import names
from galley.trace.read.build import stories_of
from galley.trace.read.model import Story
from galley.trace.read.spans import Process, Span
from galley.trace.show.waterfall import plain_lines, show
from tests.fakes import trace_scenes as scenes
from tests.fakes.trace_builder import BEGAN_NS, SESSION, Scene, ns

GOLDEN = Path(__file__).parent / "golden"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def text_of(story: Story, *, width: int = 80, colours: bool = False, everything: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
        highlight=False,
        legacy_windows=False,
    )
    show(story, console, everything=everything)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def story_of(scene: Scene) -> Story:
    (story,) = scene.stories(SESSION)
    return story


@pytest.mark.parametrize("name", ["eventful", "long", "resumed"])
def test_as_committed(name: str) -> None:
    text = text_of(story_of(getattr(scenes, name)()))
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("GALLEY_REWRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_documented_screen_is_current() -> None:
    page = Path(__file__).parents[4] / "docs" / "observe" / "tracing.md"
    assert (GOLDEN / "eventful.txt").read_text(encoding="utf-8") in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["eventful", "long", "resumed", "hostile"])
def test_it_fits_the_width(name: str, width: int) -> None:
    text = text_of(story_of(getattr(scenes, name)()), width=width)
    assert max(map(len, text.splitlines())) <= max(width, 60)


def test_colours_add_nothing_but_colours() -> None:
    story = story_of(scenes.eventful())
    coloured = text_of(story, colours=True)
    assert "\x1b[33m█" in coloured
    for plain, bare in zip(text_of(story).splitlines(), _ESCAPES.sub("", coloured).splitlines(), strict=True):
        before_bar = bare.split("█")[0]
        assert plain.startswith(before_bar)
        assert len(plain.rstrip()) == len(bare.rstrip())


def test_a_bar_shows_each_part_in_proportion() -> None:
    scene = Scene()
    scene.request().round(draft=10, queue=20, compute=30, wire=15, commit=5).end()
    (line,) = [line for line in text_of(scene.story(), width=125).splitlines() if line.startswith("> ")]
    bar = line.split()[-1]
    assert bar == "D" * 10 + "Q" * 20 + "C" * 30 + "W" * 15 + "L" * 5


def test_long_answer_is_shortened_unless_all_is_set() -> None:
    story = story_of(scenes.long(400))
    short, whole = text_of(story), text_of(story, everything=True)
    assert len(short.splitlines()) < 60
    assert "> " in short
    assert re.search(r"\.\.\. 1\d\d rounds, .* none above 31\.0 ms", short)
    assert sum(bool(re.match(r"[> ] +\d+ +", line)) for line in whole.splitlines()) == 400


def test_of_very_many_events_the_first_are_shown() -> None:
    scene = Scene()
    request = scene.request().round().idle(5)
    for _ in range(50):
        request.event(names.STORE_RETRIED)
    request.end()
    text = text_of(scene.story())
    assert text.count("! store.retried") == 20
    assert "... 30 more events" in text
    assert text_of(scene.story(), everything=True).count("! store.retried") == 50


def test_control_codes_are_not_sent_to_the_terminal() -> None:
    text = text_of(story_of(scenes.hostile()), colours=True)
    assert "script" in text
    left = _ESCAPES.sub("", text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", left)
    assert "\x1b[31m\x07" not in text


def test_answer_without_rounds_is_explained_by_its_totals() -> None:
    scene = Scene()
    fields = {names.SLOWEST_ROUND_NS: ns(99), names.SLOWEST_ROUND_POSITION: 120, names.ROUNDS: 40}
    scene.request(attributes=fields).event(names.CLIENT_STALLED, stalled_ns=ns(30)).end()
    text = " ".join(text_of(scene.story()).split())
    assert "the slowest was at position 120 and took 99.0 ms" in text
    assert "40 rounds of it are not in the trace" in text
    assert "client.stalled: stalled 30.0 ms" in text


def test_the_time_a_token_is_left_out_if_the_first_request_is_not_in_the_trace() -> None:
    scene = Scene()
    request = scene.request(prompt=100, position=580, resumed=True)
    request.event(names.SESSION_RESUMED, index=480).round().end()
    assert "a token" not in text_of(scene.story())


def test_the_form_of_an_answer_is_named() -> None:
    scene = Scene()
    scene.request(attributes={names.GRAMMAR_KIND: "json_schema"}).round().end()
    assert "workload chat · form json_schema · " in text_of(scene.story())


def test_another_systems_trace_is_shown_plainly() -> None:
    trace_id = "f" * 32
    root = Span(trace_id, "a" * 16, "", f"GET /{scenes.HOSTILE}", BEGAN_NS, BEGAN_NS + ns(9), Process("web"))
    child = Span(trace_id, "b" * 16, "a" * 16, "SELECT", BEGAN_NS + ns(2), BEGAN_NS + ns(5), Process("db"))
    lines = [line.plain for line in plain_lines([child, root])]
    assert re.match(r" +0\.0 +9\.0 ms  GET /<script>", lines[0])
    assert lines[1] == "      2.0       3.0 ms    SELECT (db)"
    many = [
        Span(trace_id, f"{n:016x}", f"{n - 1:016x}", "deep", n, n + 1, Process("x")) for n in range(2, 5000)
    ]
    lines = [line.plain for line in plain_lines(many)]
    assert len(lines) == 201
    assert lines[-1].endswith("4,798 more spans")
    assert stories_of(many) == ()
