"""`galley plan` as a user meets it: through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from galley.cli.plan import plan


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def output_of(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def json_of(*arguments: str) -> dict[str, object]:
    result = json.loads(output_of(*arguments, "--json"))
    assert isinstance(result, dict)
    return result


def test_the_textbook_case_is_printed_exactly() -> None:
    output = output_of("--tokens=12", "--k=4", "--confirmed-per-round=3", "--draft-cost-ratio=6")
    lines = [line.strip() for line in output.splitlines()]
    assert lines[1:] == [
        "4 target steps",
        "16 draft steps",
        "6.7 target-step equivalents",
        "1.8\N{MULTIPLICATION SIGN} fewer than 12",
    ]


def test_the_textbook_case_is_the_default() -> None:
    given = output_of("--tokens=12", "--k=4", "--confirmed-per-round=3", "--draft-cost-ratio=6")
    assert output_of() == given


@pytest.mark.parametrize(("confirmed", "passes"), [("2.5", 8), ("4", 5)])
def test_twenty_tokens_at_five(confirmed: str, passes: int) -> None:
    output = output_of("--tokens=20", "--k=5", f"--confirmed-per-round={confirmed}")
    assert f"{passes} target steps" in output


def test_a_loss_is_called_one() -> None:
    output = output_of("--confirmed-per-round=1", "--draft-cost-ratio=6")
    assert "1.7\N{MULTIPLICATION SIGN} more than 12" in output


def test_alpha_adds_the_table_its_peak_and_the_break_even() -> None:
    output = output_of("--alpha=0.8", "--max-k=8")
    assert "k=4, 3.362 confirmed per round" in output
    peaks = [line for line in output.splitlines() if line.rstrip(" │").endswith("peak")]
    assert len(peaks) == 1
    assert "The gain peaks at k=4: 2.02\N{MULTIPLICATION SIGN} plain decoding." in output
    assert "Speculation pays at all from \N{GREEK SMALL LETTER ALPHA}=0.167 on." in output


def test_where_nothing_pays_it_says_so() -> None:
    output = output_of("--alpha=0.9", "--row-costs=1:1,17:17")
    assert "Nothing pays: plain decoding (k=0) is best." in output
    assert "Speculation never pays here" in output


def test_json_is_one_object_with_the_same_numbers() -> None:
    result = json_of("--alpha=0.8", "--max-k=8", "--row-costs=1:1,5:1.02,16:1.3", "--confirmed-per-round=3")
    assert (result["passes"], result["draft_steps"]) == (4, 16)
    assert result["cost"] == pytest.approx(20 / 3)
    by_k = result["by_k"]
    assert isinstance(by_k, list)
    gains = [row["gain"] for row in by_k]
    assert gains[0] == 1
    assert result["best_k"] == gains.index(max(gains))
    assert result["best_gain"] == max(gains)
    assert result["row_costs"] == [[1, 1.0], [5, 1.02], [16, 1.3]]


def test_free_drafts_are_null_in_json_and_words_for_people() -> None:
    assert json_of("--draft-cost-ratio=inf")["draft_cost_ratio"] is None
    assert "drafts for free" in output_of("--draft-cost-ratio=inf")


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "gain.png"
    assert str(path) in output_of("--alpha=0.7", "--plot", str(path)).replace("\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_json_stays_one_object_beside_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "gain.png"
    assert json_of("--alpha=0.7", f"--plot={path}")["alpha"] == 0.7
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "option", "bound"),
    [
        (["--tokens=0"], "--tokens", ">= 1"),
        (["--confirmed-per-round=6"], "--confirmed-per-round", "in [1, 5]"),
        (["--draft-cost-ratio=0"], "--draft-cost-ratio", "> 0"),
        (["--alpha=1.5"], "--alpha", "in [0, 1]"),
        (["--alpha=0.5", "--max-k=0"], "--max-k", "in [1, 256]"),
        (["--alpha=0.5", "--sessions=0"], "--sessions", ">= 1"),
        (["--alpha=0.5", "--row-costs=5:1"], "--row-costs", "start with 1:1"),
        (["--plot=x.png"], "--plot", "needs --alpha"),
        (["--alpha=0.5", "--plot=/nowhere/x.png"], "--plot", "must be in a directory"),
    ],
)
def test_bad_input_is_refused_with_the_option_and_its_bound(
    arguments: list[str], option: str, bound: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    text = result.output + result.stderr
    assert option in text
    assert bound in text
