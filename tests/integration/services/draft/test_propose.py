"""Proposals through the real service, for every strategy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.draft_loading import draft_version
from galley.common.models.files import tokenizer_hash
from galley.core.content import prefix_hash
from galley.core.trees import ROOT, main_path, ranks, valid_count
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.tiny_model import CONTEXT, POISON, VOCAB, greedy, save_tiny_model
from tests.fakes.verify_items import slice_of
from tests.integration.services.draft.conftest import drafting

REPEATING = [5, 6, 7, 8, 9, 5, 6]


async def propose(draft: rpc.DraftAsyncStub, *items: pb.ProposeItem) -> list[pb.ProposeAnswer]:
    return list((await draft.Propose(pb.ProposeRequest(items=items))).answers)


def item(
    tokens: list[int], k: int = 4, strategy: str = "", *, width: int = 0, **given: Any
) -> pb.ProposeItem:
    return pb.ProposeItem(slice=slice_of(tokens, **given), k=k, strategy=strategy, width=width)


async def proposals(draft: rpc.DraftAsyncStub, *items: pb.ProposeItem) -> list[list[int]]:
    answers = await propose(draft, *items)
    assert all(answer.HasField("result") for answer in answers), answers
    return [list(answer.result.draft_tokens) for answer in answers]


async def test_ngram_and_none_need_no_model() -> None:
    async with drafting() as draft:
        (answer,) = await propose(draft, item(REPEATING, 3))
        assert list(answer.result.draft_tokens) == [7, 8, 9]
        assert answer.result.position == answer.result.kv_len == len(REPEATING)
        assert answer.result.prefix_hash == prefix_hash(REPEATING)
        assert await proposals(draft, item(REPEATING, 3, "none"), item(REPEATING, 0, session_id="t")) == [
            [],
            [],
        ]


async def test_proposals_do_not_use_other_tenants_answers() -> None:
    async with drafting() as draft:
        answer = item([1, 50, 51, 52, 53], session_id="a", tenant_salt=b"one", prompt_len=1)
        await propose(draft, answer)
        for salt, result in ((b"one", [52, 53]), (b"two", []), (b"", [])):
            request = item([2, 50, 51], session_id="b", tenant_salt=salt, prompt_len=1)
            assert await proposals(draft, request) == [result]


async def test_nothing_is_proposed_where_the_target_can_take_nothing() -> None:
    async with drafting() as draft:
        assert await proposals(draft, item(REPEATING, 4, max_position=len(REPEATING) + 3)) == [[7, 8]]


async def test_the_cache_is_addressed_by_content() -> None:
    async with drafting() as draft:
        await propose(draft, item([1, 2, 3, 4]))
        (more,) = await propose(draft, item([1, 2, 3, 4, 1, 2], start=4))
        assert list(more.result.draft_tokens) == [3, 4, 1, 2]
        (other,) = await propose(draft, item([1, 2, 9, 9, 9], start=4))
        assert (other.cache_miss.have, other.cache_miss.prefix_hash) == (0, prefix_hash([]))
        (ahead,) = await propose(draft, item([1, 2, 3, 4, 1, 2, 5, 5], start=7))
        assert (ahead.cache_miss.have, ahead.cache_miss.prefix_hash) == (6, prefix_hash([1, 2, 3, 4, 1, 2]))
        (back,) = await propose(draft, item([1, 2, 1], start=2, strategy="none"))
        assert back.result.kv_len == 3


BAD: list[tuple[str, str, pb.ProposeItem]] = [
    ("k", "<= 8", item([1], 9)),
    ("width", "<= 8", item([1], 1, width=9)),
    ("strategy", "ngram, none", item([1], 1, "magic")),
    ("slice.tokens", "empty", item([])),
    ("sampling.top_p", "(0, 1]", item([1], sampling=pb.SamplingParams(top_p=2))),
]


@pytest.mark.parametrize(("field", "bound", "bad"), BAD, ids=[b[0] for b in BAD])
async def test_a_bad_item_is_named_and_harms_no_other(field: str, bound: str, bad: pb.ProposeItem) -> None:
    async with drafting() as draft:
        refused, served = await propose(draft, bad, item(REPEATING, 1, session_id="good"))
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message.startswith(f"{field}: ")
    assert bound in refused.status.message
    assert list(served.result.draft_tokens) == [7]


async def test_features_are_refused_by_name() -> None:
    async with drafting() as draft:
        (refused,) = await propose(draft, pb.ProposeItem(slice=slice_of([1]), k=1, features=b"x"))
    assert refused.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


async def test_a_stream_answers_the_same() -> None:
    async def requests() -> AsyncIterator[pb.ProposeStreamRequest]:
        for i in range(3):
            yield pb.ProposeStreamRequest(items=[item(REPEATING, i, session_id=str(i))])

    async with drafting() as draft:
        stream = draft.ProposeStream(requests())
        answers = [answer async for response in stream for answer in response.answers]
    assert {one.session_id: list(one.result.draft_tokens) for one in answers} == {
        "0": [],
        "1": [7],
        "2": [7, 8],
    }


async def test_model_proposes_its_own_tokens(tiny: Path) -> None:
    prompt = [5, 9, 2, 33, 17]
    answer = greedy(tiny, prompt, 12)
    async with drafting(model=str(tiny), dtype="float32", default_strategy="model") as draft:
        assert await proposals(draft, item(prompt, 6)) == [answer[:6]]
        other = [*prompt, *answer[:2], (answer[2] + 1) % (VOCAB - 1)]
        assert await proposals(draft, item(other, 3, start=5)) == [greedy(tiny, other, 3)]
        whole = prompt + answer[:4]
        assert await proposals(draft, item(whole, 8, start=7)) == [answer[4:12]]
        assert await proposals(draft, item(whole, 8, stop_token_ids=[answer[5]])) == [answer[4:6]]
        info = await draft.GetDraftInfo(pb.GetDraftInfoRequest())
    assert list(info.strategies) == ["hybrid", "model", "ngram", "none"]
    assert (info.default_strategy, info.vocab_size, info.max_draft_tokens) == ("model", VOCAB, 8)
    assert info.tokenizer_hash == tokenizer_hash(tiny)


async def test_a_draft_has_the_version_of_its_weights_or_of_its_setting(tiny: Path) -> None:
    versions = []
    for given in ({"model": str(tiny)}, {"model": str(tiny), "version": "v2"}, {}):
        async with drafting(dtype="float32", **given) as draft:
            versions.append((await draft.GetDraftInfo(pb.GetDraftInfoRequest())).version)
    assert versions == [draft_version(tiny), "v2", ""]


async def test_the_model_guesses_for_many_sessions_in_one_step(tiny: Path) -> None:
    prompts = [[3 + i, 2, 8 + 2 * i] + [7] * i for i in range(6)]
    items = [
        item(prompt, 1 + i % 3, "ngram" if i == 3 else "model", session_id=str(i), prompt_len=1)
        for i, prompt in enumerate(prompts)
    ]
    expected = [greedy(tiny, prompt, 1 + i % 3) for i, prompt in enumerate(prompts)]
    expected[3] = [7]
    async with drafting(model=str(tiny), dtype="float32") as draft:
        assert await proposals(draft, *items) == expected


async def test_the_model_shares_the_targets_noise(tiny: Path) -> None:
    sampling = pb.SamplingParams(temperature=1.3, seed=11)
    async with drafting(model=str(tiny), dtype="float32", default_strategy="model") as draft:
        (first,) = await proposals(draft, item([5, 9, 2, 33], 8, sampling=sampling))
        (again,) = await proposals(draft, item([5, 9, 2, 33], 8, sampling=sampling, session_id="other"))
        (later,) = await proposals(draft, item([5, 9, 2, 33, *first[:3]], 5, sampling=sampling))
        other_seed = pb.SamplingParams(temperature=1.3, seed=12)
        (other,) = await proposals(draft, item([5, 9, 2, 33], 8, sampling=other_seed))
    assert first == again
    assert later == first[3:]
    assert other != first


async def test_a_sick_or_overlong_session_harms_no_other(poisoned: Path) -> None:
    async with drafting(model=str(poisoned), dtype="float32", default_strategy="model") as draft:
        sick, outside, long, well = await propose(
            draft,
            item([1, POISON, 2], session_id="sick"),
            item([1, VOCAB, 2], session_id="outside"),
            item([2] * (CONTEXT + 1), session_id="long", max_position=2 * CONTEXT),
            item([5, 9, 2, 33], 2, session_id="well"),
        )
    assert sick.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert outside.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert list(long.result.draft_tokens) == []
    assert list(well.result.draft_tokens) == greedy(poisoned, [5, 9, 2, 33], 2)


async def test_sessions_are_bounded() -> None:
    async with drafting(max_sessions=2) as draft:
        answers = await propose(draft, *(item([1, 2], session_id=str(i)) for i in range(3)))
        assert [one.status.code for one in answers] == [0, 0, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
        (later,) = await propose(draft, item([1, 2], session_id="later"))
        assert later.HasField("result")


class TestOracle:
    answer = [*range(10, 58)]  # noqa: RUF012  # never changed

    def write(self, path: Path, *answers: list[int]) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps({"tokens": tokens}) + "\n" for tokens in answers)

    async def test_it_knows_the_answers_and_reads_on(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.jsonl"
        self.write(path, [1, 2, 3], self.answer)
        async with drafting(oracle_answers=path, default_strategy="oracle") as draft:
            assert await proposals(draft, item(self.answer[:5], 3)) == [self.answer[5:8]]
            assert await proposals(draft, item([9, 9], 3, session_id="new")) == [[]]
            self.write(path, [9, 9, 1, 2])
            assert await proposals(draft, item([9, 9], 3, session_id="new")) == [[1, 2]]
            assert await proposals(draft, item([9, 8], 3, session_id="new")) == [[]]

    async def test_spoiling_is_a_function_of_seed_and_position(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.jsonl"
        self.write(path, self.answer)
        spoiled: list[bool] = []
        async with drafting(oracle_answers=path, oracle_spoil=0.4) as draft:
            (answer,) = await propose(draft, item(self.answer[:5], 3, "oracle"))
            assert list(answer.result.survival) == pytest.approx([0.6, 0.36, 0.216])
            for seed in range(40):
                sampling = pb.SamplingParams(seed=seed)
                (whole,) = await proposals(draft, item(self.answer[:5], 8, "oracle", sampling=sampling))
                (part,) = await proposals(draft, item(self.answer[:8], 5, "oracle", sampling=sampling))
                assert part == whole[3:]
                spoiled += [a != b for a, b in zip(whole, self.answer[5:13], strict=True)]
        assert 0.3 < sum(spoiled) / len(spoiled) < 0.5

    async def test_a_tree_has_the_right_token_by_rank_as_often_as_it_says(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.jsonl"
        self.write(path, self.answer)
        by_rank = [0, 0, 0]
        async with drafting(oracle_answers=path, oracle_spoil=0.4) as draft:
            for seed in range(60):
                sampling = pb.SamplingParams(seed=seed)
                request = item(self.answer[:5], 8, "oracle", width=3, sampling=sampling)
                (answer,) = await propose(draft, request)
                tree = answer.result
                tokens, parents = list(tree.draft_tokens), list(tree.parents)
                assert valid_count(tokens, parents) == len(tokens) == len(tree.survival) == 8
                assert list(tree.survival) == sorted(tree.survival, reverse=True)
                assert max(ranks(parents, 8)) == 2
                (chain,) = await proposals(draft, item(self.answer[:5], 8, "oracle", sampling=sampling))
                main = main_path(parents, 8)
                assert [tokens[node] for node in main] == chain[: len(main)]
                first = [token for token, parent in zip(tokens, parents, strict=True) if parent == ROOT]
                if self.answer[5] in first:
                    by_rank[first.index(self.answer[5])] += 1
        assert by_rank == pytest.approx([60 * 0.6, 60 * 0.24, 60 * 0.096], abs=10)

    async def test_a_missing_file_fails_its_own_items_alone(self, tmp_path: Path) -> None:
        async with drafting(oracle_answers=tmp_path / "none") as draft:
            failed, served = await propose(
                draft, item([1], 1, "oracle", session_id="a"), item(REPEATING, 1, session_id="b")
            )
        assert failed.status.code == grpc.StatusCode.INTERNAL.value[0]
        assert list(served.result.draft_tokens) == [7]


async def test_without_a_model_the_tokenizer_is_that_of_the_directory(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    async with drafting(tokenizer=str(directory)) as draft:
        info = await draft.GetDraftInfo(pb.GetDraftInfoRequest())
    assert info.tokenizer_hash == tokenizer_hash(directory)
    assert (info.model, info.vocab_size) == ("", 0)
