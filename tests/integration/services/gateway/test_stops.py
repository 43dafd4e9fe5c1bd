"""Where an answer ends, through the wire, with drafts that run past the end."""

from __future__ import annotations

import pytest

from galley.client.options import Message, Speculation
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import ASSISTANT, END, SEED, USER, logprobs_of, text_of, true_output
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, Gateway, World, any_credit, must_be_true, receive

SPECULATIONS = [
    Speculation(off=True),
    Speculation(),
    Speculation(k=1),
    Speculation(k=4),
    Speculation(k=16, strategy="ngram"),
]


def output(max_tokens: int = MAX_TOKENS, seed: int = SEED, **rest: object) -> list[int]:
    return true_output(PROMPT_TOKENS, max_tokens, seed, **rest)  # type: ignore[arg-type]


def seed_with_end(after: int, before: int) -> int:
    return next(seed for seed in range(10_000) if END in output(before, seed)[after:])


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
async def test_an_answer_is_the_same_with_every_speculation(world: World, speculation: Speculation) -> None:
    gateway = await world.gateway()
    received = await receive(gateway.generate(speculation=speculation))
    must_be_true(received)
    assert any(received.from_draft) != speculation.off
    assert {call.strategy for call in world.draft.calls} <= {speculation.strategy}
    k = 0 if speculation.off else speculation.k or 16
    assert {call.max_verified for call in world.target.calls} == {k}
    assert len(received.end.speculation.verified_at) <= k


@any_credit
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
async def test_a_stop_string_ends_the_answer(gateway: Gateway, speculation: Speculation) -> None:
    text = text_of(output())
    for size in (1, 2, 5):
        stop = text[12 : 12 + size]
        at = text.index(stop)
        received = await receive(gateway.generate(speculation=speculation, stop=["never said", stop]))
        assert received.text == text[:at]
        assert (received.end.reason, received.end.stop) == (pb.Finished.REASON_STOP, stop)
        assert text_of(received.tokens) == text[: at + len(stop)], (
            "the tokens go to the end of the stop string"
        )
        assert received.end.usage.output_tokens == len(received.tokens)


@any_credit
async def test_held_back_text_is_sent_at_the_end(gateway: Gateway) -> None:
    text = text_of(output())
    received = await receive(gateway.generate(stop=[text[-3:] + "!?"]))
    assert received.text == text
    assert received.end.reason == pb.Finished.REASON_LENGTH


@any_credit
@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
async def test_a_stop_token_ends_the_answer(gateway: Gateway, speculation: Speculation) -> None:
    stop = output()[20]
    expected = output(stops=frozenset({stop}))
    received = await receive(gateway.generate(speculation=speculation, stop_token_ids=[stop]))
    assert received.tokens == expected
    assert received.text == text_of(expected[:-1])
    assert (received.end.reason, received.end.stop_token_id) == (pb.Finished.REASON_STOP, stop)


@any_credit
async def test_the_eos_token_stops_unless_ignored(gateway: Gateway) -> None:
    seed = seed_with_end(3, 30)
    received = await receive(gateway.generate(seed=seed, ignore_eos=False))
    assert received.tokens == output(seed=seed, stops=frozenset({END}))
    assert (received.end.reason, received.end.stop_token_id) == (pb.Finished.REASON_STOP, END)

    received = await receive(gateway.generate(seed=seed, ignore_eos=True))
    must_be_true(received, seed=seed)
    assert END in received.tokens
    assert received.end.reason == pb.Finished.REASON_LENGTH


@any_credit
async def test_min_tokens_delays_stops(gateway: Gateway) -> None:
    seed = seed_with_end(3, 30)
    received = await receive(gateway.generate(seed=seed, ignore_eos=False, min_tokens=35))
    assert received.tokens == output(seed=seed, stops=frozenset({END}), min_tokens=35)
    assert END not in received.tokens[:35]

    text = text_of(output())
    received = await receive(gateway.generate(stop=[text[2]], min_tokens=10))
    assert len(received.tokens) > 10
    if received.end.reason == pb.Finished.REASON_STOP:
        assert received.end.stop == text[2]


