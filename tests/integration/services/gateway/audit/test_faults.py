"""Planted faults of engines and stores: an audit finds each, at the tokens that another engine finds too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from galley import Speculation
from galley.client.audit import AuditReport, Verdict
from galley.engine.model import CausalModel
from tests.fakes.redis_servers import Server
from tests.fakes.world import Received, receive
from tests.integration.services.gateway.audit.faults import (
    FAULT_PASS,
    FAULTS,
    PROMPT,
    Faulty,
    Judge,
    rewrite,
    with_seed,
    with_token,
)
from tests.integration.services.gateway.real import Real, paged

LENGTH = 60
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 3},
    "sampled": {"temperature": 0.8, "seed": 3},
}


@pytest.fixture(scope="module")
def judge(tiny: Path) -> Judge:
    return Judge(tiny)


def must_find(report: AuditReport, received: Received, differing: list[int]) -> None:
    assert differing
    assert report.verdict is Verdict.DIFFERS
    assert (report.compared, report.differing) == (len(received.tokens), len(differing))
    assert [difference.index for difference in report.differences] == differing[:16]
    for difference in report.differences:
        assert difference.logged == received.tokens[difference.index] != difference.computed
        assert difference.computed_logprob is not None


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_while_a_session_ran_is_found(
    tmp_path: Path, tiny: Path, shared_store: Server, judge: Judge, fault: str, sampling: str
) -> None:
    engines: list[Faulty] = []

    def make(model: CausalModel) -> Faulty:
        engines.append(Faulty(model, FAULTS[fault]))
        return engines[-1]

    async with Real(tmp_path, tiny, shared_store.url, engines=[make], drafts=True, credit=0) as real:
        options = {**SAMPLINGS[sampling], "max_tokens": LENGTH, "speculation": Speculation(k=2)}
        stream = real.generate(PROMPT, **options)
        received = await receive(stream)
        assert engines[0].passes > FAULT_PASS
        engines[0].repair()
        report = await real.gateway.client.audit(stream.session_id)
        must_find(report, received, judge.differing(received.tokens, SAMPLINGS[sampling]))
        again = real.generate([*PROMPT, 1], **options)
        await receive(again)
        assert (await real.gateway.client.audit(again.session_id)).verdict is Verdict.SAME


async def test_a_session_that_was_changed_with_its_hashes_is_found(
    tmp_path: Path, tiny: Path, shared_store: Server, judge: Judge
) -> None:
    sampling = SAMPLINGS["sampled"]
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged]) as real:
        stream = real.generate(PROMPT, max_tokens=LENGTH, **sampling)
        received = await receive(stream)
        await rewrite(shared_store.url, stream.session_id, lambda stored: with_token(stored, 30))
        received.tokens[30] ^= 1
        report = await real.gateway.client.audit(stream.session_id)
        differing = judge.differing(received.tokens, sampling)
        must_find(report, received, differing)
        assert differing[0] == 30
        received.tokens[30] ^= 1
        await rewrite(
            shared_store.url, stream.session_id, lambda stored: with_seed(with_token(stored, 30), 4)
        )
        report = await real.gateway.client.audit(stream.session_id)
        must_find(report, received, judge.differing(received.tokens, {**sampling, "seed": 4}))


async def test_a_seed_that_was_changed_without_its_hash_is_damaged(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged]) as real:
        stream = real.generate(PROMPT, max_tokens=8, **SAMPLINGS["sampled"])
        await receive(stream)
        async with shared_store.raw() as raw:
            [key] = [key async for key in raw.scan_iter(f"galley:sessions:*{{{stream.session_id}}}")]
            fields: dict[Any, Any] = await raw.hgetall(key)
            [piece] = [name for name, value in fields.items() if b'"seed":3' in value]
            await raw.hset(key, piece, fields[piece].replace(b'"seed":3', b'"seed":4'))
        assert (await real.gateway.client.audit(stream.session_id)).verdict is Verdict.DAMAGED
