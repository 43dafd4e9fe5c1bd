"""The committed sample: two scrapes of a small stack that worked, as its services wrote them, 10 s apart.

It is of `galley up --replicas 2` on two cores, asked the fixed prompts of four workloads by six streams.
`python -m tests.unit.galley.top.sample HOST:PORT,...` records them anew from running services (by the
names that `galley up` announced, else the addresses); `make top-picture` draws the dashboard of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from galley.cli.top import named_by_address
from galley.stack.endpoint import Service
from galley.top.fleet import Fleet
from galley.top.scrape import body_of, fetch, read_samples
from galley.top.screen import Screen, next_screen
from galley.top.series import Samples

FOLDER = Path(__file__).parent / "recording"
_SERVICES = FOLDER / "services.json"
_SECONDS = 10.0


def services() -> list[Service]:
    return [Service(**one) for one in json.loads(_SERVICES.read_text())["services"]]


def seconds() -> float:
    return float(json.loads(_SERVICES.read_text())["seconds"])


def text(service: Service, scrape: int) -> str:
    return (FOLDER / f"{service.name}.{scrape}.prom").read_text()


@cache
def samples(service: Service, scrape: int) -> Samples:
    return read_samples(text(service, scrape))


def fleet(*, without: str = "", why: str = "refused") -> tuple[Fleet, float]:
    reported, end_s = Fleet(services(), 0.0), 100.0 + seconds()
    for service in services():
        reported.add(service, 100.0, samples(service, 0))
        if service.name == without:
            reported.fail(service, end_s, why)
        else:
            reported.add(service, end_s, samples(service, 1))
    return reported, end_s


def screen(*, without: str = "", why: str = "refused") -> Screen:
    reported, now_s = fleet(without=without, why=why)
    return next_screen(reported, now_s)


async def _record(of: Sequence[Service]) -> None:
    for scrape in (0, 1):
        bodies = await asyncio.gather(*(fetch(one.metrics) for one in of))
        for service, raw in zip(of, bodies, strict=True):
            (FOLDER / f"{service.name}.{scrape}.prom").write_text(body_of(raw))
        await asyncio.sleep(0 if scrape else _SECONDS)
    fields = {"seconds": _SECONDS, "services": [dataclasses.asdict(one) for one in of]}
    _SERVICES.write_text(json.dumps(fields, indent=1) + "\n")


def _main(argv: Sequence[str]) -> None:
    from galley.stack.endpoint import find_stack  # noqa: PLC0415

    for old in FOLDER.glob("*.prom"):
        old.unlink()
    asyncio.run(_record(named_by_address(argv[0]) if argv else find_stack().services))


if __name__ == "__main__":
    _main(sys.argv[1:])
