"""Begin with the test files that take longest: each worker takes one after another, the last ends the run.

By itself xdist begins with the files that have most tests. Files with one or two, such as those that start
whole stacks, then run last, one behind the other, while the other workers have nothing left to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

SLOW = (
    "tests/integration/galley/cli/test_up.py",
    "tests/simulation/test_simulation.py",
    "tests/repo/test_installs.py",
    "tests/integration/galley/cli/test_restarts.py",
    "tests/integration/galley/cli/test_stacks.py",
    "tests/attack/test_grammars.py",
    "tests/integration/services/gateway/test_secrets.py",
    "tests/integration/services/gateway/http/test_other_clients.py",
    "tests/integration/services/gateway/http/test_description.py",
    "tests/integration/services/target/test_process.py",
    "tests/integration/services/target/test_distribution.py",
    "tests/integration/services/gateway/audit/test_same.py",
    "tests/integration/services/gateway/audit/test_faults.py",
    "tests/integration/services/gateway/http/structured/test_lost_tokens.py",
    "tests/integration/services/gateway/http/structured/test_structured_clients.py",
    "tests/repo/test_monitoring.py",
)
"""Those of `make integration` that take more than 15 s, the longest first (`--durations`)."""


def in_order(files: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the sort key of each file; `files` has one entry a test."""
    place = {file: index for index, file in enumerate(SLOW)}
    return {file: (place.get(file, len(SLOW)), -count) for file, count in Counter(files).items()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    keys = in_order([_file_of(item) for item in items])
    items.sort(key=lambda item: keys[_file_of(item)])


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
