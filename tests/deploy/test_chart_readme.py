"""What the chart says of itself: its README, made from values.yaml, and its metadata for Artifact Hub."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from scripts.chart_readme import tables, values_of
from tests.deploy.render import CHART, Manifest, default_values, tool

SAMPLE = """\
# About the file, not about a key.

# ------------------------------------------------------------------------ all roles --
# What all
# serve, <org>/<name> | path.
model: ""
cache:
  sizes: {a: 1, b.c: [x]}
  # -- Off by default.
  enabled: false

# --------------------------------------------------------------------------- gateway --
# Beside CPU.
metrics:
  # Not attached: a blank line follows.

  a.b: 2
"""


def show(what: str) -> str:
    done = subprocess.run([tool("helm"), "show", what, CHART], capture_output=True, text=True, check=True)
    return done.stdout


def test_rows_of_a_sample() -> None:
    assert "\n".join(tables(values_of(SAMPLE))) == (
        "\n### All roles\n\n"
        "| key | type | default | description |\n|---|---|---|---|\n"
        '| `model` | string | `""` | What all serve, &lt;org>/&lt;name> \\| path. |\n'
        '| `cache.sizes` | object | `{"a": 1, "b.c": ["x"]}` |  |\n'
        "| `cache.enabled` | bool | `false` | Off by default. |\n"
        "\n### Gateway\n\n"
        "| key | type | default | description |\n|---|---|---|---|\n"
        "| `metrics` | object |  | Beside CPU. |\n"
        "| `metrics.a\\.b` | int | `2` |  |"
    )


def leaves(values: Manifest, path: str = "") -> list[str]:
    return [
        leaf
        for name, value in values.items()
        for key in [f"{path}{name}"]
        for leaf in (leaves(value, f"{key}.") if isinstance(value, dict) and value else [key])
    ]


def test_every_value_has_a_row() -> None:
    rows = {".".join(value.path) for value in values_of((CHART / "values.yaml").read_text())}
    for leaf in leaves(default_values()):
        assert any(leaf == key or leaf.startswith(f"{key}.") for key in rows), leaf


def test_helm_shows_the_readme() -> None:
    readme = show("readme")
    assert readme.startswith("# Galley\n")
    assert "| `gateway.drainTimeoutSeconds` | int | `30` | Longest drain" in readme


def test_less_obvious_values_are_described() -> None:
    described = {value.key: value.description for value in values_of((CHART / "values.yaml").read_text())}
    for key in ("model", "gateway.drainTimeoutSeconds", "target.kind", "auth.idSecret"):
        assert described[key].endswith("."), key


@pytest.mark.parametrize("annotation", ["category", "license", "prerelease", "recommendations"])
def test_metadata_for_artifact_hub(annotation: str) -> None:
    chart = yaml.safe_load(show("chart"))
    assert isinstance(chart["annotations"][f"artifacthub.io/{annotation}"], str)
