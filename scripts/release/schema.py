"""Write the chart's schema with titles and descriptions: `python -m scripts.release.schema OUT`.

Artifact Hub shows them beside each value: the key in words, and its comment in values.yaml. The schema in the
repository has neither, so that nobody writes a sentence twice.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from scripts.chart_readme import values_of
from scripts.chart_schema import text_of
from scripts.release.chart import CHART

Node = dict[str, Any]
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_ACRONYMS = {"api", "ca", "cpu", "dns", "grpc", "http", "id", "jwks", "jwt", "tls", "url"}


def described(schema: Node, values: str) -> Node:
    """Return the schema with a title for every property, and the comments of `values` as descriptions."""
    result: Node = json.loads(json.dumps(schema))
    _add_titles(result)
    for value in values_of(values):
        node = _node(result, value.path)
        if node is not None and value.description:
            node.setdefault("description", value.description)
    return result


def title(key: str) -> str:
    """Return a key in words: `drainTimeoutSeconds` is "Drain timeout seconds"."""
    words = [word.lower() for word in _WORD.findall(key)]
    text = " ".join(word.upper() if word in _ACRONYMS else word for word in words)
    return text[:1].upper() + text[1:]


def _add_titles(node: Any) -> None:
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _add_titles(inner)
    properties = node.get("properties") if isinstance(node, dict) else None
    for key, value in properties.items() if isinstance(properties, dict) else ():
        if isinstance(value, dict):
            value.setdefault("title", title(key))


def _node(schema: Node, path: tuple[str, ...]) -> Node | None:
    """Return the schema of the value at `path`; None where any key is allowed."""
    node = schema
    for key in path:
        inner = _resolved(schema, node).get("properties", {}).get(key)
        if inner is None:
            return None
        node = inner
    return node


def _resolved(schema: Node, node: Node) -> Node:
    while "$ref" in node:
        found: Any = schema
        for part in node["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        node = found
    return node


def main() -> int:
    """Return 2 if no file is named."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m scripts.release.schema OUT\n")
        return 2
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    Path(sys.argv[1]).write_text(text_of(described(schema, values)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
