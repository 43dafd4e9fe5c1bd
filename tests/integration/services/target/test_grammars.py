"""Sessions with a grammar through the real service: every token is the model's own among the allowed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaForCausalLM

from galley.common.wire.codec import grammar_message
from galley.core.content import prefix_hash
from galley.core.grammar.spec import KINDS, GrammarSpec
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from tests.fakes.tiny_model import CONTEXT, POISON, STOP, VOCAB
from tests.fakes.verify_items import GREEDY, slice_of, stream_of, tokens_of, verify
from tests.integration.services.target.conftest import Recording, Served

PROMPT = [5, 9, 2, 33, 17]
# The tokens of the tiny model are the bytes of ASCII; the first two letters, then at least six others.
SPEC = GrammarSpec("regex", "[a-f]{2}[g-p]{6,9}")
FIRST, REST = range(ord("a"), ord("g")), range(ord("g"), ord("q"))
HOT = pb.SamplingParams(
    temperature=1.4, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.4, logit_bias={3: 50.0}, seed=7
)

Draft = Callable[[list[int]], Sequence[int]]


def may_follow(output: Sequence[int]) -> list[int]:
    """Return what SPEC allows after this output."""
    if len(output) < 2:
        return list(FIRST)
    letters = list(REST) if len(output) < 11 else []
    return letters + ([STOP] if len(output) >= 8 else [])


def no_draft(_: list[int]) -> Sequence[int]:
    return ()


def constrained(tokens: Sequence[int], spec: GrammarSpec = SPEC, **given: Any) -> pb.SessionSlice:
    fields: dict[str, Any] = {
        "prompt_len": len(PROMPT),
        "stop_token_ids": [STOP],
        "grammar_hash": spec.content_hash,
    }
    if not given.get("start"):
        fields["structured_output"] = grammar_message(spec)
    return slice_of(tokens, **(fields | given))


async def answer_of(
    target: rpc.TargetAsyncStub, draft: Draft = no_draft, tokens: Sequence[int] = PROMPT, **given: Any
) -> tuple[list[int], int]:
    """Return the output of a session, and how many draft tokens were verified."""
    tokens, held, verified = list(tokens), 0, 0
    while STOP not in tokens[len(PROMPT) :]:
        guesses = list(draft(tokens[len(PROMPT) :]))
        item = pb.VerifyItem(slice=constrained(tokens, start=held, **given), draft_tokens=guesses)
        (response,) = await verify(target, item)
        assert response.WhichOneof("outcome") == "result", response
        tokens += response.result.tokens
        held = response.result.kv_len
        verified += response.result.verified
    return tokens[len(PROMPT) :], verified


@pytest.fixture(scope="session")
def greedy_answer(tiny: Path) -> list[int]:
    """The answer of transformers' own model, token by token."""
    model: Any = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    output: list[int] = []
    with torch.inference_mode():
        while STOP not in output:
            logits = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1]
            output.append(max(may_follow(output), key=lambda token: float(logits[token])))
    return output


async def test_greedy_takes_the_likeliest_allowed_token(
    target: rpc.TargetAsyncStub, greedy_answer: list[int]
) -> None:
    assert (await answer_of(target))[0] == greedy_answer


@pytest.mark.parametrize("right", [0, 1, 3, 8])
async def test_drafts_change_no_token(
    target: rpc.TargetAsyncStub, greedy_answer: list[int], right: int
) -> None:
    def draft(output: list[int]) -> list[int]:
        true = greedy_answer[len(output) : len(output) + 8]
        return [*true[:right], *((token + 1) % (VOCAB - 1) for token in true[right:])]

    output, verified = await answer_of(target, draft)
    assert output == greedy_answer
    assert right == 0 or verified > 0


@pytest.mark.parametrize("wrong", [40, STOP, POISON, ord("g")])
async def test_tokens_that_the_grammar_does_not_allow_are_never_verified(
    target: rpc.TargetAsyncStub, greedy_answer: list[int], wrong: int
) -> None:
    await verify(target, pb.VerifyItem(slice=constrained(PROMPT)))  # an engine may verify no draft beside it
    tokens = [*PROMPT, greedy_answer[0]]
    (response,) = await verify(
        target, pb.VerifyItem(slice=constrained(tokens), draft_tokens=[wrong, *greedy_answer[2:5]])
    )
    assert response.result.verified == 0
    assert list(response.result.tokens) == greedy_answer[1:2]


