"""A target over several pods, as a LeaderWorkerSet: they meet by name, serve over TLS, and end as one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proofs.boot import verdict

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

Record = dict[str, Any]


def test_ranks_of_several_pods_answer_as_one_target(grouped: Record) -> None:
    pods = {pod for pod, owner in grouped["owners"].items() if owner == "galley-target"}
    assert pods == {"galley-target-0", "galley-target-0-1", "galley-target-0-2"}
    assert grouped["reference"]
    assert verdict.lost_or_other_answers(grouped) == []
    assert verdict.failed_clients(grouped) == []
    assert verdict.failed_hooks(grouped) == []


def test_the_group_is_made_anew_when_one_of_its_pods_is_lost(grouped: Record) -> None:
    assert verdict.untold_faults(grouped) == []
    made = [event["pod"] for event in grouped["events"] if event["what"] == "made"]
    assert {made.count(f"galley-target-0{member}") for member in ("", "-1", "-2")} == {2}
    assert verdict.bad_ends(grouped) == []
    assert verdict.cut_short(grouped) == []
    assert verdict.needless_restarts(grouped) == []


def test_prometheus_fetches_what_the_monitor_names(grouped: Record) -> None:
    assert {scraped["pod"].rpartition("-")[0] for scraped in grouped["scraped"]} >= {"galley-target"}
    assert verdict.failed_scrapes(grouped) == []


def test_the_policies_fit_the_connections(grouped: Record) -> None:
    among = {
        (made["source"], made["destination"])
        for made in grouped["made"]
        if made["source"].startswith("galley-target") and made["destination"].startswith("galley-target")
    }
    assert ("galley-target-0-1", "galley-target-0") in among, "the ranks have not met"
    assert verdict.forbidden_attempts(grouped) == []
    assert verdict.uncovered_connections(grouped) == []
    assert verdict.idle_openings(grouped) == []
    assert verdict.wrong_doors(grouped) == []
    assert verdict.foreign_names(grouped) == []
