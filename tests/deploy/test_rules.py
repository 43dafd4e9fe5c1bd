"""The rules that the chart renders: they follow the values, and each release has its own."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

from galley.common.metrics import catalogue
from galley.core.versions.rule import decide
from tests.deploy.render import (
    CHART,
    ROLES,
    Manifest,
    default_values,
    env,
    of_kind,
    render,
    render_refused,
)
from tests.fakes.promql import RULES, rules

NOT_INSTALLED = "promtool is not installed"
RUNBOOKS = CHART.parents[1] / "docs" / "runbooks"


def rules_of(values: Manifest | None = None, release: str = "galley", **monitoring: str) -> Manifest:
    """Return the rule file of a release whose `monitoring.rules` are `values`."""
    given = {"scrape": "podMonitor", **monitoring, "rules": {"enabled": True, **(values or {})}}
    (rule,) = of_kind(render({"monitoring": given}, release), "PrometheusRule").values()
    spec: Manifest = rule["spec"]
    return spec


def rendered_alerts(spec: Manifest) -> list[Manifest]:
    return [rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule]


def alert_of(spec: Manifest, name: str, severity: str) -> Manifest:
    (found,) = (
        rule
        for rule in rendered_alerts(spec)
        if (rule["alert"], rule["labels"]["severity"]) == (name, severity)
    )
    return found


def promtool(command: str, file: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip(NOT_INSTALLED)
    done = subprocess.run(["promtool", *command.split(), str(file)], capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_rules_are_those_of_the_repository_for_one_release() -> None:
    own = json.dumps(rules_of()).replace(r", namespace=\"galley\", release=\"galley\"", "")
    of_all = own.replace(r"{namespace=\"galley\", release=\"galley\"}", "")
    assert json.loads(of_all) == yaml.safe_load(RULES.read_text())


def test_every_selector_of_every_rule_names_the_release() -> None:
    """Series of other releases of the namespace, or of other namespaces, change no alert."""
    for scrape, label in (("podMonitor", "release"), ("annotations", "app_kubernetes_io_instance")):
        for rule in (rule for group in rules_of(scrape=scrape)["groups"] for rule in group["rules"]):
            expr = rule["expr"]
            names = {each for each in (*catalogue_series(), *recorded()) if each in expr}
            assert names
            selected = f'namespace="galley", {label}="galley"}}'
            assert expr.count("{") == expr.count("}") == expr.count(selected) >= len(names) / 2, expr


def catalogue_series() -> set[str]:
    return {name for metric in catalogue.METRICS for name in metric.series}


def recorded() -> set[str]:
    return {rule.name for rule in rules() if not rule.is_alert}


TUNED: Manifest = {
    "runbookBaseUrl": "https://wiki.example.com/galley/",
    "labels": {"team": "inference"},
    "severities": {"page": "critical", "ticket": "warning"},
    "objectives": {
        "timeToFirstToken": {"seconds": 2.5, "budget": 0.05},
        "timePerOutputToken": {"seconds": 0.2},
        "errors": {"budget": 0.001},
    },
    "burnRates": {"page": {"rate": 10, "window": "2h", "shortWindow": "10m", "for": "1m"}},
    "alerts": {
        "GalleyCommitSlow": {
            "severity": "ticket",
            "for": "20m",
            "window": "15m",
            "quantile": 0.5,
            "threshold": 0.25,
        },
        "GalleyAcceptanceCollapse": {"window": "1h", "baselineWindow": "1w", "threshold": 0.7},
        "GalleyTargetOutOfBlocks": {"enabled": False},
        "GalleyCertificateExpires": {"days": {"page": 0.25, "ticket": 2}},
    },
}


def test_values_tune_the_rules(tmp_path: Path) -> None:
    spec = rules_of(TUNED)
    commits = alert_of(spec, "GalleyCommitSlow", "warning")
    assert commits["for"] == "20m"
    assert "[15m]" in commits["expr"]
    assert "> 0.25" in commits["expr"]
    assert "0.5, sum by" in commits["expr"]
    first = alert_of(spec, "GalleyTtftBudgetBurn", "critical")
    assert first["for"] == "1m"
    assert first["expr"].count("> 10") == 2
    assert 'window="2h"' in first["expr"]
    assert 'window="10m"' in first["expr"]
    records = [rule for rule in spec["groups"][0]["rules"] if rule.get("record") == "galley:ttft:burn_rate"]
    assert [rule["labels"]["window"] for rule in records] == ["10m", "2h", "30m", "6h"]
    assert all('le="2.5"' in rule["expr"] and "/ 0.05" in rule["expr"] for rule in records)
    assert "[1w]" in alert_of(spec, "GalleyAcceptanceCollapse", "warning")["expr"]
    assert "< 0.25 * 86400" in alert_of(spec, "GalleyCertificateExpires", "critical")["expr"]
    assert not [alert for alert in rendered_alerts(spec) if alert["alert"] == "GalleyTargetOutOfBlocks"]
    assert {alert["labels"]["team"] for alert in rendered_alerts(spec)} == {"inference"}
    for alert in rendered_alerts(spec):
        url = f"https://wiki.example.com/galley/{alert['alert']}.md"
        assert alert["annotations"]["runbook_url"] == url
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    promtool("check rules", file)


@pytest.mark.parametrize("severity", ["1", "1e3", "on"])
def test_a_severity_is_a_text(severity: str) -> None:
    assert alert_of(rules_of({"severities": {"page": severity}}), "GalleyCommitSlow", severity)


def test_rules_without_any_alert_can_be_loaded(tmp_path: Path) -> None:
    names = default_values()["monitoring"]["rules"]["alerts"]
    spec = rules_of({"alerts": {name: {"enabled": False} for name in names}})
    assert not rendered_alerts(spec)
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    promtool("check rules", file)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"objectives": {"timeToFirstToken": {"seconds": 3}}}, "seconds"),
        ({"objectives": {"errors": {"budget": 0}}}, "budget"),
        ({"alerts": {"GalleyCommitSlow": {"threshold": "much"}}}, "threshold"),
        ({"alerts": {"GalleyCommitSlow": {"for": "10 minutes"}}}, "for"),
        ({"alerts": {"GalleyCommitSlow": {"severity": "critical"}}}, "severity"),
        ({"alerts": {"GalleyCommitsSlow": {"enabled": False}}}, "GalleyCommitsSlow"),
    ],
)
def test_bad_values_of_rules_are_refused_by_name(values: Manifest, named: str) -> None:
    assert named in render_refused({"monitoring": {"rules": {"enabled": True, **values}}})


def test_rules_need_metrics_of_the_release() -> None:
    monitoring: Manifest = {"scrape": "none", "rules": {"enabled": True}}
    assert "monitoring.scrape: must not be none" in render_refused({"monitoring": monitoring})
    assert render({"monitoring": {**monitoring, "releaseLabel": "deployment"}})


@pytest.mark.parametrize("short", ["1h", "60m", "1h1s", "1d"])
def test_the_short_window_of_a_burn_rate_is_shorter(short: str) -> None:
    burn = {"burnRates": {"page": {"shortWindow": short}}}
    refused = render_refused({"monitoring": {"rules": {"enabled": True, **burn}}})
    assert "monitoring.rules.burnRates.page.shortWindow" in refused


def test_an_objective_is_a_bucket() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]
    objectives = schema["rules"]["properties"]["objectives"]["properties"]
    for name, metric in {
        "timeToFirstToken": catalogue.TIME_TO_FIRST_TOKEN,
        "timePerOutputToken": catalogue.TIME_PER_OUTPUT_TOKEN,
    }.items():
        assert objectives[name]["properties"]["seconds"]["enum"] == list(metric.buckets)


def test_two_releases_in_one_namespace_do_not_mix(tmp_path: Path) -> None:
    """All targets of `blue` are gone and its store is slow; `green` is well, with stricter thresholds."""
    strict = {"severities": {"page": "green"}, "alerts": {"GalleyCommitSlow": {"threshold": 0.05}}}
    for release, values in (("blue", {}), ("green", strict)):
        (tmp_path / f"{release}.yaml").write_text(yaml.safe_dump(rules_of(values, release)))

    def series(name: str, release: str, values: str, **more: str) -> Manifest:
        labels = {"namespace": "galley", "release": release, "instance": f"{release}-0", **more}
        shown = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        return {"series": f"{name}{{{shown}}}", "values": values}

    up = {"pool": "target", "state": "up"}
    given = [
        series("galley_replicas", "blue", "0x40", **up),
        series("galley_replicas", "green", "2x40", **up),
        series("galley_rounds_total", "green", "0+600x40"),
        *(series("galley_sessions_open", release, "9x40") for release in ("blue", "green")),
        *(
            series("galley_build_info", release, "1x40", service=service)
            for release, service in product(("blue", "green"), ROLES)
        ),
    ]
    for release, slow in (("blue", 100), ("green", 0)):
        fast = {"0.05": 100 - slow, "0.1": 100 - slow, "0.25": 100, "+Inf": 100}
        bucket = "galley_commit_duration_seconds_bucket"
        given += [series(bucket, release, f"0+{count}x40", le=le) for le, count in fast.items()]
    firing = {"GalleyTargetPoolDown", "GalleyCommitSlow"}
    checks = [
        _firing(name, name in firing) for name in sorted({rule.name for rule in rules() if rule.is_alert})
    ]
    file = tmp_path / "tests.yaml"
    test = {"interval": "1m", "input_series": given, "promql_expr_test": checks}
    file.write_text(yaml.safe_dump({"rule_files": ["blue.yaml", "green.yaml"], "tests": [test]}))
    promtool("test rules", file)


def _firing(alert: str, is_firing: bool) -> Manifest:
    labels = f'alertname="{alert}", alertstate="firing"'
    found = f'ALERTS{{{labels}, namespace="galley", release="blue", severity="page"}}'
    samples = [{"labels": found, "value": 1}] if is_firing else []
    return {"expr": f"ALERTS{{{labels}}}", "eval_time": "30m", "exp_samples": samples}


@pytest.mark.parametrize("name", ["GalleyAuditDiffers", "GalleyAuditDamaged"])
def test_runbooks_read_the_incidents_of_the_charts_pool(name: str) -> None:
    gateway = of_kind(render(), "Deployment")["galley-gateway"]
    assert env(gateway)["GALLEY_GATEWAY_POOL"] == "galley.galley", "namespace and release"
    page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert '"galley:audit:{$NS.galley}:incidents"' in page


def test_the_runbook_of_a_roll_back_has_each_reason_of_the_rule() -> None:
    reasons = re.findall(
        r'_roll_back\(f"([a-z ]+?)(?: after \{|:)', inspect.getsource(inspect.getmodule(decide) or decide)
    )
    assert len(reasons) == 7
    page = (RUNBOOKS / "GalleyDraftRolledBack.md").read_text(encoding="utf-8")
    assert [reason for reason in reasons if f"| `{reason}` |" not in page] == []
