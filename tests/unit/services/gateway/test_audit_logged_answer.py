"""What an audit reads of a stored session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.core.answer.answer import SessionSpec, encode_spec
from galley.core.errors import LogLost
from galley.core.records import TokenRecord, encode_records
from galley.core.sampling_params import SamplingParams
from galley.core.store import CacheLocation, KvDirectory, Ownership, StoredSession
from services.gateway.audit.logged_answer import BuildRange, logged_answer

PROMPT, OUTPUT, VOCAB = (1, 2, 3), (4, 5, 6, 7), 8
SPEC = SessionSpec("s", PROMPT, SamplingParams(seed=7), max_position=7, vocab_size=VOCAB)
RECORDS = [TokenRecord(fingerprint="a"), TokenRecord(), TokenRecord(fingerprint="b"), TokenRecord()]
STORED = StoredSession(
    Ownership("s", 1, b"n"),
    "alice",
    {"spec": encode_spec(SPEC)},
    len(PROMPT),
    [*PROMPT, *OUTPUT],
    encode_records(RECORDS),
    "finished",
)


async def test_the_output_is_divided_by_builds() -> None:
    answer = await logged_answer(STORED)
    assert answer.ranges == [BuildRange(3, 5, "a"), BuildRange(5, 7, "b")]
    assert (answer.spec, answer.output_tokens, answer.replica) == (SPEC, 4, "")


async def test_the_build_of_the_most_tokens_comes_first() -> None:
    records = [TokenRecord(fingerprint=name) for name in "abba"]
    back = replace(STORED, meta=encode_records([*records[:3], TokenRecord()]))
    answer = await logged_answer(back)
    assert answer.builds() == ["b", "a"]
    assert answer.ranges_of("b") == [BuildRange(4, 5, "b"), BuildRange(5, 7, "b")]


async def test_the_replica_of_the_directory_served_it() -> None:
    directory = KvDirectory(target=CacheLocation("host:1", "i", 6))
    assert (await logged_answer(replace(STORED, directory=directory))).replica == "host:1"


@pytest.mark.parametrize(
    "changed",
    [
        replace(STORED, meta=encode_records(RECORDS[:3])),
        replace(STORED, meta=encode_records([*RECORDS, TokenRecord()])),
        replace(STORED, meta=b"\x04\x09a"),
        replace(STORED, tokens=[*PROMPT, 4, 5, 6, VOCAB]),
        replace(STORED, tokens=[*PROMPT, *OUTPUT, 1], meta=encode_records([*RECORDS, TokenRecord()])),
        replace(STORED, fields={"spec": b"{"}),
        replace(STORED, fields={}),
    ],
    ids=["a record less", "a record more", "torn records", "vocabulary", "too long", "spec", "no spec"],
)
async def test_what_no_target_computed_is_damaged(changed: StoredSession) -> None:
    with pytest.raises(LogLost):
        await logged_answer(changed)
