"""What is to be seen, at 80 by 24 and wider. Rewrite what is expected with GALLEY_REWRITE_GOLDEN=1."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from galley.top.screen import Replica
from galley.top.versions import ALL_STABLE, Audits, DraftVersion
from galley.top.view import duration, number, percent, render, share, times_of
from tests.unit.galley.top import picture
from tests.unit.galley.top.sample import screen
from tests.unit.galley.top.shown import plain

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str, output: str) -> None:
    path = GOLDEN / name
    if os.environ.get("GALLEY_REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(output)
    assert output == path.read_text()


@pytest.mark.parametrize(("name", "width", "height"), [("80x24.txt", 80, 24), ("140x40.txt", 140, 40)])
def test_a_frame(name: str, width: int, height: int) -> None:
    output = plain(render(screen(), width, height), width)
    golden(name, output)
    assert len(output.splitlines()) <= height
    assert max(map(len, output.splitlines())) <= width


def test_a_replica_that_is_away() -> None:
    output = plain(render(screen(without="target-2", why="no response in 2 s"), 80, 24), 80)
    golden("away.txt", output)
    assert "3 of 4 up" in output


def versions(*others: str) -> list[DraftVersion]:
    return [
        DraftVersion(ALL_STABLE, "stable", 0.95, None, 1520, 0.31),
        DraftVersion("9f3c2a77d0b1e8f4", "canary", 0.05, 1, 84, 0.462),
        DraftVersion("v1", "stable", None, 3, 0, None),
        *(DraftVersion(name, "drained", None, 1, 12, 0.2) for name in others),
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_versions_of_drafts_and_audits(width: int) -> None:
    audited = replace(screen(), versions=versions(), audits=Audits(1_250_000, 3, 0))
    output = plain(render(audited, width, 24), width)
    golden(f"versions-{width}.txt", output)
    assert "incidents" not in output
    incident = plain(render(replace(audited, audits=Audits(5, 1, 1)), width, 24), width)
    assert "audited tokens 5  differing 1  incidents 1" in incident


def test_versions_share_the_lines_with_other_rows() -> None:
    full = screen()
    rows = [Replica("target", f"10.0.0.{n}:9464", "", "up") for n in range(40)]
    many = replace(full, replicas=rows, versions=versions(*(f"v{n}" for n in range(2, 20))))
    output = plain(render(many, 80, 24), 80).splitlines()
    assert len(output) <= 24
    assert "and 19 more" in output
    assert "v19" in plain(render(many, 80), 80)


def test_rows_that_do_not_fit_are_counted() -> None:
    full = screen()
    rows = [Replica("target", f"10.0.0.{n}:9464", "", "up") for n in range(40)]
    many = replace(full, replicas=rows, workloads=full.workloads[:4] * 8)
    output = plain(render(many, 80, 24), 80).splitlines()
    assert len(output) <= 24
    assert sum("10.0.0." in line for line in output) == 6
    assert "and 34 more" in output
    assert "and 25 more" in output
    whole = plain(render(many, 80), 80)
    assert "more" not in whole, "where lines are not bounded, all are shown"
    assert sum("10.0.0." in line for line in whole.splitlines()) == 40


@pytest.mark.parametrize(
    ("room", "first", "second", "output"),
    [
        (None, 99, 99, (99, 99)),
        (16, 8, 8, (8, 8)),
        (16, 40, 2, (13, 2)),
        (16, 2, 40, (2, 13)),
        (16, 40, 40, (7, 7)),
        (-5, 9, 9, (1, 1)),
    ],
)
def test_room_is_shared(room: int | None, first: int, second: int, output: tuple[int, int]) -> None:
    assert share(room, first, second) == output


def test_names_are_no_markup() -> None:
    strange = replace(screen(), replicas=[Replica("target", "[bold]x[/]", "", "away", "[red]gone")])
    output = plain(render(strange, 80, 24), 80)
    assert "[bold]x[/]" in output
    assert "[red]gone" in output


def test_the_picture_in_the_docs_is_of_the_sample() -> None:
    assert picture.PATH.read_text() == picture.picture()
    assert "http" not in picture.PATH.read_text().replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0, "0.0"),
        (12.345, "12.3"),
        (1234.5, "1234"),
        (12345, "12.3k"),
        (2.5e6, "2.5M"),
        (3e9, "3.0G"),
        (1e300, "1e+291G"),
    ],
)
def test_numbers_are_short(value: float | None, written: str) -> None:
    assert number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (None, "-"),
        (0, "0"),
        (0.00034, "340us"),
        (0.0071, "7.1ms"),
        (0.0624, "62ms"),
        (0.9996, "1000ms"),
        (1.24, "1.2s"),
        (99.9, "100s"),
        (180, "3m"),
        (float("inf"), "-"),
    ],
)
def test_durations_are_short(seconds: float | None, written: str) -> None:
    assert duration(seconds) == written


def test_shares_and_ratios() -> None:
    assert (percent(0.614), percent(None), percent(1e300), percent(float("nan"))) == ("61%", "-", "-", "-")
    assert (times_of(1.4159), times_of(None)) == ("1.42×", "-")