@any_credit
async def test_max_tokens_of_one_asks_no_draft(world: World, gateway: Gateway) -> None:
    received = await receive(gateway.generate(max_tokens=1))
    assert received.tokens == output(1)
    assert received.end.reason == pb.Finished.REASON_LENGTH
    assert not world.draft.calls


@any_credit
@pytest.mark.parametrize("top", [None, 0, 3])
async def test_logprobs_are_those_of_the_target(gateway: Gateway, top: int | None) -> None:
    received = await receive(gateway.generate(logprobs=top))
    must_be_true(received)
    assert received.logprobs == (
        [] if top is None else [logprobs_of(token, top) for token in received.tokens]
    )


async def test_logprobs_have_the_bytes_of_their_tokens(gateway: Gateway) -> None:
    received = await receive(gateway.generate(logprobs=20, seed=seed_with_end(3, 30)))
    control = {END: b"<|end|>", USER: b"<|user|>", ASSISTANT: b"<|assistant|>"}
    listed = [
        [token, *(other for other, _ in entry.top)]
        for token, entry in zip(received.tokens, received.logprobs, strict=True)
    ]
    assert received.token_bytes == [
        tuple(bytes([token]) if token < END else control.get(token, b"") for token in tokens)
        for tokens in listed
    ]
    flat = {token for tokens in listed for token in tokens}
    assert {END, USER, ASSISTANT, ASSISTANT + 1} <= flat, "control tokens, and ids that have no token"
    assert flat & set(range(0x80, 0x100)), "parts of characters"


async def test_a_chat_goes_through_the_models_template(gateway: Gateway) -> None:
    stream = gateway.client.stream([Message("user", "hé")], max_tokens=8, seed=SEED, ignore_eos=True)
    received = await receive(stream)
    prompt = [USER, *"hé".encode(), ASSISTANT]
    assert received.tokens == true_output(prompt, 8, SEED)
    assert received.started is not None
    assert received.started.prompt_tokens == len(prompt)


async def test_the_pools_receive_the_request_unchanged(world: World, gateway: Gateway) -> None:
    await receive(
        gateway.generate(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=-1.5,
            presence_penalty=0.75,
            repetition_penalty=1.25,
            logit_bias={3: -2.0},
            stop_token_ids=[9],
            ignore_eos=False,
            min_tokens=2,
            priority=-3,
            workload="tests",
        )
    )
    for item in (world.target.calls[0], world.draft.calls[0]):
        request = item.slice
        assert request.sampling == pb.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=-1.5,
            presence_penalty=0.75,
            repetition_penalty=1.25,
            logit_bias={3: -2.0},
            seed=SEED,
        )
        assert list(request.stop_token_ids) == [9, END]
        assert (request.min_tokens, request.priority) == (2, -3)
        assert (request.prompt_len, request.max_position) == (
            len(PROMPT_TOKENS),
            len(PROMPT_TOKENS) + MAX_TOKENS,
        )
        assert request.remaining_ns > 0
        assert request.arrival_ns > 0
    assert world.draft.calls[0].workload == "tests"


SECOND = 1_000_000_000
# gRPC writes a deadline in few digits and rounds it up: of 20 s, up to 20.1 s are seen behind a quick hop.
ROUNDED_UP = 1.005


@any_credit
async def test_every_request_carries_the_remaining_time(world: World) -> None:
    gateway = await world.gateway(draft_timeout_s=100)
    must_be_true(await receive(gateway.generate(timeout_s=20)))
    for calls in (world.draft.calls, world.target.calls):
        left = [call.slice.remaining_ns for call in calls]
        assert left
        assert all(0 < ns <= 20 * SECOND * ROUNDED_UP for ns in left)
        assert left == sorted(left, reverse=True)


async def test_without_a_deadline_requests_have_default_bounds(world: World, credit: int) -> None:
    assert credit == 0
    gateway = await world.gateway(draft_timeout_s=10, verify_timeout_s=30)
    must_be_true(await receive(gateway.generate()))
    assert {call.slice.remaining_ns for call in world.target.calls} == {30 * SECOND}
    assert {call.slice.remaining_ns for call in world.draft.calls} == {8 * SECOND}
