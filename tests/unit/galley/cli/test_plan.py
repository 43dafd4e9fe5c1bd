"""`galley plan` as a user meets it: through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from galley.bench.report import as_dict, report_of
from galley.cli.planning.plan import plan
from tests.unit.galley.bench.blocks import block, rounds_of


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


def bench_record(tmp_path: Path) -> Path:
    """Write what `galley bench --json` prints: a rewrite of acceptance 3/4, a chat of 1/4."""
    blocks = []
    for workload, accepted in (("rewrite", 30), ("chat", 10)):
        blocks += [
            block("off", 0.03, workload=workload, rounds=rounds_of(0, 0, target_ms=30)),
            block(
                "auto",
                0.02,
                workload=workload,
                rounds=rounds_of(40, accepted, target_ms=45, draft_ms=24),
            ),
        ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(as_dict(report_of(blocks, "off", "m"))))
    return path


def test_a_measurement_gives_acceptance_row_costs_and_draft_cost(tmp_path: Path) -> None:
    path = bench_record(tmp_path)
    figures = json_of("--from", str(path))
    # 10 rounds propose 80 draft tokens in 240 ms; a target step of one row takes 30 ms, of five rows 45.
    assert figures["alpha"] == pytest.approx(40 / 80)
    assert figures["draft_cost_ratio"] == pytest.approx(10.0)
    assert figures["row_costs"] == [[1, 1.0], [5, 1.5]]
    rewrite = json_of("--from", str(path), "--workload=rewrite", "--draft-cost-ratio=20")
    assert (rewrite["alpha"], rewrite["draft_cost_ratio"]) == (pytest.approx(0.75), 20.0)
    printed = output_of("--from", str(path), "--workload=chat").splitlines()[0]
    assert printed == (
        "Measured on chat (auto): acceptance rate 0.250, 10 draft steps to a target step, row costs 1:1,5:1.5"
    )


def test_a_measurement_completes_the_file_of_a_load(tmp_path: Path) -> None:
    load = tmp_path / "load.toml"
    load.write_text(
        "[load]\nanswers_per_s = 0.1\nprompt_tokens = 100\noutput_tokens = 50\n[target]\nkv_tokens = 4096\n"
        "max_sessions = 1\n"
    )
    flags = ("--capacity", str(load), "--from", str(bench_record(tmp_path)))
    at = json_of(*flags)["at"]
    assert isinstance(at, dict)
    assert at["k"] > 0
    load.write_text(load.read_text() + "[draft]\nalpha = 0\ncost_ratio = 1\n")
    given = json_of(*flags)["at"]
    assert isinstance(given, dict)
    assert given["k"] == 0


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        ("{", (), "must be what `galley bench --json` printed"),
        ("[]", (), "must be what `galley bench --json` printed"),
        ('{"rows": [], "pass_ms_by_rows": [[1, 30]]}', (), "must hold a measurement with draft tokens"),
        (None, ("--workload=poems",), "must hold a workload 'poems', got rewrite, chat"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(
    content: str | None, arguments: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    path = bench_record(tmp_path)
    if content is not None:
        path.write_text(content)
    refused = run("--from", str(path), *arguments)
    assert refused.exit_code == 2
    assert problem in " ".join(refused.output.replace("│", " ").split())
