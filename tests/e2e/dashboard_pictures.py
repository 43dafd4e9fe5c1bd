"""`make dashboard-pictures`: the dashboards of a stack under load, as docs/images/dashboard-NAME.png.

A real Prometheus scrapes two targets, two drafts and a gateway, and evaluates the queries of all panels.
Callers outnumber slots, KV pools are small, and a target is killed, so that panels of failures have data.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from galley.client.client import NO_RETRIES, AsyncClient, GalleyRpcError
from galley.client.options import Tls
from galley.stack.stack import Stack
from scripts.monitoring.pictures import Series, draw
from tests.e2e.monitored import monitored_stack, traffic
from tests.e2e.prometheus import Prometheus, scraping
from tests.fakes.certificates import Authority, mounted
from tests.fakes.promql import ROOT, RULES, chosen, dashboards, panels

FOLDER = ROOT / "docs" / "images"
# Numbers of callers, and for how many seconds each; a target is killed when the last phase begins.
PHASES = ((1, 20.0), (8, 30.0), (28, 35.0), (4, 25.0))
FLAGS = {"gateway": ("--max-sessions", "24"), "target": ("--kv-memory-mb", "1")}
PROMPTS = [[5, 9, 2, 33, number, *[5, 9, 2, 33] * 14] for number in (40, 41, 42)]
_PAUSE_S = 0.5
_STEP_S = 1.0
_RATE_INTERVAL = "10s"
_WORKLOADS = ("chat", "code", "search")


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder, "authority")
        files = mounted(folder / "files", authority.ca, authority.issue("all"))
        async with monitored_stack(folder, files, 2, FLAGS) as stack:
            parts = [part for part in stack.parts if part != "valkey"]
            addresses = {part: str(stack.facts(part)["metrics"]) for part in parts}
            async with scraping(folder, addresses, RULES) as prometheus:
                start_s = time.time()
                await load(stack, Tls(files.ca))
                await write(prometheus, start_s, time.time())


async def load(stack: Stack, tls: Tls) -> None:
    for callers, duration_s in PHASES:
        if (callers, duration_s) == PHASES[-1]:
            await stack.kill("target-1")
        async with (
            AsyncClient(stack.address("gateway-0"), retries=NO_RETRIES, tls=tls) as client,
            asyncio.TaskGroup() as group,
        ):
            working = [group.create_task(calls(client, number)) for number in range(callers)]
            await asyncio.sleep(duration_s)
            for task in working:
                task.cancel()


async def calls(client: AsyncClient, number: int) -> None:
    """Call again and again, after errors too."""
    which = number % len(PROMPTS)
    while True:
        with contextlib.suppress(GalleyRpcError):
            await traffic(client, _WORKLOADS[which], PROMPTS[which])
        await asyncio.sleep(_PAUSE_S)


async def write(prometheus: Prometheus, start_s: float, end_s: float) -> None:
    for name, dashboard in dashboards().items():
        exprs = {target["expr"] for panel in panels(dashboard) for target in panel["targets"]}
        answers = {
            expr: [
                series(each)
                for each in await prometheus.query_range(
                    chosen(expr, _RATE_INTERVAL), start_s, end_s, _STEP_S
                )
            ]
            for expr in exprs
        }
        picture = draw(dashboard, answers)
        (FOLDER / f"dashboard-{name}.png").write_bytes(picture)
        empty = without_data(dashboard, answers)
        sys.stdout.write(f"dashboard-{name}.png: {len(picture)} bytes; without data: {empty}\n")


def series(found: Mapping[str, Any]) -> Series:
    times, values = zip(*found["values"], strict=True)
    return Series(found["metric"], times, [float(value) for value in values])


def without_data(dashboard: Any, answers: Mapping[str, Sequence[Series]]) -> list[str]:
    return [
        panel["title"]
        for panel in panels(dashboard)
        if not any(answers[target["expr"]] for target in panel["targets"])
    ]


if __name__ == "__main__":
    asyncio.run(main())
