"""A Prometheus of the test's own, on a port that it chooses itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.waiting import PATIENCE_S

NOT_INSTALLED = "prometheus is not installed"
_LABELS = {"namespace": "test", "release": "test"}
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class Prometheus:
    """Asks its HTTP API."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that it comes to now."""
        answer = await asyncio.to_thread(self._get, "query", query=expr)
        assert answer["status"] == "success", answer
        data: list[dict[str, Any]] = answer["data"]["result"]
        return data

    async def query_range(
        self, expr: str, start_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Return the series of an expression over a time."""
        answer = await asyncio.to_thread(
            self._get, "query_range", query=expr, start=str(start_s), end=str(end_s), step=str(step_s)
        )
        data: list[dict[str, Any]] = answer["data"]["result"]
        return data

    async def problems_of_rules(self) -> list[str]:
        """What kept rules from being evaluated."""
        groups = (await asyncio.to_thread(self._get, "rules"))["data"]["groups"]
        assert groups
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]

    def _get(self, what: str, **query: str) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return json.load(response)


@asynccontextmanager
async def scraping(directory: Path, targets: Mapping[str, str], rules: Path) -> AsyncIterator[Prometheus]:
    """One that scrapes these each second, by job, and evaluates the rules as often."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip(NOT_INSTALLED)
    config = directory / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [
                    {
                        "job_name": job,
                        "static_configs": [{"targets": [address], "labels": {**_LABELS, "instance": job}}],
                    }
                    for job, address in targets.items()
                ],
            }
        )
    )
    process = await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            address = await _address(process.stderr)
        draining = asyncio.create_task(process.stderr.read())
        yield Prometheus(address)
        draining.cancel()
    finally:
        process.kill()
        await process.wait()


async def _address(log: asyncio.StreamReader) -> str:
    """Once it answers."""
    lines: list[str] = []
    async for line in log:
        lines.append(line.decode())
        if "Server is ready to receive web requests" in lines[-1]:
            [address] = _LISTENING.findall("".join(lines))
            return str(address)
    raise RuntimeError("".join(lines))
