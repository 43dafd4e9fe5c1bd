"""What the store keeps comes back as it was."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.answer.answer import (
    MAX_CHUNK_TOKENS,
    Answer,
    Chunk,
    Ending,
    Reason,
    SessionSpec,
    decode_ending,
    decode_spec,
    encode_ending,
    encode_spec,
)
from galley.core.content import (
    Hit,
    Miss,
    RunningHash,
    cache_salt,
    look_up,
    prefix_hash,
    token_bytes,
    tokens_from_bytes,
)
from galley.core.grammar.spec import GrammarSpec
from galley.core.records import PositionLogprobs, TokenRecord, decode_records, encode_records
from galley.core.sampling_params import SamplingParams

float32 = st.floats(width=32, allow_nan=False)
token_ids = st.integers(0, 2**32 - 1)
logprobs = st.builds(
    PositionLogprobs, float32, st.lists(st.tuples(token_ids, float32), max_size=4).map(tuple)
)
records = st.builds(
    TokenRecord, st.booleans(), st.none() | logprobs, st.none() | st.text("abc0", max_size=40)
)
tokens = st.lists(st.integers(0, 9), max_size=12)


@given(st.lists(records, max_size=4), st.lists(records, max_size=4))
def test_records_append(first: list[TokenRecord], then: list[TokenRecord]) -> None:
    assert list(decode_records(encode_records(first) + encode_records(then))) == first + then


def test_a_plain_token_costs_one_byte() -> None:
    assert len(encode_records([TokenRecord(), TokenRecord(from_draft=True)])) == 2


def test_cut_records_are_refused() -> None:
    whole = encode_records([TokenRecord(logprobs=PositionLogprobs(-1.0, ((3, -1.0),)))])
    with pytest.raises(ValueError, match="truncated"):
        list(decode_records(whole[:-1]))


@given(st.lists(token_ids))
def test_tokens(given_tokens: list[int]) -> None:
    data = token_bytes(given_tokens)
    assert data == b"".join(struct.pack("<I", token) for token in given_tokens)
    assert tokens_from_bytes(data) == given_tokens


@pytest.mark.parametrize(
    "ending",
    [Ending(Reason.STOP, "\n\n"), Ending(Reason.STOP, 2), Ending(Reason.LENGTH), Ending(Reason.ABORTED)],
)
def test_endings(ending: Ending) -> None:
    assert decode_ending(encode_ending(ending)) == ending


def test_specs() -> None:
    spec = SessionSpec(
        session_id="s",
        prompt=(5, 6),
        sampling=SamplingParams(temperature=0.1 + 0.2, seed=2**64 - 1, logit_bias={3: -100.0}),
        max_position=99,
        vocab_size=1000,
        stop_token_ids=frozenset({2, 1}),
        stop_strings=("é\n", '"'),
        logprobs=0,
        k=4,
        strategy="ngram",
        tenant_salt=b"\x00\xff",
        lora="sql",
        grammar=GrammarSpec("choice", '["\u00e9"]', after_token=7, opening_token=0),
        prediction=(0, 2**32 - 1, 5),
    )
    assert decode_spec(encode_spec(spec), spec.session_id, (5, 6)) == spec


def test_a_default_spec_is_small() -> None:
    spec = SessionSpec("s" * 32, (1,), SamplingParams(), max_position=9, vocab_size=1000)
    data = encode_spec(spec)
    assert decode_spec(data, spec.session_id, spec.prompt) == spec
    assert len(data) < 64


def test_what_a_stored_spec_leaves_out_keeps_its_meaning() -> None:
    """Sessions of other versions are resumed too, so a default is a part of the format."""
    stored = b'{"max_position":9,"sampling":{},"vocab_size":7}'
    assert decode_spec(stored, "s", (1,)) == SessionSpec(
        "s",
        (1,),
        SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias={},
            seed=0,
        ),
        max_position=9,
        vocab_size=7,
        stop_token_ids=frozenset(),
        stop_strings=(),
        min_tokens=0,
        logprobs=None,
        k=0,
        auto=False,
        strategy="",
        workload="",
        arrival_ns=0,
        priority=0,
        tenant_salt=b"",
        continue_without_client=False,
        lora="",
        grammar=None,
        prediction=(),
    )


@given(tokens, tokens, st.integers(0, 12))
def test_a_cache_serves_the_agreeing_prefix(held: list[int], tokens: list[int], start: int) -> None:
    start = min(start, len(tokens))
    result = look_up(held, start, tokens[start:], prefix_hash(tokens[:start]))
    if isinstance(result, Hit):
        assert held[: result.agree] == tokens[: result.agree]
        beyond = result.agree
        assert beyond in {len(held), len(tokens)} or held[beyond] != tokens[beyond]
    else:
        assert isinstance(result, Miss)
        assert held[:start] != tokens[:start]
        assert prefix_hash(held[: result.have]) == result.prefix_hash


def test_salts_of_caches_differ_by_tenant_and_by_adapter() -> None:
    tenants, adapters = (b"", b"a", b"b", b"a" * 16), ("", "a", "b", "é")
    salts = {cache_salt(tenant, lora) for tenant in tenants for lora in adapters}
    assert len(salts) == len(tenants) * len(adapters)
    assert max(map(len, salts)) <= 16, "a salt of the wire"
    assert all(cache_salt(tenant, "") == tenant for tenant in tenants), "gateways of earlier versions"


def test_other_tokens_at_the_same_length_are_a_miss() -> None:
    assert isinstance(look_up([1, 2, 9], 3, [4], prefix_hash([1, 2, 3])), Miss)


@given(st.lists(token_ids, min_size=1, max_size=700), st.lists(token_ids, max_size=700), st.data())
def test_prefix_hashes_of_an_answer(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    spec = SessionSpec("s", tuple(prompt), SamplingParams(), max_position=2000, vocab_size=2**32)
    answer = Answer(spec, lambda tokens: "x" * len(tokens))
    grown = list(prompt)
    for token in output:
        answer.append(token, TokenRecord())
        grown.append(token)
        if len(grown) % 50 == 0:
            length = data.draw(st.integers(0, len(grown)))
            for size in (length, len(grown), len(grown) - 1):
                assert answer.prefix_hash(size) == prefix_hash(grown[:size])
            length = data.draw(st.integers(0, len(grown) - len(prompt)))
            assert answer.output_hash(length) == prefix_hash(grown[len(prompt) :][:length])
    assert answer.prefix_hash(len(grown)) == prefix_hash(grown)
    assert answer.output_hash(len(output)) == prefix_hash(output)
    assert answer.output_hash(len(output) // 2) == prefix_hash(output[: len(output) // 2])


@given(tokens, tokens)
def test_a_running_hash_is_that_of_all_tokens(first: list[int], then: list[int]) -> None:
    running = RunningHash(first)
    running.add(then)
    assert running.digest() == prefix_hash([*first, *then])


def test_an_answer_takes_no_token_after_its_end() -> None:
    spec = SessionSpec(
        "s", (1,), SamplingParams(), max_position=9, vocab_size=9, stop_token_ids=frozenset([7])
    )
    answer = Answer(spec, lambda tokens: "x" * len(tokens))
    assert answer.append(3, TokenRecord())
    assert not answer.append(7, TokenRecord())
    assert not answer.append(3, TokenRecord())
    assert (answer.output, answer.ending) == ([3, 7], Ending(Reason.STOP, 7))


def test_a_replay_comes_in_chunks_of_bounded_size() -> None:
    spec = SessionSpec("s", (1,), SamplingParams(), max_position=2000, vocab_size=9)
    answer = Answer(spec, lambda tokens: "x" * len(tokens))
    while answer.append(3, TokenRecord()):
        pass
    chunks = [chunk for chunk in answer.chunks(0, answer.output_len) if isinstance(chunk, Chunk)]
    assert max(len(chunk.tokens) for chunk in chunks) == MAX_CHUNK_TOKENS
    assert sum(len(chunk.tokens) for chunk in chunks) == 1999
    assert [chunk.index for chunk in chunks] == list(range(0, 1999, MAX_CHUNK_TOKENS))
