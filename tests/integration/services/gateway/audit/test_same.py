"""Audits of real engines: sessions of all kinds are computed again to the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from galley import Speculation
from galley.client.audit import AuditReport, Verdict
from galley.engine.model import CausalModel
from services.target.engine.paged.engine import PagedEngine
from tests.fakes.redis_servers import Server
from tests.fakes.world import receive
from tests.integration.services.gateway.real import Real, paged
from tests.integration.services.target.conftest import Servable, StubVllm

PROMPT = [5, 9, 2, 33]
LENGTH = 60
REGEX = "[a-f]{2}(name: [g-p]{3}; |xyz ){5,8}"
SAMPLED = {"temperature": 0.8, "seed": 11}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "one token": {"max_tokens": 1, **SAMPLED},
    "off": {"speculation": Speculation(off=True), **SAMPLED},
    "fixed": {"speculation": Speculation(k=4), **SAMPLED},
    "trees": {"speculation": Speculation(k=6, width=2), **SAMPLED},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, **SAMPLED},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3, **SAMPLED},
    "bias": {"logit_bias": {7: 5.0, 8: -100.0}, **SAMPLED},
    "logprobs": {"logprobs": 3, **SAMPLED},
    "stop": {"stop": ["c", "Q"], "min_tokens": 3, **SAMPLED},
    "stop tokens": {"stop_token_ids": list(range(64)), "ignore_eos": False, "min_tokens": 5, **SAMPLED},
    "grammar": {"regex": REGEX, "ignore_eos": False, "max_tokens": 100, **SAMPLED},
    "greedy grammar": {"regex": REGEX, "ignore_eos": False, "max_tokens": 100, "temperature": 0.0},
    "prediction": {"prediction": [1, 2, 3, 4], **SAMPLED},
}


def vllm(model: CausalModel) -> Servable:
    return StubVllm(model)


@pytest.mark.parametrize("engine", [paged, vllm])
async def test_sessions_of_all_kinds_are_the_same(
    tmp_path: Path, spelling: Path, shared_store: Server, engine: Callable[[CausalModel], Servable]
) -> None:
    async with Real(tmp_path, spelling, shared_store.url, engines=[engine], drafts=True) as real:
        for name, options in KINDS.items():
            stream = real.generate(PROMPT, **{"max_tokens": LENGTH, "temperature": 0.0, **options})
            received = await receive(stream)
            report = await real.gateway.client.audit(stream.session_id)
            got = (report.verdict, report.output_tokens, report.compared, report.differing)
            assert got == (Verdict.SAME, len(received.tokens), len(received.tokens), 0), name
            assert (report.fingerprint, report.deterministic) == ("f00d", True)


async def test_another_replica_of_the_build_is_preferred(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged, paged]) as real:
        stream = real.generate(PROMPT)
        await receive(stream)
        [other] = [target for target in real.targets if not target.engine.passes]
        assert (await real.gateway.client.audit(stream.session_id)).verdict is Verdict.SAME
        assert other.engine.passes


async def test_after_a_failover_only_the_tokens_of_the_build_that_is_left_are_compared(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    def of_another_build(model: CausalModel) -> Servable:
        return PagedEngine(model, "beef")

    engines = [paged, of_another_build]
    async with Real(tmp_path, tiny, shared_store.url, engines=engines) as real:
        for target in real.targets:
            target.engine.pass_s = 0.005
        stream = real.generate(PROMPT, **SAMPLED)
        received = await receive(stream, until=10)
        doomed, left = sorted(real.targets, key=lambda target: not target.engine.passes)
        doomed.engine.gate.clear()
        await doomed.die()
        await received.listen(stream)
        [(index, fingerprint)] = received.changes
        report = await real.gateway.client.audit(stream.session_id)
        assert (report.verdict, report.fingerprint) == (Verdict.SAME, fingerprint)
        assert report.compared == len(received.tokens) - index < len(received.tokens)
        assert left.engine.passes[-1].chunks[0].start >= index


async def test_a_resumed_session_is_the_same(tmp_path: Path, tiny: Path, shared_store: Server) -> None:
    async with Real(tmp_path, tiny, shared_store.url) as real:
        real.targets[0].engine.pass_s = 0.005
        stream = real.generate(PROMPT, **SAMPLED)
        await receive(stream, until=5)
        stream.cancel()
        await real.gateway.idle()
        received = await receive(real.gateway.client.resume(stream.session_id))
        report = await real.gateway.client.audit(stream.session_id)
        assert (report.verdict, report.compared) == (Verdict.SAME, len(received.tokens))


async def test_thousands_of_tokens_raise_no_false_alarm(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    """Audits run beside each other and beside sessions, some of which share a prompt."""

    async def session(number: int) -> AuditReport:
        sampling = {"temperature": 0.3 * (number % 4), "seed": number, "max_tokens": 150}
        stream = real.generate([*PROMPT[: 1 + number % 3], number % 7], **sampling)
        await receive(stream)
        return await real.gateway.client.audit(stream.session_id)

    given: dict[str, Any] = {"drafts": True, "max_sessions": 256}
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged, paged], **given) as real:
        reports = [
            report
            for first in range(0, 24, 12)
            for report in await asyncio.gather(*map(session, range(first, first + 12)))
        ]
    assert {report.verdict for report in reports} == {Verdict.SAME}
    assert sum(report.compared for report in reports) == 24 * 150
