"""Rules, dashboards and runbooks: they name what there is, they agree, and alerts ring when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from galley.common.metrics.catalogue import METRICS, of_service
from galley.common.metrics.labels import SERVICES
from galley.common.metrics.metric import Kind, LabelValues, Metric
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import render
from tests.deploy.render import CHART, default_values
from tests.fakes.promql import (
    FAMILIES,
    ROOT,
    RULES,
    RUNBOOKS,
    SERIES,
    TRACED,
    Rule,
    alerts,
    dashboards,
    panels,
    rules,
    unknown_names,
)

RULE_TESTS = ROOT / "tests" / "repo" / "galley.tests.yaml"
NOT_INSTALLED = "promtool is not installed"
NAMES = sorted({alert.name for alert in alerts()})


def promtool(*args: str, given: bytes | None = None) -> None:
    if shutil.which("promtool") is None:
        pytest.skip(NOT_INSTALLED)
    done = subprocess.run(["promtool", *args], input=given, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert not done.stderr or given is None, done.stderr.decode()


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_alerts_fire_as_expected() -> None:
    promtool("test", "rules", str(RULE_TESTS))


def _values(metric: Metric) -> LabelValues:
    return tuple(label.values[-1] if label.values else "any" for label in metric.labels)


def _ones(values: LabelValues) -> list[tuple[LabelValues, float]]:
    return [(values, 1)]


@pytest.mark.parametrize("service", SERVICES)
async def test_promtool_accepts_our_metrics(service: str) -> None:
    registry = Registry(service)
    of_process = {reading.metric for reading in registry.read()}
    for metric in set(of_service(service)) - of_process:
        if metric.kind is Kind.HISTOGRAM:
            registry.distribute(metric).at(*_values(metric)).observe(0.01)
        elif metric.kind is Kind.COUNTER:
            registry.count(metric).at(*_values(metric)).value += 1
        elif metric.kind is Kind.GAUGE:
            registry.observe(metric, partial(_ones, _values(metric)))
    body, _ = await render(registry.read(), "text/plain")
    promtool("check", "metrics", given=body)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.name}-{rule.severity}")
def test_rules_name_what_there_is(rule: Rule) -> None:
    assert not list(unknown_names(rule.expr))


@pytest.mark.parametrize("name", dashboards())
def test_dashboards_name_what_there_is(name: str) -> None:
    for panel in panels(dashboards()[name]):
        for target in panel["targets"]:
            assert not list(unknown_names(target["expr"])), panel["title"]
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert all(label in target["expr"] for label in labels), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_runbooks_name_what_there_is(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    titles = {panel["title"] for dashboard in dashboards().values() for panel in panels(dashboard)}
    known = TRACED | {metric.name for metric in METRICS}
    words = re.findall(r"`([^`]+)`", text)
    assert not [bad for word in words for bad in unknown_names(word, {**SERIES, **FAMILIES})]
    dotted = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)}
    assert not {word for word in dotted - known if not is_value(word)}
    spans = re.findall(r"`([^`]+)` spans?\b", text)
    assert not set(spans) - known
    assert any(word in SERIES for word in re.findall(r"galley_\w+|gen_ai_\w+", text))
    for quoted in re.findall(r'"([A-Z][^"]+)"', text):
        assert quoted in titles, f"no panel is called {quoted}"


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_has_queries_and_commands(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert fenced(text, "promql")
    assert "kubectl -n $NS " in text
    # There is nothing to trace without a gateway, or without its metrics.
    assert name in {"GalleyGatewayPoolDown", "GalleyMetricsAbsent"} or "`galley trace " in text
    assert not re.search(r"`--[a-z-]+`", text), "name a value of the chart, not a flag"


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_commands_of_runbooks_go_on(page: Path) -> None:
    """One pod without a log does not end the logs of the others, and no command holds up the next one."""
    text = page.read_text()
    logs = re.findall(r"kubectl -n \$NS logs -l [^|`\n]+", text)
    assert not [command for command in logs if "--ignore-errors" not in command]
    assert not [command for command in logs if "--container" in command and "component=" not in command]
    assert not [line for line in fenced(text, "sh") if "port-forward" in line and not line.endswith("&")]


def test_runbooks_name_values_of_the_chart() -> None:
    roots = set(default_values())
    named = {
        word
        for page in RUNBOOKS.glob("*.md")
        for word in re.findall(r"`([a-z]\w*(?:\.\w+)+)`", page.read_text())
        if word.split(".")[0] in roots or ".settings." in word
    }
    assert len(named) > 20
    assert not {word for word in named - TRACED if not is_value(word)}


@cache
def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def is_value(path: str) -> bool:
    """Return True if the chart's schema knows a value, such as gateway.settings.max_sessions."""
    known: Any = schema()
    for key in path.split("."):
        if "$ref" in known:
            known = schema()["definitions"][known["$ref"].rpartition("/")[2]]
        if key not in known.get("properties", {}):
            return False
        known = known["properties"][key]
    return True


def fenced(text: str, language: str) -> list[str]:
    """Return the lines of all code blocks of a language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_promtool_accepts_the_queries_of_the_runbooks(tmp_path: Path) -> None:
    exprs = [expr for page in sorted(RUNBOOKS.glob("*.md")) for expr in fenced(page.read_text(), "promql")]
    records = [{"record": f"runbook:{index}", "expr": expr} for index, expr in enumerate(exprs)]
    assert len(records) > 30
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    promtool("check", "rules", str(file))


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Galley*.md")} == set(NAMES)
    for alert in alerts():
        assert alert.annotations["runbook_url"] == f"docs/runbooks/{alert.name}.md"
        assert (ROOT / alert.annotations["runbook_url"]).is_file()
        assert set(alert.annotations) == {"summary", "description", "runbook_url"}
        assert alert.severity in {"page", "ticket"}


def test_each_alert_has_firing_and_silent_tests() -> None:
    document = yaml.safe_load(RULE_TESTS.read_text())
    rings: set[tuple[str, str]] = set()
    silent: set[str] = set()
    for case in document["tests"]:
        for check in case["alert_rule_test"]:
            expected = check.get("exp_alerts", [])
            rings |= {(check["alertname"], one["exp_labels"]["severity"]) for one in expected}
            silent |= set() if expected else {check["alertname"]}
    assert rings == {(alert.name, alert.severity) for alert in alerts()}
    assert silent == set(NAMES)


@pytest.mark.parametrize("name", ["overview", "speculation", "target-engine", "sessions"])
def test_panels_of_a_dashboard(name: str) -> None:
    dashboard = dashboards()[name]
    assert dashboard["uid"] == f"galley-{name}"
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = set(product(columns, range(place["y"], place["y"] + place["h"])))
        assert columns.stop <= 24
        assert not cells & taken, "two panels overlap"
        taken |= cells
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    chosen = ["namespace", "release", "job", "model", "workload", "instance"]
    assert variables == ["datasource", *chosen, "runbooks"]
    for panel in panels(dashboard):
        assert panel["description"].endswith(".")
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] != "short"
        assert defaults["thresholds"]["steps"][0]["value"] is None
        several = len(panel["targets"]) > 1 or " by (" in panel["targets"][0]["expr"]
        if panel["type"] == "timeseries" and several:
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_each_runbook_is_linked_from_a_panel() -> None:
    links = {
        link["url"]
        for dashboard in dashboards().values()
        for panel in panels(dashboard)
        for link in panel.get("links", ())
    }
    assert links == {f"${{runbooks}}/{name}.md" for name in NAMES}
