"""Read a plan's inputs from what `galley bench --json` printed, and from the log of a target."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from galley.core.cost.model import RowCostCurve
from galley.core.errors import GalleyError

AUTO = "auto"
_STEPS = "steps measured"
_OF_STEPS = ("step_ms", "row_costs", "kv_tokens", "block_tokens")


@dataclass(frozen=True, slots=True)
class Measured:
    """The inputs of a plan. `step_ms` is a target step of one row; free drafts have an infinite ratio."""

    arm: str
    alpha: float
    step_ms: float
    row_costs: RowCostCurve
    draft_cost_ratio: float


class NotMeasured(ValueError):
    """The record lacks what was asked for."""


def read_measured(path: Path, workload: str = "") -> Measured:
    """Read a record; `workload` empty takes all of them. Raises ValueError or OSError."""
    try:
        return _measured(json.loads(path.read_text(encoding="utf-8")), workload)
    except NotMeasured as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError, GalleyError, RecursionError) as error:
        raise ValueError(f"{path}: must be what `galley bench --json` printed: {error!r}") from error


def read_target_log(path: Path) -> dict[str, Any]:
    """Return the fields of `TargetSize` that a target logged at its last start, which either engine measures.

    Raises ValueError if the log, in JSON lines, has none, or OSError.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed([line for line in lines if _STEPS in line]):
        try:
            record = json.loads(line[line.index("{") :])  # `galley logs` puts the part before it
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("event") == _STEPS:
            return {name: record[name] for name in _OF_STEPS if name in record}
    raise ValueError(f"{path}: must be a target's log in JSON lines, with `{_STEPS}`")


def _measured(record: Mapping[str, Any], workload: str) -> Measured:
    rows = [row for row in record["rows"] if row["speculation"]["verified"]]
    steps = [(int(of_rows), float(ms)) for of_rows, ms in record["pass_ms_by_rows"]]
    known = list(dict.fromkeys(row["workload"] for row in rows))
    if workload and workload not in known:
        raise NotMeasured(f"must hold a workload {workload!r}, got {', '.join(known) or 'none'}")
    if not (rows and steps):
        raise NotMeasured("must hold a measurement with draft tokens, got none")
    return _summary([row for row in rows if workload in {"", row["workload"]}], steps)


def _summary(rows: list[Mapping[str, Any]], steps: list[tuple[int, float]]) -> Measured:
    arms = {row["arm"] for row in rows}
    # The arm that the gateway would choose, else the one with the most evidence.
    arm = AUTO if AUTO in arms else max(arms, key=lambda arm: _sum(_of(arm, rows), "verified"))
    mine = list(_of(arm, rows))
    # With several streams a draft step serves several sessions, and the cost model counts its rows itself.
    fewest = min(row["streams"] for row in mine)
    alone = [row["speculation"] for row in mine if row["streams"] == fewest]
    draft_ns = sum(of["draft_compute_ns"] for of in alone) / sum(of["proposed"] for of in alone)
    step_ms = steps[0][1]
    return Measured(
        arm,
        _alpha([row["speculation"] for row in mine]),
        step_ms,
        RowCostCurve(tuple((of_rows, ms / step_ms) for of_rows, ms in steps)),
        step_ms * 1e6 / draft_ns if draft_ns else math.inf,
    )


def _of(arm: str, rows: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (row for row in rows if row["arm"] == arm)


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(row["speculation"][name]) for row in rows)


def _alpha(counts: list[Mapping[str, Any]]) -> float:
    """Return the likeliest chance that a draft token is accepted if all before it were.

    A token counts as a trial if it was verified and its predecessors were accepted.
    """
    accepted = [sum(at) for at in zip_longest(*(one["accepted_at"] for one in counts), fillvalue=0)]
    verified = [sum(at) for at in zip_longest(*(one["verified_at"] for one in counts), fillvalue=0)]
    reached = [verified[0], *(min(*pair) for pair in zip(accepted, verified[1:], strict=False))]
    return float(sum(accepted) / sum(reached))
