"""What a gateway counts of its streams: each number against what clients and replicas saw of the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc
import pytest

from galley.client.options import Speculation
from galley.common.metrics import catalogue
from galley.common.metrics.catalogue import of_service
from galley.common.metrics.labels import ENDS, GATEWAY, WORKLOAD
from galley.common.metrics.metric import Metric
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import render
from galley.common.server.server import Parts
from galley.core.names import LOOKUP, MODEL
from galley.core.routing.breaker import FAILURES
from services.gateway.clock import SECOND
from services.gateway.telemetry import call
from tests.fakes.readings import count, histogram, number, total
from tests.fakes.spans import KeptSpans
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT_TOKENS,
    Gateway,
    Received,
    World,
    any_credit,
    must_be_true,
    receive,
    refused,
)
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile, calling
from tests.integration.services.gateway.test_drafts import internal

FIXED = Speculation(k=4)
NAME = "tiny"
CALL = ("text_completion", "galley", NAME, NAME)


@dataclass(frozen=True)
class Counted:
    gateway: Gateway
    registry: Registry

    def number(self, metric: Metric, *labels: str) -> float:
        return number(self.registry, metric, *labels)

    def ends(self) -> dict[tuple[str, str], float]:
        counted = {end: self.number(catalogue.STREAMS, *end) for end in ENDS}
        return {end: calls for end, calls in counted.items() if calls}


async def counted(world: World, **given: object) -> Counted:
    registry = Registry(GATEWAY)
    return Counted(await world.gateway_of(Parts(metrics=registry), **given), registry)


async def test_every_metric_of_the_catalogue_is_exported(world: World) -> None:
    it = await counted(world)
    assert set(it.registry.metrics) == set(of_service(GATEWAY))
    assert it.number(catalogue.REPLICAS, "target", "up") == 1
    assert it.number(catalogue.REPLICAS, "draft", "up") == 1
    assert it.number(catalogue.BREAKER_STATE, "draft", world.draft.address) == 0
    alone = await counted(world, draft="none")
    assert total(alone.registry, catalogue.REPLICAS) == 1


async def test_an_adapter_is_counted_as_the_model_of_its_calls(world: World) -> None:
    world.target.lora_adapters = ("sql",)
    it = await counted(world)
    for name in ("sql", "tiny:sql"):
        await receive(it.gateway.generate(model=name))
    await receive(it.gateway.generate(lora="sql"))
    await receive(it.gateway.generate())
    await refused(receive(it.gateway.generate(model="other")))
    adapted = ("text_completion", "galley", "sql", "sql")
    for metric, labels in ((catalogue.REQUEST_DURATION, ("",)), (catalogue.TIME_TO_FIRST_TOKEN, ())):
        assert [count(it.registry, metric, *call, *labels) for call in (adapted, CALL)] == [3, 1]
    failed = ("text_completion", "galley", "other", "", "invalid_argument")
    assert count(it.registry, catalogue.REQUEST_DURATION, *failed) == 1


@any_credit
async def test_counted_tokens_are_those_of_the_stream(world: World) -> None:
    world.draft.spoil_rate = 0.3
    world.target.pass_s = 0.02
    it = await counted(world)
    received = await receive(it.gateway.generate(speculation=FIXED, workload="w"))
    must_be_true(received)
    await it.gateway.idle()

    of = ("w", MODEL, NAME)
    accepted = sum(received.from_draft)
    assert 0 < accepted < MAX_TOKENS
    assert it.number(catalogue.CONFIRMED_TOKENS, "draft", "w") == accepted
    assert it.number(catalogue.CONFIRMED_TOKENS, "target", "w") == MAX_TOKENS - accepted
    assert total(it.registry, catalogue.ACCEPTED_TOKENS) == accepted
    verified = total(it.registry, catalogue.VERIFIED_TOKENS)
    assert accepted <= verified <= total(it.registry, catalogue.DRAFTED_TOKENS)
    assert it.number(catalogue.ACCEPTED_TOKENS, *of) > 0
    assert total(it.registry, catalogue.ACCEPTED_AT) == accepted
    assert total(it.registry, catalogue.VERIFIED_AT) == verified

    rounds = total(it.registry, catalogue.ROUNDS)
    assert rounds == received.end.speculation.rounds == world.target.answered
    for metric, labels in (
        (catalogue.K, ("w",)),
        (catalogue.ROUND_DURATION, ()),
        (catalogue.DRAFT_WAIT, ()),
    ):
        assert count(it.registry, metric, *labels) == rounds
    assert total(it.registry, catalogue.OVERLAPS) <= rounds
    assert it.number(catalogue.WASTED_DRAFT_TOKENS, "rejected") == verified - accepted
    assert it.number(catalogue.WASTED_VERIFY_TOKENS) == verified + rounds - MAX_TOKENS
    assert count(it.registry, catalogue.COMMIT_DURATION, "ok") >= 1


async def test_compiled_and_refused_grammars_are_counted(world: World) -> None:
    it = await counted(world)
    for _ in "12":
        await receive(it.gateway.generate(regex="[a-f]{3}", ignore_eos=False))
    await refused(receive(it.gateway.generate(regex="(", ignore_eos=False)))
    durations = [
        histogram(it.registry, catalogue.GRAMMAR_COMPILE_DURATION, result) for result in ("ok", "refused")
    ]
    assert [sum(one.counts) for one in durations] == [1, 1]
    assert all(one.total > 0 for one in durations)


@any_credit
async def test_plain_decoding_has_no_speed_up(world: World) -> None:
    it = await counted(world)
    must_be_true(await receive(it.gateway.generate(speculation=Speculation(off=True))))
    plain, real = (it.number(metric, "none") for metric in (catalogue.PLAIN_TIME, catalogue.DECODE_TIME))
    assert real > 0
    assert plain == pytest.approx(real)


async def test_a_call_follows_the_semantic_conventions(world: World) -> None:
    it = await counted(world)
    must_be_true(await receive(it.gateway.generate()))
    await it.gateway.idle()
    assert it.ends() == {("ok", "none"): 1}
    for metric in (catalogue.TIME_TO_FIRST_TOKEN, catalogue.TIME_PER_OUTPUT_TOKEN):
        assert count(it.registry, metric, *CALL) == 1
    first, whole = (
        histogram(it.registry, metric, *CALL, *more).total
        for metric, more in ((catalogue.TIME_TO_FIRST_TOKEN, ()), (catalogue.REQUEST_DURATION, ("",)))
    )
    assert 0 < first < whole


async def test_exemplars_name_the_trace(world: World) -> None:
    kept, registry = KeptSpans(), Registry(GATEWAY)
    parts = replace(kept.parts(), metrics=registry)
    it = Counted(await world.gateway_of(parts), registry)
    must_be_true(await receive(it.gateway.generate()))
    await it.gateway.idle()
    spans = {
        exemplar.span
        for metric, labels in (
            (catalogue.REQUEST_DURATION, (*CALL, "")),
            (catalogue.TIME_TO_FIRST_TOKEN, CALL),
            (catalogue.TIME_PER_OUTPUT_TOKEN, CALL),
            (catalogue.ROUND_DURATION, ()),
            (catalogue.COMMIT_DURATION, ("ok",)),
        )
        for exemplar in histogram(it.registry, metric, *labels).exemplars.values()
    }
    [request] = await kept.requests()
    named = request.context
    assert named is not None
    assert spans == {(named.trace_id, named.span_id)}


async def test_caller_faults_are_counted_as_such(world: World) -> None:
    it = await counted(world)
    await refused(receive(it.gateway.generate(max_tokens=0)))
    await refused(receive(it.gateway.generate(model="another")))
    await refused(receive(it.gateway.client.resume("f" * 32, 0)))
    world.target.gate.close()
    left = it.gateway.generate()
    await receive(left, until=0)
    await anext(left)
    left.cancel()
    await it.gateway.idle()
    late = await refused(receive(it.gateway.generate(timeout_s=1.0)))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await it.gateway.idle()
    assert it.ends() == {
        ("invalid_argument", "caller"): 2,
        ("not_found", "caller"): 1,
        ("cancelled", "caller"): 1,
        ("deadline_exceeded", "caller"): 1,
    }
    assert it.number(catalogue.RESUMES, "not_found") == 1
    wrong = ("text_completion", "galley", "other", "", "invalid_argument")
    assert count(it.registry, catalogue.REQUEST_DURATION, *wrong) == 1


async def test_tokens_that_a_deadline_cut_off_count_as_late(world: World) -> None:
    it = await counted(world)
    world.target.gate.close()
    await refused(receive(it.gateway.generate(timeout_s=1.0)))
    await it.gateway.idle()
    first = histogram(it.registry, catalogue.TIME_TO_FIRST_TOKEN, *CALL)
    assert sum(first.counts) == 1
    assert first.total > 0.5, "the client's deadline began before the call arrived, so a little under its 1 s"
    world.target.gate.close_after(2)
    await refused(receive(it.gateway.generate(timeout_s=1.0)))
    await it.gateway.idle()
    assert count(it.registry, catalogue.TIME_TO_FIRST_TOKEN, *CALL) == 2
    later = histogram(it.registry, catalogue.TIME_PER_OUTPUT_TOKEN, *CALL)
    assert sum(later.counts) == 1
    assert later.total > 0.1, "most of the time passed without a token"


@pytest.mark.parametrize("is_late", [True, False])
async def test_first_tokens_that_a_client_gave_up_count_if_they_were_late(
    world: World, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A client that leaves at once says nothing of the server."""
    monkeypatch.setattr(call, "LATE_NS", 0 if is_late else PATIENCE_S * SECOND)
    it = await counted(world)
    world.target.gate.close()
    stream = it.gateway.generate()
    await anext(stream)
    stream.cancel()
    await it.gateway.idle()
    assert it.ends() == {("cancelled", "caller"): 1}
    world.target.gate.open()
    await receive(it.gateway.generate())
    await it.gateway.idle()
    assert count(it.registry, catalogue.TIME_TO_FIRST_TOKEN, *CALL) == 1 + is_late
    assert count(it.registry, catalogue.TIME_PER_OUTPUT_TOKEN, *CALL) == 1


