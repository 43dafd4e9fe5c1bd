"""The target's states reach the draft that reads them, and nobody else; bad or lost ones are harmless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import grpc
import pytest
from redis.asyncio import Redis

from galley.client.options import Speculation
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.core import names
from galley.core.features import MAX_FEATURE_TOKENS
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.readings import number
from tests.fakes.replicas import STATE_SIZE, FakeDraft, states_of
from tests.fakes.spans import KeptSpans, attributes_of
from tests.fakes.world import PROMPT_TOKENS, World, any_credit, must_be_true, receive

LAYERS = (2, 5, 8)
TARGET_LAYERS = 8
TOKEN_BYTES = 2 * STATE_SIZE * len(LAYERS)
FOUR = Speculation(k=4)


def confirmed_end(item: pb.ProposeItem) -> int:
    return item.slice.start + len(item.slice.tokens) - item.ahead


def read_states(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    """Say of a proposal whether it came with the state of the token before the last confirmed one."""
    end = item.features_position + len(item.features) // TOKEN_BYTES
    answer.result.used_features = bool(item.features) and end >= confirmed_end(item) - 1


def with_states(world: World) -> None:
    world.target.feature_size, world.target.feature_layers = STATE_SIZE, TARGET_LAYERS
    world.target.pass_s = 0.002
    world.draft.feature_layers = LAYERS
    world.draft.strategies = (names.FEATURES, names.HYBRID, names.NGRAM)
    world.draft.corrupt = read_states


def sent_positions(draft: FakeDraft) -> list[int]:
    """Return the positions of all states that the draft was sent, in order; check what each message has."""
    positions: list[int] = []
    for item in draft.calls:
        tokens, rest = divmod(len(item.features), TOKEN_BYTES)
        sent = range(item.features_position, item.features_position + tokens)
        assert (rest, tokens <= MAX_FEATURE_TOKENS) == (0, True)
        assert item.features == states_of(sent, LAYERS)
        assert not tokens or sent[-1] < confirmed_end(item), "states of draft tokens"
        positions += sent
    return positions


@any_credit
@pytest.mark.parametrize("prompt_tokens", [len(PROMPT_TOKENS), 150])
async def test_a_draft_gets_each_state_once_and_in_order(
    world: World, credit: int, prompt_tokens: int
) -> None:
    with_states(world)
    gateway = await world.gateway(credit=credit)
    prompt = [*PROMPT_TOKENS, *range(150)][:prompt_tokens]
    received = await receive(gateway.generate(prompt, speculation=FOUR))
    positions = sent_positions(world.draft)
    first = max(0, prompt_tokens - MAX_FEATURE_TOKENS)
    assert positions[0] >= first
    assert positions == list(range(positions[0], positions[-1] + 1))
    assert positions[-1] >= prompt_tokens, "those of the output too"
    stats = received.end.speculation
    assert 0 < stats.proposals_with_features <= stats.proposals == len(world.draft.calls) - stats.cancelled


async def test_what_is_passed_on_is_counted(world: World) -> None:
    with_states(world)
    registry, spans = Registry(GATEWAY), KeptSpans()
    gateway = await world.gateway_of(replace(spans.parts(), metrics=registry), credit=0)
    received = await receive(gateway.generate(speculation=FOUR))
    must_be_true(received)
    await gateway.idle()
    stats = received.end.speculation
    assert number(registry, catalogue.PROPOSALS) == stats.proposals
    assert number(registry, catalogue.PROPOSALS_WITH_FEATURES) == stats.proposals_with_features
    sent = number(registry, catalogue.FEATURE_BYTES, "sent")
    assert sent == sum(len(item.features) for item in world.draft.calls)
    assert number(registry, catalogue.FEATURE_BYTES, "received") >= sent
    [request] = await spans.requests()
    attributes = attributes_of(request)
    assert attributes[names.PROPOSALS] == stats.proposals
    assert attributes[names.PROPOSALS_WITH_FEATURES] == stats.proposals_with_features


@dataclass(frozen=True)
class Refused:
    """Why no states are asked for; all else would have them."""

    name: str
    layers: Sequence[int] = LAYERS
    size: int = STATE_SIZE
    target_size: int = STATE_SIZE
    strategies: Sequence[str] = (names.FEATURES, names.NGRAM)
    speculation: Speculation = FOUR

    def __str__(self) -> str:
        return self.name


REFUSED = [
    Refused("a draft that reads none", layers=()),
    Refused("a target that sends none", target_size=0),
    Refused("another size", size=STATE_SIZE + 1),
    Refused("layers that the target lacks", layers=(1, TARGET_LAYERS + 1)),
    Refused("no layer", layers=(0, 1)),
    Refused("falling layers", layers=(2, 1)),
    Refused("too many layers", layers=(1, 2, 3, 4, 5)),
    Refused("speculation off", speculation=Speculation(off=True)),
    Refused("by lookup", speculation=Speculation(k=4, strategy=names.NGRAM)),
    Refused("by lookup as the default", strategies=(names.NGRAM, names.FEATURES)),
    Refused("without drafts", speculation=Speculation(k=4, strategy=names.NO_STRATEGY)),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
async def test_no_states_are_asked_for_in_vain(world: World, case: Refused) -> None:
    with_states(world)
    world.target.feature_size = case.target_size
    world.draft.feature_layers, world.draft.feature_size = case.layers, case.size
    world.draft.strategies = tuple(case.strategies)
    gateway = await world.gateway(credit=8)
    must_be_true(await receive(gateway.generate(speculation=case.speculation)))
    assert not any(item.want_features or item.feature_layers for item in world.target.calls)
    assert not any(item.features for item in world.draft.calls)


@pytest.mark.parametrize("strategy", ["", names.FEATURES, names.HYBRID])
async def test_strategies_that_read_states_get_them(world: World, strategy: str) -> None:
    with_states(world)
    gateway = await world.gateway(credit=0)
    must_be_true(await receive(gateway.generate(speculation=Speculation(k=4, strategy=strategy))))
    assert all(tuple(item.feature_layers) == LAYERS for item in world.target.calls if item.want_features)
    assert sent_positions(world.draft)


def torn(result: pb.VerifyResult) -> None:
    result.features = result.features[:-1]


def oversized(result: pb.VerifyResult) -> None:
    result.features = bytes(TOKEN_BYTES * (MAX_FEATURE_TOKENS + 1))


def from_the_future(result: pb.VerifyResult) -> None:
    result.features_position = 2**32 - 1


def lost(result: pb.VerifyResult) -> None:
    if result.position % 3:
        result.features = b""


@any_credit
@pytest.mark.parametrize("spoil", [torn, oversized, from_the_future, lost], ids=lambda it: it.__name__)
async def test_bad_states_of_a_target_are_not_passed_on(
    world: World, spoil: Callable[[pb.VerifyResult], None], credit: int
) -> None:
    with_states(world)
    world.target.spoil = spoil
    gateway = await world.gateway(credit=credit)
    must_be_true(await receive(gateway.generate(speculation=FOUR)))
    assert bool(sent_positions(world.draft)) == (spoil is lost)


async def test_states_of_no_numbers_are_not_passed_on(world: World) -> None:
    def send_unasked(result: pb.VerifyResult) -> None:
        result.features = b"unasked!"

    with_states(world)
    world.draft.feature_size = 0
    world.target.spoil = send_unasked
    gateway = await world.gateway(credit=0)
    must_be_true(await receive(gateway.generate(speculation=FOUR)))
    assert not any(item.features for item in world.draft.calls)


@any_credit
async def test_a_draft_that_refuses_states_costs_no_token(world: World, credit: int) -> None:
    def refuse(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
        if item.features:
            answer.status.code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            answer.status.message = "features: must be none"

    with_states(world)
    world.draft.corrupt = refuse
    gateway = await world.gateway(credit=credit)
    must_be_true(await receive(gateway.generate(speculation=FOUR)))


async def test_states_are_not_sent_again(world: World) -> None:
    """A draft that fails, or misses its cache, has lost them."""
    with_states(world)
    gateway = await world.gateway(credit=0)
    stream = gateway.generate(speculation=FOUR)
    received = await receive(stream, until=8)
    world.draft.forget()
    world.draft.fail(grpc.StatusCode.UNAVAILABLE, 1)
    must_be_true(await received.listen(stream))
    positions = sent_positions(world.draft)
    assert len(set(positions)) == len(positions)


async def test_the_store_has_no_states(world: World) -> None:
    with_states(world)
    gateway = await world.gateway(credit=0)
    received = await receive(gateway.generate(speculation=FOUR))
    must_be_true(received)
    assert received.started is not None
    stored = b""
    async with Redis.from_url(world.redis_url) as store:
        async for key in store.scan_iter(f"galley:*{{{received.started.session_id}}}*"):
            values = await (store.hvals(key) if await store.type(key) == b"hash" else store.mget(key))
            stored += b"".join(cast("list[bytes]", values))
    assert received.tokens[-1].to_bytes(4, "little") in stored
    positions = sent_positions(world.draft)
    assert positions
    assert not any(states_of([position], LAYERS) in stored for position in positions)
