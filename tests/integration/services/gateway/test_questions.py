"""What users ask of a slow answer, each made to happen, and answered from its one trace in one sentence.

Each is also what a runbook is about: what that says to look at, the metric and the trace, shows it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from galley.client.client import AsyncStream
from galley.client.options import Speculation
from galley.client.request import generate_request
from galley.common.metrics import catalogue
from galley.common.metrics.metric import Metric
from galley.core import names
from galley.trace.explain.explain import Explanation, explain, summary
from galley.trace.read.model import Story
from galley.trace.read.spans import Span
from galley.trace.show.summary import duration, ms
from tests.fakes.narrow_client import narrow
from tests.fakes.promql import named_by
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.tiny_model import CONTEXT
from tests.fakes.world import receive
from tests.integration.services.gateway.real import Real, paged

HELD_S = 0.4
"""How long whatever is slow takes, for what takes some milliseconds else."""
HELD_NS = HELD_S * 1e9
PROMPT = [5, 9, 2, 33] * 10
LONG = CONTEXT - len(PROMPT)
PLAIN = Speculation(off=True)


@pytest.fixture
def real(tmp_path: Path, tiny: Path, shared_store: Server) -> Callable[..., Real]:
    return lambda **given: Real(tmp_path, tiny, given.pop("store", shared_store.url), **given)


def answer(story: Story) -> tuple[Explanation, Span]:
    result = explain(story)
    assert result.is_slow, result.sentence
    assert result.round is not None
    assert "\n" not in result.sentence
    return result, result.round.span


def signs_of(story: Story) -> set[str]:
    events = (event for request in story.requests for event in request.all_events)
    signs = {sign for span in _spans(story) for sign in _signs(span)}
    return signs.union(*({event.name, *event.attributes} for event in events))


def _spans(story: Story) -> Iterator[Span]:
    for request in story.requests:
        if request.span is not None:
            yield request.span
        for call in request.all_calls:
            yield from (span for span in (call.span, call.served) if span is not None)
        for one in request.rounds:
            yield one.span
            if one.batch is not None:
                yield one.batch.span


def _signs(span: Span) -> Iterator[str]:
    yield span.name
    yield from (name for name, value in span.attributes.items() if value)


def must_be_seen(alert: str, story: Story, metric: Metric, *signs: str) -> None:
    named = named_by(alert)
    assert metric in named.metrics
    assert set(signs) <= named.signs & signs_of(story)


async def test_the_slow_draft(real: Callable[..., Real]) -> None:
    async with real(drafts=True, credit=0) as it:
        it.strategy.stumbles_at, it.strategy.stumble_s = 20, HELD_S
        stream = it.generate(PROMPT, max_tokens=60, speculation=Speculation(k=4))
        await receive(stream)
        waited_s = it.total(catalogue.DRAFT_WAIT)
    story = it.story(stream)
    result, one = answer(story)
    waited_ns, computed_ns = one.integer(names.DRAFT_PART), one.integer(names.DRAFT_COMPUTE_NS)
    assert 0.9 * HELD_NS < waited_ns <= one.duration_ns
    assert computed_ns >= HELD_NS
    text = f"it waited {ms(waited_ns)} ms for draft {it.draft_address}"
    assert f"{text}, which computed for {ms(computed_ns)} ms" in result.sentence
    assert waited_s >= waited_ns / 1e9
    must_be_seen("GalleySpeculationNotPaying", story, catalogue.DRAFT_WAIT, names.DRAFT_PART)


async def test_the_full_batch(real: Callable[..., Real]) -> None:
    async with real() as it:
        [target] = it.targets
        target.engine.pass_s, target.engine.company_s = 0.001, 0.03
        stream = it.generate(PROMPT, max_tokens=LONG, speculation=PLAIN)
        received = await receive(stream, until=20)
        others = [it.generate([token], max_tokens=5, speculation=PLAIN) for token in range(2, 9)]
        await asyncio.gather(received.listen(stream), *map(receive, others))
    story = it.story(stream)
    result, one = answer(story)
    sessions = one.integer(names.BATCH_SESSIONS)
    assert 4 <= sessions <= 8
    computed_ns = one.integer(names.COMPUTE_PART)
    assert computed_ns >= 0.03e9 * (sessions - 1)
    text = f"it computed for {ms(computed_ns)} ms in a step of {sessions} sessions and {sessions} rows"
    assert text in result.sentence
    assert target.address in result.sentence
    assert result.round is not None
    assert result.round.batch is not None
    company = set(story.company(result.round.batch))
    assert len(company) == sessions - 1
    assert company <= {other.session_id for other in others}


async def test_the_cold_cache(real: Callable[..., Real]) -> None:
    async with real() as it:
        [target] = it.targets
        prompt = [7, *PROMPT, *PROMPT]
        left = it.generate(prompt, max_tokens=80, speculation=PLAIN)
        target.engine.pass_s = 0.01
        received = await receive(left, until=8)
        left.cancel()
        await it.gateway.idle()
        target.engine.pass_s = 0.0
        others = [it.generate([token] * 150, max_tokens=1, speculation=PLAIN) for token in range(10, 17)]
        await asyncio.gather(*map(receive, others))
        target.engine.row_s = HELD_S / 100
        stream = it.gateway.client.resume_stream(left)
        await received.listen(stream, until=30)
        stream.cancel()
        await it.gateway.idle()
        evicted = it.total(catalogue.EVICTIONS)
    story = it.story(left)
    assert [request.is_resumed for request in story.requests] == [False, True]
    result, one = answer(story)
    position, reused = one.integer(names.ROUND_POSITION), one.integer(names.KV_REUSED)
    assert position >= len(prompt) + 8
    assert reused < position - 32
    computed_ns = one.integer(names.COMPUTE_PART)
    assert (
        "after other sessions had taken the session's KV blocks, "
        f"the target's cache held {reused} of {position} tokens, "
        f"and recomputing the other {position - reused} took {ms(computed_ns)} ms"
    ) in result.sentence
    assert target.address in result.sentence
    assert evicted > 0
    must_be_seen("GalleyTargetOutOfBlocks", story, catalogue.EVICTIONS, names.KV_EVICTED, names.FREE_BLOCKS)


async def test_the_moved_session(real: Callable[..., Real]) -> None:
    async with real(engines=[paged, paged]) as it:
        for target in it.targets:
            target.engine.pass_s = 0.005
        stream = it.generate(PROMPT, max_tokens=LONG, speculation=PLAIN)
        received = await receive(stream, until=10)
        doomed, other = sorted(it.targets, key=lambda target: not target.engine.passes)
        doomed.engine.gate.clear()
        await asyncio.sleep(HELD_S)
        await doomed.die()
        await received.listen(stream)
        assert len(received.tokens) == LONG
        failovers = it.total(catalogue.FAILOVERS, "target", "failed")
    story = it.story(stream)
    result, one = answer(story)
    lost_ns = one.integer(names.WIRE_PART)
    assert lost_ns > 0.9 * HELD_NS
    position, computed_ns = one.integer(names.ROUND_POSITION), one.integer(names.COMPUTE_PART)
    assert (
        f"{ms(lost_ns)} ms passed until the session moved from target {doomed.address} to target "
        f"{other.address} (failed), which recomputed {position} tokens in {ms(computed_ns)} ms"
    ) in result.sentence
    assert f"It moved from target {doomed.address} to {other.address} (failed)." in summary(story, result)
    assert {one.target for one in story.rounds} == {doomed.address, other.address}
    assert failovers == 1
    must_be_seen(
        "GalleyFailoverRateHigh",
        story,
        catalogue.FAILOVERS,
        *(names.SESSION_MOVED, names.SOURCE, names.TO, names.REASON, names.MOVES),
    )


async def test_the_slow_redis(real: Callable[..., Real]) -> None:
    with running(VALKEY) as store:
        async with real(store=store.url) as it:
            [target] = it.targets
            target.engine.pass_s = 0.005
            stream = it.generate(PROMPT, max_tokens=LONG, speculation=PLAIN)
            received = await receive(stream, until=10)
            store.pause()
            await asyncio.sleep(HELD_S)
            store.go_on()
            await received.listen(stream)
            committed_s = it.total(catalogue.COMMIT_DURATION, "ok")
    story = it.story(stream)
    result, _ = answer(story)
    slowest_ns = max(one.commit_ns for one in story.rounds)
    assert slowest_ns > 0.8 * HELD_NS
    assert "the session store" in result.sentence
    assert f"took {ms(slowest_ns)} ms" in result.sentence
    assert story.requests[0].integer(names.SLOWEST_COMMIT_NS) == slowest_ns
    commits = [call for call in story.requests[0].all_calls if call.operation == "commit"]
    assert max(call.span.duration_ns for call in commits) > 0.8 * HELD_NS
    assert committed_s >= slowest_ns / 1e9
    must_be_seen(
        "GalleyCommitSlow",
        story,
        catalogue.COMMIT_DURATION,
        *(names.COMMIT_NS, names.STORE_OPERATION, names.SLOWEST_COMMIT_NS),
    )


async def test_the_stalled_client(real: Callable[..., Real]) -> None:
    request = generate_request(
        PROMPT,
        {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True, "logprobs": 20, "speculation": PLAIN},
    )
    async with real(buffer=4) as it, narrow(it.gateway.address, 1024) as stub:
        stream = AsyncStream(stub.Generate(request))
        received = await receive(stream, until=4)
        await asyncio.sleep(3)  # a stall of more than 1 s, however slowly the buffer fills
        await received.listen(stream)
        assert len(received.tokens) == LONG
        stalls = it.total(catalogue.CLIENT_STALLS)
    story = it.story(stream)
    result, _ = answer(story)
    assert re.search(r": the client read nothing for [1-9],\d{3} ms of it", result.sentence)
    stalled_ns = story.requests[0].integer(names.CLIENT_STALLED_NS)
    assert 1e9 < stalled_ns < 10e9
    assert f"Its client left the stream unread for {duration(stalled_ns)} in all." in summary(story, result)
    assert stalls == 1
    must_be_seen(
        "GalleyTimePerTokenBudgetBurn",
        story,
        catalogue.CLIENT_STALLS,
        *(names.CLIENT_STALLED, names.CLIENT_STALLED_NS),
    )