async def test_overload_and_drain_are_server_faults(world: World) -> None:
    it = await counted(world, max_sessions=1)
    world.target.gate.close()
    stream = it.gateway.generate()
    await anext(stream)
    assert it.number(catalogue.SESSIONS_OPEN) == 1
    assert (await refused(receive(it.gateway.generate()))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert it.number(catalogue.ADMISSION_REJECTED, "streams") == 1
    world.target.gate.open()
    must_be_true(await receive(stream))
    await it.gateway.idle()
    assert it.number(catalogue.SESSIONS_OPEN) == 0
    it.gateway.running.service._streams.refuse_new()  # type: ignore[attr-defined]  # as a drain begins
    assert (await refused(receive(it.gateway.generate()))).code is grpc.StatusCode.UNAVAILABLE
    assert it.number(catalogue.ADMISSION_REJECTED, "draining") == 1
    assert it.ends() == {
        ("ok", "none"): 1,
        ("resource_exhausted", "server"): 1,
        ("unavailable", "server"): 1,
    }


async def test_sessions_are_queued_until_they_have_a_token(world: World) -> None:
    it = await counted(world, max_sessions=2)

    def progress() -> tuple[float, float]:
        return it.number(catalogue.SESSIONS, "queued"), it.number(catalogue.SESSIONS, "running")

    assert it.number(catalogue.SESSIONS_LIMIT) == 2
    assert progress() == (0, 0)
    world.target.gate.close()
    stream = it.gateway.generate()
    await anext(stream)
    assert progress() == (1, 0)
    world.target.gate.close_after(1)
    first = await receive(stream, until=1)
    assert progress() == (0, 1)
    world.target.gate.open()
    await first.listen(stream)
    await it.gateway.idle()
    assert progress() == (0, 0)


async def test_an_endpoint_picker_reads_how_full_targets_are(world: World) -> None:
    """Labels are those of vLLM's cache information."""
    world.target.kv_blocks_total, world.target.kv_blocks_free = 400, 100
    it = await counted(world, target=f"{world.target.address},unix:{world.directory}/absent")
    assert it.number(catalogue.TARGETS_KV_USAGE) == 0.75
    world.target.kv_blocks_free = 300
    descriptions = world.target.described
    await world.target.watch.until(
        lambda: world.target.described >= descriptions + 2
    )  # the first has arrived
    assert it.number(catalogue.TARGETS_KV_USAGE) == 0.25
    assert it.number(catalogue.TARGETS_CACHE, "32", "400") == 1
    text, _ = await render(it.registry.read(), "text/plain")
    for line in (
        "# TYPE galley_targets_cache_info gauge",
        'galley_targets_cache_info{block_size="32",num_gpu_blocks="400"} 1.0',
        "# TYPE galley_targets_kv_usage gauge",
        "# TYPE galley_sessions gauge",
        'galley_sessions{state="queued"} 0.0',
        'galley_sessions{state="running"} 0.0',
    ):
        assert line in text.decode().splitlines()


async def test_the_usage_of_a_target_that_is_not_polled_is_not_reported(world: World) -> None:
    world.target.kv_blocks_total = 400
    it = await counted(world)
    assert it.number(catalogue.TARGETS_CACHE, "32", "400") == 1
    assert not any(
        reading.points for reading in it.registry.read() if reading.metric is catalogue.TARGETS_KV_USAGE
    )


async def test_a_resumed_session_has_no_first_token(world: World) -> None:
    first, second = await counted(world), await counted(world)
    stream = first.gateway.generate()
    received = await receive(stream, until=MAX_TOKENS // 2)
    stream.cancel()
    must_be_true(await received.listen(second.gateway.client.resume_stream(stream)))
    await second.gateway.idle()
    assert second.number(catalogue.RESUMES, "ok") == 1
    assert second.ends() == {("ok", "none"): 1}
    assert not any(
        reading.points
        for reading in second.registry.read()
        if reading.metric is catalogue.TIME_TO_FIRST_TOKEN
    )


async def test_cache_misses_and_failovers_are_counted(world: World) -> None:
    it = await counted(world)
    world.target.gate.close_after(1)
    stream = it.gateway.generate(speculation=Speculation(off=True))
    await anext(stream)
    await world.target.waits_after(1)
    world.target.forget()
    world.target.gate.open()
    must_be_true(await receive(stream))
    assert it.number(catalogue.CACHE_MISSES, "target") == 1
    assert it.number(catalogue.CACHE_MISSES, "draft") == 0

    world.target.gate.close_after(1)
    stream = it.gateway.generate(speculation=Speculation(off=True))
    await anext(stream)
    await world.target.waits_after(1)
    await world.target.stop()
    await world.target.start()
    world.target.gate.open()
    must_be_true(await receive(stream))
    assert it.number(catalogue.FAILOVERS, "target", "restarted") == 1


async def test_a_draft_that_fails_opens_its_breaker(world: World) -> None:
    it = await counted(world)
    world.draft.corrupt = internal
    for _ in range(FAILURES):
        must_be_true(await receive(it.gateway.generate(speculation=FIXED)))
    assert it.number(catalogue.BREAKER_STATE, "draft", world.draft.address) in {1, 2}


async def test_without_a_draft_the_gateway_looks_up(world: World) -> None:
    await world.draft.stop()
    it = await counted(world, lookup_fallback=True)
    assert it.number(catalogue.REPLICAS, "draft", "up") == 0
    await receive(it.gateway.generate([1, 2, 3, 4] * 8, speculation=FIXED))
    assert it.number(catalogue.ROUNDS, "none", LOOKUP) > 0
    assert it.number(catalogue.DRAFTED_TOKENS, "none", LOOKUP, NAME) > 0


async def test_workloads_are_bounded(world: World) -> None:
    it = await counted(world)
    for index in range(WORKLOAD.most + 3):
        await receive(it.gateway.generate(workload=f"w{index}", max_tokens=1))
    named = total(it.registry, catalogue.CONFIRMED_TOKENS)
    assert named == WORKLOAD.most + 3
    assert it.number(catalogue.CONFIRMED_TOKENS, "target", "other") == 4


@pytest.mark.parametrize(("named", "principals"), [(False, ["key"]), (True, ["alice", "bob"])])
async def test_tokens_are_counted_by_caller(world: World, named: bool, principals: list[str]) -> None:
    keys = KeyFile().write(world)
    it = await counted(world, api_keys_file=keys, usage_by_principal=named)
    for key in (ALICE, BOB):
        async with calling(it.gateway, key) as gateway:
            must_be_true(await receive(gateway.generate(workload="w")))
            await refused(receive(gateway.generate(max_tokens=0)))
    await it.gateway.idle()
    calls = 2 / len(principals)
    for principal in principals:
        assert it.number(catalogue.USAGE_TOKENS, principal, "input") == calls * len(PROMPT_TOKENS)
        assert it.number(catalogue.USAGE_TOKENS, principal, "output") == calls * MAX_TOKENS
    assert total(it.registry, catalogue.USAGE_TOKENS) == 2 * (len(PROMPT_TOKENS) + MAX_TOKENS)
    assert it.number(catalogue.PROMPT_TOKENS, "w") == 2 * len(PROMPT_TOKENS)


async def test_the_prompt_of_a_resumed_session_is_counted_once(world: World) -> None:
    first, second = await counted(world), await counted(world)
    stream = first.gateway.generate()
    received = await Received().listen(stream, until=3)
    stream.cancel()
    await first.gateway.idle()
    must_be_true(await received.listen(second.gateway.client.resume_stream(stream)))
    await second.gateway.idle()
    assert first.number(catalogue.USAGE_TOKENS, "anonymous", "input") == len(PROMPT_TOKENS)
    assert total(second.registry, catalogue.PROMPT_TOKENS) == 0
    outputs = [total(it.registry, catalogue.CONFIRMED_TOKENS) for it in (first, second)]
    usages = [it.number(catalogue.USAGE_TOKENS, "anonymous", "output") for it in (first, second)]
    assert usages == outputs
