"""The values that the pages for operators name are the chart's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.deploy.render import CHART, ROOT, default_values

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# In the upgrade notes: what values were called before, and what is said of networkPolicy.
NOTES = {"gateway.apiKeys.name", "gateway.idSecret.name", "redis.to"}


def followed(node: dict[str, Any]) -> dict[str, Any]:
    """The definition that a reference stands for."""
    while "$ref" in node:
        name = node["$ref"]
        node = SCHEMA
        for part in name.lstrip("#/").split("/"):
            node = node[part]
    return node


def is_known(path: str) -> bool:
    """Would the schema take a value of this name? `a.b.c`."""
    node = SCHEMA
    for key in path.split("."):
        forms = [followed(form) for form in (node, *node.get("allOf", ()))]
        found = [form["properties"][key] for form in forms if key in form.get("properties", {})]
        if not found:
            # What is handed on as it stands has no names of its own in the schema.
            return not any("properties" in form for form in forms)
        node = followed(found[0])
    return True


@pytest.mark.parametrize(
    "page",
    [
        "docs/operate/install.md",
        "docs/operate/upgrade.md",
        "docs/operate/scaling.md",
        "docs/operate/redis.md",
        "docs/examples/capacity.toml",
    ],
)
def test_a_value_that_a_page_names_is_one_of_the_charts(page: str) -> None:
    roots = "|".join(default_values())
    named = set(re.findall(rf"(?:`|# )((?:{roots})(?:\.[A-Za-z_]+)+)\b", (ROOT / page).read_text()))
    files = {"tls.crt", "tls.key"}
    assert {path for path in named - NOTES - files if not is_known(path)} == set()


def test_a_name_that_is_none_is_noticed() -> None:
    assert is_known("gateway.settings.max_sessions")
    assert is_known("redis.existingSecret.replicaKey")
    assert not is_known("gateway.idSecret")
    assert not is_known("gateway.settings.kitchen")
