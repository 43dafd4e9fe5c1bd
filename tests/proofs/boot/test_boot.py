"""The chart boots: what it renders runs, serves and ends here as pods; verdict.py says what must hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.render import render
from tests.proofs.boot import verdict
from tests.proofs.boot.objects import Objects
from tests.proofs.boot.trial import NAMESPACE

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

Record = dict[str, Any]


class TestDefaults:
    def test_every_probe_passes(self, defaults: Record) -> None:
        for kind in ("startup", "readiness", "liveness"):
            assert defaults["probes"][f"{kind} passed"] > 0
        assert "readiness failed" not in defaults["probes"]
        assert "liveness failed" not in defaults["probes"]

    def test_a_completion_is_streamed_through_the_service(self, defaults: Record) -> None:
        assert defaults["reference"]
        assert all(len(answer["tokens"]) == 48 for answer in defaults["reference"].values())
        assert verdict.lost_or_other_answers(defaults) == []
        assert verdict.failed_clients(defaults) == []

    def test_helms_own_test_passes(self, defaults: Record) -> None:
        rendered = Objects(render(), NAMESPACE).hooks("test")
        assert rendered
        assert len(defaults["hooks"]) == len(rendered)
        assert verdict.failed_hooks(defaults) == []

    def test_prometheus_fetches_what_the_annotations_name(self, defaults: Record) -> None:
        roles = {scraped["pod"].split("-")[1] for scraped in defaults["scraped"]}
        assert roles == {"gateway", "draft", "target"}
        assert verdict.failed_scrapes(defaults) == []

    def test_containers_are_confined_and_have_room(self, defaults: Record) -> None:
        seen = {container["container"] for container in defaults["census"] if container["processes"]}
        assert seen == {"gateway", "draft", "target", "redis"}
        assert verdict.loose_containers(defaults) == []

    def test_pods_end_in_good_order(self, defaults: Record) -> None:
        assert verdict.cut_short(defaults) == []
        assert verdict.bad_ends(defaults) == []

    def test_the_policies_fit_the_connections(self, defaults: Record) -> None:
        assert defaults["made"], "nobody connected to anybody?"
        assert verdict.forbidden_attempts(defaults) == []
        assert verdict.uncovered_connections(defaults) == []
        assert verdict.idle_openings(defaults) == []

    def test_nobody_comes_in_who_may_not(self, defaults: Record) -> None:
        assert defaults["doors"]
        assert verdict.wrong_doors(defaults) == []

    def test_nothing_outside_is_looked_up(self, defaults: Record) -> None:
        assert verdict.foreign_names(defaults) == []
