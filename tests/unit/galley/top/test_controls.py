"""The keys of the dashboard, and a narrow terminal, on which nothing is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.top.controls import SORTS, Controls, keys_of
from galley.top.screen import Kv, Replica, Screen
from galley.top.view import render
from tests.unit.galley.top.sample import screen
from tests.unit.galley.top.shown import plain

ROWS = [
    Replica("gateway", "gateway", "10.0.0.1:5", "up", sessions=6.0),
    Replica("target", "target", "10.0.0.2:5", "up", sessions=1.0, queue=4, oldest_s=0.5, kv=Kv(9, 1, 90)),
    Replica(
        "target", "target-2", "10.0.0.3:5", "draining", sessions=3.0, queue=9, rows=8.0, kv=Kv(50, 0, 50)
    ),
    Replica("draft", "draft", "", "away", problem="no response in 2 s", away_s=75.0),
]


def a_screen() -> Screen:
    return replace(screen(), replicas=list(ROWS))


def pressed(text: str, controls: Controls | None = None) -> Controls:
    controls = controls or Controls()
    for key in keys_of(text):
        controls.press(key, a_screen())
    return controls


def names(controls: Controls) -> list[str]:
    return [row.name for row in controls.arrange(a_screen()).replicas]


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    assert keys_of("s\x1b[A\x1bOB\x1b\r\x7fq") == ["s", "up", "down", "escape", "enter", "backspace", "q"]


@pytest.mark.parametrize(
    ("presses", "expected"),
    [
        ("", ["gateway", "target", "target-2", "draft"]),
        ("s", ["gateway", "target-2", "target", "draft"]),
        ("ss", ["target-2", "target", "gateway", "draft"]),
        ("sss", ["target", "gateway", "target-2", "draft"]),
        ("ssss", ["target-2", "gateway", "target", "draft"]),
        ("sssss", ["target-2", "target", "gateway", "draft"]),
        ("ssssss", ["gateway", "target", "target-2", "draft"]),
    ],
    ids=[*SORTS, "again"],
)
def test_s_sorts_by_the_next_column_with_the_highest_first(presses: str, expected: list[str]) -> None:
    assert names(pressed(presses)) == expected


def test_a_filter_is_typed_and_left_again() -> None:
    controls = pressed("/TARGx\x7f")
    assert names(controls) == ["target", "target-2"]
    assert "/ filter: TARG_" in plain(render(a_screen(), 80, 24, controls), 80)
    assert not pressed("q", controls).is_over, "q is typed"
    pressed("\x7f\r", controls)
    assert names(controls) == ["target", "target-2"]
    assert names(pressed("\x1b", controls)) == [row.name for row in ROWS]
    assert names(pressed("/away\r")) == ["draft"]
    workloads = pressed("/chat\r").arrange(a_screen()).workloads
    assert [workload.name for workload in workloads] == ["chat"]


def test_a_replica_is_selected_and_its_details_are_shown() -> None:
    controls = pressed("jj\x1b[A\x1b[B\r")
    shown = plain(render(a_screen(), 60, 24, controls), 60)
    assert shown.splitlines()[0] == "galley top · target"
    assert "9 of 100 blocks in use, 1 cached" in shown
    assert "10.0.0.2:5" in shown
    assert controls.details(a_screen()) == ROWS[1]
    assert controls.details(replace(a_screen(), replicas=[])) is None, "it is gone"
    assert pressed("\r", controls).details(a_screen()) is None
    away = plain(render(a_screen(), 60, 24, pressed("jjjjjjjj\r")), 60)
    assert "away: no response in 2 s, for 75s" in away


def test_help_lists_the_keys_and_is_left() -> None:
    controls = pressed("?")
    shown = plain(render(a_screen(), 60, 24, controls), 60)
    assert "sort the replicas by the next column" in shown
    assert "tokens/s" not in shown
    assert "tokens/s" in plain(render(a_screen(), 60, 24, pressed("?", controls)), 60)


@pytest.mark.parametrize("key", ["q", "Q", "\x03", "\x04"])
def test_the_end(key: str) -> None:
    assert pressed(key).is_over
    assert pressed("?" + key).is_over


@pytest.mark.parametrize("height", [None, 40])
def test_nothing_is_cut_at_60_columns(height: int | None) -> None:
    long = replace(
        a_screen(),
        replicas=[*ROWS, Replica("target", "target-of-a-long-name.example:9464", "", "leased", queue=2)],
        workloads=[replace(screen().workloads[0], name="summaries-of-long-reports")],
        problem="the store at 10.0.0.9:6379 did not answer within 2 s; the last answer is 75 s old",
    )
    shown = plain(render(long, 60, height), 60)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 60
    squeezed = "".join(shown.split())
    for text in (
        *("rates:10s,others:60s", "tokens/s206.3", "speed-up1.09×", "pertoken31ms/50ms", "breakersclosed"),
        *("the last answer is 75 s old".replace(" ", ""), "draft:noresponsein2s,for75s", "draining", "50%"),
    ):
        assert text in squeezed
    names = "".join(
        line.split()[1] if line.startswith("target") else line.strip() for line in shown.splitlines()
    )
    assert "summarie" in names
    assert plain(render(long, 60, height), 60).count("target") >= 3
