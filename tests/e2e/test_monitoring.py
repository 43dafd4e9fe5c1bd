"""A real Prometheus scrapes a running stack: every query of every dashboard, rule and alert has a value."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.options import Speculation, Tls
from galley.stack.part import Facts, PartSpec
from galley.stack.parts import python_module, stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions
from tests.e2e.prometheus import Prometheus, scraping
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.promql import RULES, SERIES, always, dashboards, panels, rules
from tests.fakes.tiny_model import CONTEXT, save_tiny_model

PATIENCE_S = 40.0
# Greedy, a model of random weights soon repeats itself: lookup is right then.
PROMPT = [5, 9, 2, 33, 5, 9, 2, 33, 5, 9]
FIXED = Speculation(k=4)
SERVICES = ("target", "draft", "gateway")


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    """The certificate of every process."""
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "files", authority.ca, authority.issue("all"))


@pytest.fixture
async def stack(tmp_path: Path, files: Mounted) -> AsyncIterator[Stack]:
    """Valkey, a target of the tiny model, a draft that looks up, and a gateway, each with its metrics."""
    model = str(save_tiny_model(tmp_path / "tiny"))
    served = ("--metrics-port", "0", "--tls-cert-file", files.cert, "--tls-key-file", files.key)
    peers = ("--peer-ca-file", files.ca, "--peer-cert-file", files.cert, "--peer-key-file", files.key)

    def parts(options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        valkey = next(part for part in stack_parts(options, dirs) if part.name == "valkey")

        def gateway(facts: Facts) -> list[str]:
            addresses = [(f"--{part}", facts[part]["address"]) for part in ("target", "draft")]
            return python_module(
                "services.gateway",
                *(word for pair in addresses for word in pair),
                *("--redis-url", f"unix://{facts['valkey']['address']}"),
                *("--model", model, "--model-name", "tiny", *served, *peers),
            )

        target = python_module("services.target", "--model", model, "--dtype", "float32", *served)
        draft = python_module("services.draft", "--tokenizer", model, *served)
        return [
            valkey,
            PartSpec("target", lambda _: target),
            PartSpec("draft", lambda _: draft),
            PartSpec("gateway", gateway, after=("valkey", "target", "draft")),
        ]

    async with Stack(StackOptions(), parts=parts) as stack:
        yield stack


async def traffic(client: AsyncClient) -> None:
    """Request answers with and without drafts, resume one, and have a request refused."""
    # At other temperatures the tiny model may draw the token that poisons it.
    greedy = partial(client.stream, PROMPT, temperature=0.0)
    while True:
        await read(greedy(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True, workload="w", speculation=FIXED))
        plain = greedy(max_tokens=8, ignore_eos=True, speculation=Speculation(off=True))
        await read(plain)
        await read(client.resume(plain.session_id, 4))
        with pytest.raises(GalleyRpcError):
            await read(greedy(max_tokens=0))


async def read(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


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
    return {
        where: expr.replace("$namespace", ".*").replace("$__rate_interval", "1m")
        for where, expr in exprs.items()
    }


async def has_value(prometheus: Prometheus, expr: str) -> bool:
    """Return True if a series has a number."""
    return any(math.isfinite(float(series["value"][1])) for series in await prometheus.query(expr))


async def without_value(prometheus: Prometheus, exprs: dict[str, str]) -> dict[str, str]:
    return {where: expr for where, expr in exprs.items() if not await has_value(prometheus, expr)}


@pytest.mark.timeout(150)
async def test_every_query_has_a_value(stack: Stack, files: Mounted, tmp_path: Path) -> None:
    tls = Tls(files.ca)
    addresses = {part: str(stack.facts(part)["metrics"]) for part in SERVICES}
    async with (
        scraping(tmp_path, addresses, RULES) as prometheus,
        AsyncClient(stack.address("gateway"), retries=NO_RETRIES, tls=tls) as client,
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
        there = await prometheus.query('{__name__=~"galley_.+|gen_ai_.+"}')
        assert not set(SERIES) - {series["metric"]["__name__"] for series in there}
        services = {series["metric"]["service"] for series in await prometheus.query("galley_build_info")}
        assert services == set(SERVICES)
        [speed_up] = await prometheus.query(
            'galley_plain_time_seconds_total{workload="none"} / galley_decode_time_seconds_total'
        )
        assert float(speed_up["value"][1]) == pytest.approx(1.0, abs=0.05)
