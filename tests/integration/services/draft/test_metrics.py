"""What a draft counts of its steps and items."""

from __future__ import annotations

from pathlib import Path

from galley.common.metrics import catalogue
from galley.common.metrics.catalogue import SERVED_CERTIFICATE_EXPIRY, of_service
from galley.common.metrics.labels import DRAFT, PROPOSED
from galley.common.metrics.registry import Registry
from galley.core.names import MODEL
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.readings import count, histogram, number
from tests.integration.services.draft.steps import gating, item


async def test_items_and_steps_are_counted_by_what_became_of_them(tiny: Path) -> None:
    registry = Registry(DRAFT)
    async with gating(tiny, metrics=registry) as (gated, _, draft):
        gated.open()
        assert set(registry.metrics) == set(of_service(DRAFT)) - {SERVED_CERTIFICATE_EXPIRY}
        answers = await draft.stub.Propose(
            pb.ProposeRequest(
                items=[
                    item([5, 9, 2], 3, "a"),
                    item([5, 9, 2], 1, "b"),
                    item([5, 9, 2], 999, "c"),
                    item([5, 9, 2], 1, "d", start=2),
                ]
            )
        )
        assert [answer.WhichOneof("outcome") for answer in answers.answers] == [
            "result",
            "result",
            "status",
            "cache_miss",
        ]

    outcomes = {of: number(registry, catalogue.DRAFT_PROPOSALS, MODEL, of) for of in PROPOSED.values}
    assert outcomes == {"result": 2, "cache_miss": 1, "superseded": 0, "cancelled": 0, "error": 1}
    assert count(registry, catalogue.DRAFT_QUEUE_AGE) == 3
    steps = histogram(registry, catalogue.DRAFT_BATCH_SESSIONS)
    assert sum(steps.counts) == count(registry, catalogue.DRAFT_STEP_DURATION)
    assert steps.total >= 2 + 1 + 1, "two open together, of which one is done"
    assert number(registry, catalogue.DRAFT_QUEUE_DEPTH) == 0
    assert number(registry, catalogue.WASTED_DRAFT_TOKENS, "cancelled") == 0


async def test_abandoned_proposal_is_cancelled_and_counted_as_wasted(tiny: Path) -> None:
    registry = Registry(DRAFT)
    async with gating(tiny, metrics=registry) as (gated, stream, _):
        await stream.send(item([5, 9, 2], 8, "a"))
        await gated.step_started()
        await gated.pass_on()
        await stream.cancel("a")
        gated.open()
        await stream.send(item([5, 9, 2], 1, "b"))
        await stream.next()
    assert number(registry, catalogue.DRAFT_PROPOSALS, MODEL, "cancelled") == 1
    assert 0 < number(registry, catalogue.WASTED_DRAFT_TOKENS, "cancelled") < 8
