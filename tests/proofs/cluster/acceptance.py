"""What an API server says of all that the chart renders: each rendering is applied on it, by a dry run."""

from __future__ import annotations

import json

from tests.deploy import matrix
from tests.deploy.render import EXAMPLES, Manifest, example, render
from tests.deploy.schemas import is_custom
from tests.proofs.cluster.commands import Commands, Failed

_WARNING = "Warning:"


def problems(commands: Commands, namespace: str, all_values: dict[str, Manifest]) -> dict[str, list[str]]:
    """Return the refusals and warnings of the server, by rendering; those that it takes are left out."""
    said = {name: _of(commands, namespace, values) for name, values in all_values.items()}
    return {name: lines for name, lines in said.items() if lines}


def renderings() -> dict[str, Manifest]:
    """Return the values of every example and every combination of the matrix, by name."""
    examples = (path.stem.removeprefix("values-") for path in EXAMPLES)
    combinations = {", ".join(row.values()): matrix.values_of(row) for row in matrix.rows()}
    return {name: example(name) for name in examples} | combinations


def _of(commands: Commands, namespace: str, values: Manifest) -> list[str]:
    # Kinds of operators are there only if the operators are, and a test's pod only after its service account.
    objects = [each for each in render(values) if not is_custom(each) and each["kind"] != "Pod"]
    for each in objects:
        each["metadata"]["namespace"] = namespace
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    try:
        _, said = commands.kubectl(
            "apply", "--server-side", "--dry-run=server", "--filename", "-", stdin=text
        )
    except Failed as failure:
        return str(failure).splitlines()
    return [line for line in said.splitlines() if line.startswith(_WARNING)]
