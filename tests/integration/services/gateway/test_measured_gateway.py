"""The gateway that `make bench-sessions` measures is the real one: it answers, over either store."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.loops.sessions import ARMS
from bench.loops.store import read_ms
from galley.client.client import AsyncClient
from tests.fakes.processes import gateway_process
from tests.fakes.truth import SEED
from tests.fakes.world import MAX_TOKENS, PROMPT, World, hear, must_be_true


@pytest.mark.parametrize("store", ARMS)
async def test_it_answers_and_times_each_commit(world: World, tmp_path: Path, store: str) -> None:
    timings = tmp_path / "timings"
    flags = {"bench-store": store, "bench-timings": str(timings)}
    async with (
        gateway_process(world, tmp_path / "log", {}, flags, module="bench.loops.session_gateway") as address,
        AsyncClient(address) as client,
    ):
        stream = client.generate(PROMPT, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True)
        must_be_true(await hear(stream))
    commits_ms, _ = read_ms(timings, 0)
    assert commits_ms
    assert all(took_ms > 0 for took_ms in commits_ms)
