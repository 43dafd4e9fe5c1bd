"""`make bench-engine` without a model: rows, goals, the curve, the record, its flags."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import engine
from bench.engine_summary import goals, invariance_rows, row_costs, step_rows
from galley.core.cost.model import RowCostCurve


def _step(sessions: int, tokens: int, ours_ms: float, peer_ms: float) -> dict[str, Any]:
    rows = sessions * tokens
    return {
        "sessions": sessions,
        "tokens": tokens,
        "context": 256,
        "rows": rows,
        "peer_form": "StaticCache",
        "ours": [ours_ms / 1e3] * 7,
        "peer": [peer_ms / 1e3] * 7,
        "ours_cpu": [ours_ms / 1e3] * 7,
        "peer_cpu": [peer_ms / 1e3] * 7,
    }


MEASURED: dict[str, Any] = {
    "weights_bytes": 200_000_000,
    "bandwidth": {"copy": 10e9, "sum": 20e9},
    "steps": [_step(1, 1, 20, 40), _step(1, 8, 30, 40), _step(8, 1, 25, 80), _step(64, 5, 100, 200)],
    "invariance": [
        {
            "case": "8x5@256",
            "torch_form": "batched",
            "step": [0.100] * 7,
            "step_none": [0.080] * 7,
            "torch": [0.018] * 7,
            "torch_none": [0.003] * 7,
        }
    ],
    "sampling": {"rows": 80, "drawn": 80, "step": [0.1] * 7, "sampling": [0.02] * 7},
    "host": {"sessions": 16, "pass": [0.004] * 7, "python": [0.002] * 7, "outside": [0.0005] * 7},
    "pools": {"small_blocks": 10, "large_blocks": 80, "small": [0.1] * 7, "large": [0.1] * 7},
    "prefill": {"ours": [0.05] * 7, "peer": [0.1] * 7},
    "contexts": {"64": [0.01] * 7, "256": [0.02] * 7},
}


def test_the_roofline_is_the_weights_read_once() -> None:
    rows = step_rows(1, MEASURED)
    assert rows[0].of_roofline == pytest.approx(0.5)


def test_the_curve_is_of_the_quickest_split_and_can_be_read() -> None:
    curve = row_costs(step_rows(1, MEASURED), 1, 256)
    assert curve == "1:1.000,8:1.250,320:5.000"
    assert RowCostCurve.parse(curve)(8) == 1.25


def test_the_cost_of_invariance_is_what_our_attention_takes_beyond_torchs() -> None:
    (row,) = invariance_rows(MEASURED)
    assert [row.attention_ms, row.torch_ms] == pytest.approx([20.0, 15.0])
    assert row.share.median == pytest.approx(0.05)


def test_goals_are_judged_by_their_worst_case() -> None:
    found = {goal.what: goal.met for goal in goals({1: MEASURED})}
    assert [what for what, met in found.items() if not met] == [
        "step against transformers, 1 to 8 rows, 1 thread, worst: 1x8@256",
        "sampling 80 rows at temperature 1, no top-k, over their forward pass, 1 thread",
    ]
    assert len(found) == 7


def test_the_report_leaves_its_json_and_plot(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    record = tmp_path / "engine" / "abc.json"
    options = engine.EngineOptions(threads=(1,), contexts=(256,))
    reached = engine.report(options, {1: MEASURED}, console, record)
    found = json.loads(record.read_text())
    assert found["row_costs"] == {"1 thread(s), context 256": "1:1.000,8:1.250,320:5.000"}
    assert len(found["goals"]) == len(reached) == 7
    assert record.with_suffix(".png").stat().st_size > 0
    assert "prefill | prefill of 182 tokens" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    options, root = engine.parse_options(["--splits", "1x1,8x5", "--threads", "2"])
    assert options.splits == ((1, 1), (8, 5))
    assert options.threads == (2,)
    assert root is not None
    assert engine.parse_options(["--quick"])[1] is None
    for wrong in (["--pairs", "2"], ["--parts", "steps,nonsense"], ["--splits", "8"]):
        with pytest.raises(SystemExit, match="2"):
            engine.parse_options(wrong)
    assert "no nonsense" in capsys.readouterr().err
