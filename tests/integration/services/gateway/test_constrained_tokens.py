"""Sessions with a grammar over real services: the same tokens with drafts, forced runs and a lost target."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from galley.client.options import Speculation
from galley.engine.model import CausalModel
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import STOP
from tests.fakes.world import Received, receive
from tests.integration.services.gateway.real import Real, paged
from tests.integration.services.target.conftest import Servable, StubVllm

PROMPT = [5, 9, 2, 33]
REGEX = "[a-f]{2}(name: [g-p]{3}; |xyz ){5,8}"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_p": 0.95, "seed": 11},
}


def vllm(model: CausalModel) -> Servable:
    return StubVllm(model)


def constrained(it: Real, sampling: dict[str, Any], **options: Any) -> Any:
    fields = {"regex": REGEX, "ignore_eos": False, "max_tokens": 150, **sampling, **options}
    return it.generate(PROMPT, **fields)


def must_match(received: Received) -> None:
    assert received.tokens[-1] == STOP
    assert received.tokens.count(STOP) == 1
    assert re.fullmatch(REGEX, bytes(received.tokens[:-1]).decode())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("other", [paged, vllm])
async def test_drafts_and_a_lost_target_change_no_token(
    tmp_path: Path,
    spelling: Path,
    shared_store: Server,
    sampling: str,
    other: Callable[[CausalModel], Servable],
) -> None:
    async with Real(tmp_path, spelling, shared_store.url, engines=[paged, other], drafts=True) as it:
        alone = await receive(constrained(it, SAMPLINGS[sampling], speculation=Speculation(off=True)))
        must_match(alone)
        assert not any(alone.from_draft)
        drafted = await receive(constrained(it, SAMPLINGS[sampling], speculation=Speculation(k=4)))
        assert drafted.tokens == alone.tokens
        assert any(drafted.from_draft)
        for target in it.targets:
            target.engine.pass_s = 0.005
            target.engine.passes.clear()
        stream = constrained(it, SAMPLINGS[sampling], speculation=Speculation(k=2))
        received = await receive(stream, until=10)
        doomed, _ = sorted(it.targets, key=lambda target: not target.engine.passes)
        doomed.engine.gate.clear()
        await doomed.die()
        await received.listen(stream)
        assert received.tokens == alone.tokens
