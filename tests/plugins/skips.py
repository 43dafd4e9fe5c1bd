"""Fail each skipped test that tests/allowed_skips.txt does not permit.

The file has one line for each permitted skip: `node id pattern | words of the reason`. The pattern is a glob
over the node id (write `*` for the parameters); the words must occur in the reason of the skip.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

LIST_NAME = "allowed_skips.txt"
_ALLOWED = pytest.StashKey[tuple["AllowedSkip", ...]]()


@dataclass(frozen=True, slots=True)
class AllowedSkip:
    pattern: str
    reason: str

    def covers(self, node_id: str, reason: str) -> bool:
        return fnmatchcase(node_id, self.pattern) and self.reason in reason


def parse(text: str) -> tuple[AllowedSkip, ...]:
    """Return the permitted skips. Raise ValueError for a line without a reason."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(_parse_line(line) for line in lines if line and not line.startswith("#"))


def _parse_line(line: str) -> AllowedSkip:
    pattern, bar, reason = (part.strip() for part in line.partition("|"))
    if not (pattern and bar and reason):
        raise ValueError(f"{LIST_NAME}: {line!r} is not `node id pattern | reason`")
    return AllowedSkip(pattern, reason)


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / "tests" / LIST_NAME
    config.stash[_ALLOWED] = parse(path.read_text()) if path.exists() else ()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Expected failures are reported as skips too; pytest's `strict` handles those.
    if not hasattr(report, "wasxfail"):
        _judge(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report, collector.config)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if not report.skipped:
        return
    reason = _reason(report.longrepr)
    if any(line.covers(report.nodeid, reason) for line in config.stash[_ALLOWED]):
        return
    report.outcome = "failed"
    report.longrepr = f"skipped ({reason}), and not listed in tests/{LIST_NAME}"


def _reason(longrepr: object) -> str:
    """Return the reason of a skip, which pytest reports as (path, line, "Skipped: reason")."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    return str(longrepr)