async def test_seeded_sampling_does_not_depend_on_the_draft(target: rpc.TargetAsyncStub) -> None:
    plain, _ = await answer_of(target, sampling=HOT, session_id="plain")
    assert all(token in may_follow(plain[:i]) for i, token in enumerate(plain))
    assert 3 not in plain, "a bias makes no other token possible"

    def draft(output: list[int]) -> list[int]:
        true = plain[len(output) : len(output) + 6]
        return [token if i % 3 < 2 else token ^ 1 for i, token in enumerate(true)]

    output, verified = await answer_of(target, draft, sampling=HOT, session_id="drafted")
    assert output == plain
    assert verified > 0


async def test_all_allowed_tokens_are_sampled(target: rpc.TargetAsyncStub) -> None:
    sampling = pb.SamplingParams(temperature=40.0)
    seen: set[int] = set()
    for seed in range(8):
        sampling.seed = seed
        seen |= set((await answer_of(target, sampling=sampling, session_id=str(seed)))[0])
    assert {STOP} < seen <= {STOP, *FIRST, *REST}
    assert len(seen & set(REST)) > 5


async def test_company_changes_no_token(target: rpc.TargetAsyncStub) -> None:
    """Eight sessions at once, of three grammars and of none."""
    specs = [SPEC, GrammarSpec("choice", '["abc", "hijk", "hix"]'), GrammarSpec("regex", "[a-z ]{5,12}")]

    async def one(index: int, session_id: str) -> list[int]:
        sampling = pb.SamplingParams(temperature=0.9, seed=index)
        if index % 4 == 3:
            item = pb.VerifyItem(slice=slice_of(PROMPT, session_id=session_id, sampling=sampling), credit=12)
        else:
            part = constrained(PROMPT, specs[index % 4], session_id=session_id, sampling=sampling)
            item = pb.VerifyItem(slice=part, credit=12, draft_tokens=[ord("a"), ord("b")])
        async with stream_of(target) as stream:
            await stream.send(item)
            return tokens_of(await stream.until_last())

    alone = [await one(index, f"alone {index}") for index in range(8)]
    assert await asyncio.gather(*(one(index, f"beside {index}") for index in range(8))) == alone
    assert [bytes(alone[1])[:-1] in {b"abc", b"hijk", b"hix"}, alone[1][-1] == STOP] == [True, True]


async def test_with_credit_the_target_goes_on_alone(
    target: rpc.TargetAsyncStub, greedy_answer: list[int]
) -> None:
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=constrained(PROMPT), credit=30))
        assert tokens_of(await stream.until_last()) == greedy_answer


async def test_an_unknown_grammar_is_a_cache_miss(
    target: rpc.TargetAsyncStub, greedy_answer: list[int]
) -> None:
    await verify(target, pb.VerifyItem(slice=constrained(PROMPT)))
    tokens = [*PROMPT, greedy_answer[0]]
    unknown = GrammarSpec("regex", "[a-f]{2}[g-p]{6,9}|unknown here")
    (missed,) = await verify(target, pb.VerifyItem(slice=constrained(tokens, unknown, start=5)))
    assert (missed.cache_miss.have, missed.cache_miss.prefix_hash) == (0, prefix_hash(()))
    (whole,) = await verify(target, pb.VerifyItem(slice=constrained(tokens, unknown)))
    assert list(whole.result.tokens) == greedy_answer[1:2]
    tokens += whole.result.tokens
    (known,) = await verify(target, pb.VerifyItem(slice=constrained(tokens, unknown, start=6)))
    assert list(known.result.tokens) == greedy_answer[2:3]


