"""A real Prometheus scrapes a running stack: every query of every dashboard, rule and alert has a value."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from galley.client.client import NO_RETRIES, AsyncClient
from galley.client.options import Tls
from galley.stack.stack import Stack
from tests.e2e.monitored import monitored_stack, traffic
from tests.e2e.prometheus import Prometheus, scraping
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.promql import RULES, SERIES, always, chosen, dashboards, panels, rules

PATIENCE_S = 40.0
SERVICES = ("target", "draft", "gateway")


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    """The certificate of every process."""
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "files", authority.ca, authority.issue("all"))


@pytest.fixture
async def stack(tmp_path: Path, files: Mounted) -> AsyncIterator[Stack]:
    async with monitored_stack(tmp_path, files) as stack:
        yield stack


def queries() -> dict[str, str]:
    """Return every query, by its place."""
    exprs = {
        f"{name}: {panel['title']}: {target['legendFormat']}": target["expr"]
        for name, dashboard in dashboards().items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    }
    for rule in rules():
        exprs[f"{rule.name} ({rule.severity})"] = always(rule.expr)
        if not rule.is_alert:
            exprs[f"{rule.name}, as recorded"] = rule.name
    return {where: chosen(expr, rate_interval="1m") for where, expr in exprs.items()}


async def has_value(prometheus: Prometheus, expr: str) -> bool:
    """Return True if a series has a number."""
    return any(math.isfinite(float(series["value"][1])) for series in await prometheus.query(expr))


async def without_value(prometheus: Prometheus, exprs: dict[str, str]) -> dict[str, str]:
    return {where: expr for where, expr in exprs.items() if not await has_value(prometheus, expr)}


@pytest.mark.timeout(150)
async def test_every_query_has_a_value(stack: Stack, files: Mounted, tmp_path: Path) -> None:
    tls = Tls(files.ca)
    addresses = {part: str(stack.facts(f"{part}-0")["metrics"]) for part in SERVICES}
    async with (
        scraping(tmp_path, addresses, RULES) as prometheus,
        AsyncClient(stack.address("gateway-0"), retries=NO_RETRIES, tls=tls) as client,
    ):
        async with asyncio.timeout(PATIENCE_S):
            # Counts before the first scrape have no rate.
            while len(await prometheus.query("up == 1")) < len(addresses):  # noqa: ASYNC110  # Prometheus is polled
                await asyncio.sleep(0.1)
        working = asyncio.create_task(traffic(client))
        left = queries()
        assert len(left) > 100
        try:
            async with asyncio.timeout(PATIENCE_S):
                while left := await without_value(prometheus, left):  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.5)
        except TimeoutError:
            pytest.fail("\n".join(f"{where}\n    {expr}" for where, expr in left.items()))
        finally:
            working.cancel()
        with pytest.raises(asyncio.CancelledError):  # and nothing else
            await working
        assert not await prometheus.problems_of_rules()
        there = await prometheus.query('{__name__=~"galley_.+|gen_ai_.+|process_.+"}')
        missing = set(SERIES) - {series["metric"]["__name__"] for series in there}
        assert missing == {"galley_targets_kv_usage"}, "a single target given by address has none"
        services = {series["metric"]["service"] for series in await prometheus.query("galley_build_info")}
        assert services == set(SERVICES)
        [speed_up] = await prometheus.query(
            'galley_plain_time_seconds_total{workload="none"} / galley_decode_time_seconds_total'
        )
        assert float(speed_up["value"][1]) == pytest.approx(1.0, abs=0.05)
