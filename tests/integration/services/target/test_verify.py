"""Verification through the real service: the same tokens whatever the draft says, no item harms another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.core.content import prefix_hash
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from tests.fakes.tiny_model import CONTEXT, POISON, VOCAB, greedy
from tests.fakes.verify_items import generate, slice_of, verify
from tests.integration.services.target.conftest import KV_BLOCKS, Recording, pages

PROMPT = [5, 9, 2, 33, 17]
COUNT = 24


@pytest.fixture(scope="session")
def answer(tiny: Path) -> list[int]:
    return greedy(tiny, PROMPT, COUNT)


def oracle(answer: list[int], k: int, right: int) -> Any:
    def draft(tokens: list[int]) -> list[int]:
        at = len(tokens) - len(PROMPT)
        return [
            token if i < right else (token + 1) % (VOCAB - 1) for i, token in enumerate(answer[at : at + k])
        ]

    return draft


async def test_without_draft_it_is_plain_greedy_decoding(
    target: rpc.TargetAsyncStub, answer: list[int]
) -> None:
    tokens, accepted = await generate(target, PROMPT, COUNT, lambda _: [])
    assert tokens == answer
    assert accepted == [0] * COUNT


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("right", [0, 1, 3, 8])
async def test_no_draft_changes_a_token(
    target: rpc.TargetAsyncStub, answer: list[int], k: int, right: int
) -> None:
    tokens, accepted = await generate(target, PROMPT, COUNT, oracle(answer, k, right))
    assert tokens == answer
    assert_accepted(accepted, min(k, right))


def assert_accepted(accepted: list[int], right: int) -> None:
    assert accepted[0] <= right
    assert (sum(accepted) > 0) == (right > 0)


async def test_seeded_sampling_does_not_depend_on_the_draft(target: rpc.TargetAsyncStub) -> None:
    sampling = pb.SamplingParams(
        temperature=1.2, top_p=0.9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**63
    )
    plain, _ = await generate(target, PROMPT, COUNT, lambda _: [], sampling=sampling)
    assert len(set(plain)) > 5
    for k in (1, 3, 8):
        for right in (1, 8):
            tokens, accepted = await generate(
                target, PROMPT, COUNT, oracle(plain, k, right), sampling=sampling, session_id=f"{k}.{right}"
            )
            assert tokens == plain
            assert_accepted(accepted, min(k, right))


async def test_it_ends_at_a_stop_token_even_within_the_draft(
    target: rpc.TargetAsyncStub, answer: list[int]
) -> None:
    stop = answer[6]
    end = answer.index(stop) + 1
    tokens, _ = await generate(target, PROMPT, COUNT, oracle(answer, 8, 8), stop_token_ids=[stop])
    assert tokens == answer[:end]


async def test_it_never_goes_beyond_max_position(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT)))  # an engine may verify no draft beside it
    tokens = PROMPT + answer[:1]
    part = slice_of(tokens, max_position=len(tokens) + 2)
    item = pb.VerifyItem(slice=part, draft_tokens=oracle(answer, 8, 8)(tokens))
    (got,) = await verify(target, item)
    assert got.result.verified == 1
    assert list(got.result.tokens) == answer[1:3]


async def test_logprobs_are_those_of_the_plain_distribution(
    target: rpc.TargetAsyncStub, answer: list[int]
) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT), logprobs=3))
    tokens = slice_of([*PROMPT, answer[0]])
    (got,) = await verify(target, pb.VerifyItem(slice=tokens, draft_tokens=answer[1:3], logprobs=3))
    assert len(got.result.logprobs) == len(got.result.tokens) == 3
    for token, entry in zip(got.result.tokens, got.result.logprobs, strict=True):
        assert len(entry.top) == 3
        assert entry.top[0].token_id == token
        assert entry.top[0].logprob == entry.logprob < 0
    again = pb.VerifyItem(slice=slice_of(PROMPT), draft_tokens=answer[:2])
    assert not (await verify(target, again))[0].result.logprobs


async def test_a_repeated_item_has_the_same_answer(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT)))
    tokens = [*PROMPT, answer[0]]
    item = pb.VerifyItem(slice=slice_of(tokens), draft_tokens=oracle(answer, 4, 2)(tokens))
    first, second = [(await verify(target, item))[0].result for _ in range(2)]
    assert (list(first.tokens), first.accepted) == (answer[1:4], 2)
    # An engine may read the tokens again, and verify no draft beside them.
    assert list(second.tokens) == answer[1 : 2 + second.accepted]
    assert first.timing.compute_ns > 0
    assert first.fingerprint == "f00d"


async def test_a_cache_of_other_tokens_is_a_miss_never_a_wrong_token(
    target: rpc.TargetAsyncStub, tiny: Path, answer: list[int]
) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT)))
    other = [*PROMPT[:2], 40, 41, 42, 43]
    (missed,) = await verify(target, pb.VerifyItem(slice=slice_of(other, start=4)))
    assert missed.cache_miss.have == 0
    assert missed.cache_miss.prefix_hash == prefix_hash([])
    (short,) = await verify(target, pb.VerifyItem(slice=slice_of([*PROMPT, 1, 2, 3], start=7)))
    have = short.cache_miss.have
    assert have in {len(PROMPT), len(PROMPT) + 1}, "an engine may keep the token that it drew"
    assert short.cache_miss.prefix_hash == prefix_hash([*PROMPT, answer[0]][:have])
    (full,) = await verify(target, pb.VerifyItem(slice=slice_of(other)))
    assert list(full.result.tokens) == greedy(tiny, other, 1)


async def test_tenants_do_not_share_a_cache(target: rpc.TargetAsyncStub) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, tenant_salt=b"a")))
    (other,) = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, start=4, tenant_salt=b"b")))
    assert other.cache_miss.have == 0


async def test_a_prefix_is_shared_within_a_principal_and_with_no_other(
    target: rpc.TargetAsyncStub,
) -> None:
    shared_blocks = 2
    prompt = [3 + i % 40 for i in range(shared_blocks * BLOCK_TOKENS + 6)]
    rows = []
    for number, name in enumerate(("alice", "alice", "bob", "anonymous", "alice")):
        part = slice_of(prompt, session_id=str(number), tenant_salt=name.encode())
        (answer,) = await verify(target, pb.VerifyItem(slice=part))
        rows.append(answer.result.batch_rows)
    assert rows == [len(prompt), 6, len(prompt), len(prompt), 6]


async def test_sessions_share_a_step_and_each_gets_its_own_tokens(
    target: rpc.TargetAsyncStub, engine: Recording, tiny: Path
) -> None:
    prompts = [[3 + i, 2, 8 + 2 * i] + [7] * i for i in range(8)]
    items = [
        pb.VerifyItem(slice=slice_of(prompt, session_id=f"s{i}", prompt_len=1), draft_tokens=[4] * (i % 3))
        for i, prompt in enumerate(prompts)
    ]
    answers = await verify(target, *items)
    assert [answer.session_id for answer in answers] == [f"s{i}" for i in range(8)]
    assert [answer.result.tokens[0] for answer in answers] == [greedy(tiny, p, 1)[0] for p in prompts]
    assert max(engine.sessions) == 8
    assert answers[0].result.batch_sessions == 8


async def test_newer_request_supersedes_the_waiting_one(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    longer = [*PROMPT, answer[0]]
    first, second = await verify(
        target, pb.VerifyItem(slice=slice_of(PROMPT)), pb.VerifyItem(slice=slice_of(longer))
    )
    assert first.superseded.position == len(PROMPT)
    assert first.superseded.prefix_hash == prefix_hash(PROMPT)
    assert list(second.result.tokens) == answer[1:2]
    assert engine.sessions == [1]


async def test_an_item_that_comes_during_the_pass_of_its_session_runs_after_it(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    engine.gate.clear()
    under_way = asyncio.ensure_future(verify(target, pb.VerifyItem(slice=slice_of(PROMPT))))
    assert await asyncio.to_thread(engine.started.acquire, timeout=10)
    longer = [*PROMPT, answer[0]]
    next_one = asyncio.ensure_future(verify(target, pb.VerifyItem(slice=slice_of(longer, start=5))))
    await target.GetTargetInfo(pb.GetTargetInfoRequest())
    engine.gate.set()
    assert list((await under_way)[0].result.tokens) == answer[:1]
    assert list((await next_one)[0].result.tokens) == answer[1:2]
    assert [len(plan.chunks[0].tokens) for plan in engine.passes] == [5, 1]


async def test_nan_costs_its_own_session_alone(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    sick = pb.VerifyItem(slice=slice_of([*PROMPT[:3], POISON, 3], session_id="sick"))
    well = pb.VerifyItem(slice=slice_of(PROMPT, session_id="well"))
    first, second = await verify(target, sick, well)
    assert first.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert list(second.result.tokens) == answer[:1]
    (after,) = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, start=1, session_id="sick")))
    assert after.cache_miss.have == 0


BAD: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("slice.tokens", "empty", {"tokens": [], "start": 0}, {}),
    ("slice.tokens[1]", f"[0, {VOCAB})", {"tokens": [1, VOCAB, 1, 1]}, {}),
    ("slice.tokens", str(CONTEXT), {"tokens": [1] * (CONTEXT + 1)}, {}),
    ("slice.max_position", str(CONTEXT), {"max_position": CONTEXT + 1}, {}),
    ("slice.max_position", "> the 5", {"max_position": 5}, {}),
    ("slice.prompt_len", "[1, 5]", {"prompt_len": 0}, {}),
    ("slice.session_id", "1 to", {"session_id": ""}, {}),
    ("slice.prefix_hash", "16 bytes", {"prefix_hash": b""}, {}),
    ("slice.tenant_salt", "at most 16", {"tenant_salt": b"x" * 17}, {}),
    ("slice.stop_token_ids[0]", f"[0, {VOCAB})", {"stop_token_ids": [VOCAB]}, {}),
    ("sampling.temperature", ">= 0", {"sampling": pb.SamplingParams(temperature=float("nan"))}, {}),
    ("sampling.top_p", "(0, 1]", {"sampling": pb.SamplingParams(top_p=0)}, {}),
    ("draft_tokens", "at most 8", {}, {"draft_tokens": [1] * 9}),
    ("draft_tokens[2]", f"[0, {VOCAB})", {}, {"draft_tokens": [1, 2, VOCAB]}),
    ("logprobs", "<= 128", {}, {"logprobs": 129}),
    ("lora", "must be empty: no LoRA adapter is offered, got 'sql'", {}, {"lora": "sql"}),
    ("survival", "0 or 2 entries", {}, {"draft_tokens": [1, 2], "survival": [0.5]}),
    ("survival[1]", "[0, 1]", {}, {"draft_tokens": [1, 2], "survival": [0.5, float("nan")]}),
]


@pytest.mark.parametrize(("field", "bound", "in_slice", "in_item"), BAD, ids=[f"{b[0]} {b[1]}" for b in BAD])
async def test_a_bad_item_is_named_and_harms_no_other(
    target: rpc.TargetAsyncStub,
    answer: list[int],
    engine: Recording,
    field: str,
    bound: str,
    in_slice: dict[str, Any],
    in_item: dict[str, Any],
) -> None:
    bad = pb.VerifyItem(slice=slice_of(PROMPT, **({"session_id": "bad"} | in_slice)), **in_item)
    good = pb.VerifyItem(slice=slice_of(PROMPT, session_id="good"))
    refused, served = await verify(target, bad, good)
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message.startswith(f"{field}: ")
    assert bound in refused.status.message
    assert list(served.result.tokens) == answer[:1]
    assert engine.sessions == [1]


async def test_states_come_from_a_target_that_has_some_and_are_refused_by_others(
    target: rpc.TargetAsyncStub,
) -> None:
    info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    wanting = pb.VerifyItem(slice=slice_of(PROMPT), want_features=True, feature_layers=[1])
    (answer,) = await verify(target, wanting)
    if info.feature_size:
        assert len(answer.result.features) == len(PROMPT) * 2 * info.feature_size
    else:
        assert answer.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert answer.status.message.startswith("want_features: ")


@pages
@pytest.mark.parametrize("limits", [Limits(max_sessions=10, max_rows=2048)])
async def test_idle_sessions_make_room_and_busy_ones_do_not(target: rpc.TargetAsyncStub) -> None:
    def item(name: int, length: int, start: int = 0) -> pb.VerifyItem:
        tokens = [2 + name] * length
        return pb.VerifyItem(slice=slice_of(tokens, session_id=f"s{name}", start=start, arrival_ns=1 + name))

    # 32 blocks of 32 tokens, 10 sessions: 7 x 150 do not fit at once.
    answers = await verify(target, *(item(i, 150) for i in range(7)))
    codes = [answer.status.code for answer in answers]
    assert codes == [0] * 6 + [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
    (later,) = await verify(target, item(8, 150))
    assert later.WhichOneof("outcome") == "result"
    (evicted,) = await verify(target, item(0, 151, start=149))
    assert evicted.cache_miss.have < 149
    (kept,) = await verify(target, item(5, 151, start=149))
    assert kept.WhichOneof("outcome") == "result"


async def test_the_info_names_what_is_served(target: rpc.TargetAsyncStub) -> None:
    info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert (info.vocab_size, info.context_window, info.max_draft_tokens) == (VOCAB, CONTEXT, 8)
    assert list(info.eos_token_ids) == [1]
    assert info.dtype == "float32"
    assert info.deterministic
    assert len(info.tokenizer_hash) == 32
    assert len(info.incarnation) == 16
    assert (info.ranks, info.kv_block_tokens, info.kv_blocks_total) == (1, 32, KV_BLOCKS)
    assert info.kv_blocks_free == KV_BLOCKS
    assert info.queue_depth == 0
    assert [point.rows for point in info.row_costs] == [1, 1024]


async def test_a_late_item_is_dropped(target: rpc.TargetAsyncStub) -> None:
    (late,) = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, remaining_ns=1)))
    assert late.status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_concurrent_calls_all_come_back(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    async def one(name: str, k: int) -> None:
        tokens, _ = await generate(target, PROMPT, COUNT, oracle(answer, k, 2), session_id=name)
        assert tokens == answer

    await asyncio.gather(*(one(f"s{i}", i % 5) for i in range(8)))


async def test_a_cancelled_call_is_dropped_before_the_next_step(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    engine.gate.clear()
    under_way = asyncio.ensure_future(verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="a"))))
    await asyncio.to_thread(engine.started.acquire)
    given_up = asyncio.ensure_future(verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="b"))))
    late = target.Verify(
        pb.VerifyRequest(items=[pb.VerifyItem(slice=slice_of(PROMPT, session_id="c"))]), timeout=0.05
    )
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        await late
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    # A call of the same connection after the cancel: once it is answered, the cancel has been seen.
    await target.GetTargetInfo(pb.GetTargetInfoRequest())
    engine.gate.set()
    ((served,), *_) = await asyncio.gather(under_way)
    assert list(served.result.tokens) == answer[:1]
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="d")))
    assert engine.sessions == [1, 1]
