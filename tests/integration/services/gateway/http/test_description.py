"""The gateway answers as its OpenAPI description says: the short form of `make prove-http`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from tests.fakes.world import World
from tests.integration.services.gateway.http.described import SHORT, check

EXAMPLES = 8
"""Cases of each operation, and again as many that break its description."""


async def test_responses_are_as_described(world: World, tokenizer: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tokenizer, tmp_path / "model")
    (model / "generation_config.json").write_text(SHORT)
    gateway = await world.gateway_of(Parts(metrics=Registry(GATEWAY)), http_port=0, model=str(model))
    tally = await asyncio.to_thread(check, gateway.http, EXAMPLES, 1)
    assert tally.faults == {}
    assert len(tally.responses) == 20
    never = {name: counts for name, counts in tally.responses.items() if not counts[200]}
    assert never == {}, "each operation has succeeded once"