async def test_another_replica_goes_on_from_the_log(
    target: rpc.TargetAsyncStub, greedy_answer: list[int]
) -> None:
    """To this replica the session is new; the grammar's state comes from the tokens alone."""
    for done in (1, 2, 9):
        tokens = [*PROMPT, *greedy_answer[:done]]
        output, _ = await answer_of(target, tokens=tokens, session_id=f"after {done}")
        assert output == greedy_answer


async def test_logprobs_are_those_of_all_tokens(target: rpc.TargetAsyncStub) -> None:
    (free,) = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="free"), logprobs=9))
    (own,) = await verify(target, pb.VerifyItem(slice=constrained(PROMPT), logprobs=9))
    (theirs,), (ours,) = free.result.logprobs, own.result.logprobs
    assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
    assert own.result.tokens[0] in FIRST
    assert free.result.tokens[0] not in FIRST
    assert ours.logprob < theirs.logprob == theirs.top[0].logprob


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec("regex", "(ab"), "structured_output.regex: "),
        (GrammarSpec("json_schema", "[]"), "structured_output.json_schema: "),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_by_name(
    target: rpc.TargetAsyncStub, spec: GrammarSpec, message: str
) -> None:
    bad = pb.VerifyItem(slice=constrained(PROMPT, spec, session_id="bad"))
    good = pb.VerifyItem(slice=slice_of(PROMPT, session_id="good"))
    refused, served = await verify(target, bad, good)
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert message in refused.status.message
    assert served.WhichOneof("outcome") == "result"


async def test_a_log_that_the_grammar_does_not_allow_fails_alone(target: rpc.TargetAsyncStub) -> None:
    bad = pb.VerifyItem(slice=constrained([*PROMPT, 40], session_id="bad"))
    good = pb.VerifyItem(slice=constrained(PROMPT, session_id="good"))
    failed, served = await verify(target, bad, good)
    assert failed.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert served.WhichOneof("outcome") == "result"


async def test_where_the_grammar_allows_no_further_token_the_session_fails(
    target: rpc.TargetAsyncStub,
) -> None:
    """It would otherwise end there, with a text that the grammar does not allow."""
    spec = GrammarSpec("grammar", 'start: "a" "b" dead | "!"\ndead: dead')
    output = [ord("a"), ord("b")]
    sampling = pb.SamplingParams(temperature=0, logit_bias={ord("a"): 60.0})
    part = constrained(PROMPT, spec, session_id="dead", sampling=sampling)
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=part, credit=9, draft_tokens=[*output, STOP]))
        answers = await stream.until_last()
    assert answers[-1].status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "structured_output: must allow a next token" in answers[-1].status.message
    assert tokens_of(answers) == output


async def test_a_grammar_that_begins_after_a_token_allows_all_but_an_end_before_it(
    target: rpc.TargetAsyncStub, tiny: Path
) -> None:
    (first,) = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="free")))
    begin = first.result.tokens[0]
    spec = GrammarSpec("regex", "[a-f]{3}", after_token=begin)
    output = [begin]
    part = constrained(PROMPT, spec, session_id="after", max_position=CONTEXT)
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=part, credit=12, draft_tokens=[begin, ord("a"), 40]))
        output = tokens_of(await stream.until_last())
    assert output[0] == begin
    assert [token in FIRST for token in output[1:4]] == [True, True, True]
    assert output[4:] == [STOP]


async def test_a_target_tells_which_grammars_it_decodes_by(
    target: rpc.TargetAsyncStub, service: Served
) -> None:
    info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert tuple(info.grammar_kinds) == KINDS
    assert service.running.service.lease("here").grammar_kinds == KINDS  # type: ignore[attr-defined]  # a TargetService


async def test_without_a_vocabulary_grammars_are_refused(engine: Recording, limits: Limits) -> None:
    served = Served(engine, limits, None, grammars=lambda: None)
    await served.start()
    async with grpc.aio.insecure_channel(served.running.address) as channel:
        target = rpc.TargetStub(channel)
        info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
        (refused,) = await verify(target, pb.VerifyItem(slice=constrained(PROMPT)))
    await served.stop()
    assert not info.grammar_kinds
    assert refused.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert "slice.structured_output" in refused.status.message
    assert GREEDY.temperature == 0
