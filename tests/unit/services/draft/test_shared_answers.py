"""Answers on their way between the worker and the log: joined, cut, encoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.lookup.lookup import AnswerPart, RecentAnswers
from services.draft.answers.log import MOST_LOG_BYTES, decode, encode
from services.draft.answers.mailbox import MOST_PART_TOKENS, SharedAnswers, SharedKind

SESSION = b"8 bytes."
PARTS = st.lists(
    st.builds(
        AnswerPart,
        st.binary(min_size=8, max_size=8),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    ),
    max_size=5,
)


def a_kind(salt: bytes = b"salt", workload: str = "chat") -> SharedKind:
    return SharedKind((salt, workload), RecentAnswers())


@given(PARTS)
def test_parts_are_read_as_they_were_written(parts: list[AnswerPart]) -> None:
    assert list(decode(encode(parts))) == parts


@given(PARTS, st.integers(1, 60))
def test_a_log_that_was_cut_off_yields_its_whole_parts(parts: list[AnswerPart], missing: int) -> None:
    data = encode(parts)
    read = list(decode(data[:-missing]))
    assert read == parts[: len(read)]
    assert len(read) < max(1, len(parts))


@given(PARTS, st.integers(0, 2**32 - 1))
def test_parts_beyond_the_vocabulary_are_left_out(parts: list[AnswerPart], vocab_size: int) -> None:
    known = AnswerPart(SESSION, 0, [0])
    expected = [part for part in parts if all(token < vocab_size for token in part.tokens)]
    assert list(decode(encode([*parts, known]), vocab_size)) == [*expected, *[known] * (vocab_size > 0)]


@given(st.binary(max_size=200))
def test_no_bytes_harm_a_reader(data: bytes) -> None:
    for part in decode(data):
        assert 0 < len(part.tokens) <= MOST_PART_TOKENS


def test_the_last_parts_that_fit_into_a_log_are_written() -> None:
    parts = [AnswerPart(SESSION, i * MOST_PART_TOKENS, [i] * MOST_PART_TOKENS) for i in range(200)]
    data = encode(parts)
    assert MOST_LOG_BYTES - 2 * 4 * MOST_PART_TOKENS < len(data) < MOST_LOG_BYTES
    read = list(decode(data))
    assert read == parts[-len(read) :]


def test_what_follows_in_a_session_is_one_part() -> None:
    shared, kind = SharedAnswers(), a_kind()
    shared.publish(kind, "a", 3, [1, 2])
    shared.publish(kind, "b", 9, [5])
    shared.publish(kind, "a", 5, [3])
    shared.publish(kind, "a", 4, [2, 3, 4])
    shared.publish(kind, "a", 4, [2])
    shared.publish(kind, "a", 9, [7])
    [(taken, parts)] = shared.take().items()
    assert taken is kind
    assert [(part.start, list(part.tokens)) for part in parts] == [(3, [1, 2, 3, 4]), (9, [7]), (9, [5])]
    assert parts[0].session == parts[1].session != parts[2].session
    assert shared.take() == {}


def test_a_long_part_is_cut() -> None:
    shared, tokens = SharedAnswers(), list(range(2 * MOST_PART_TOKENS + 1))
    shared.publish(a_kind(), "a", 3, tokens)
    [parts] = shared.take().values()
    assert [len(part.tokens) for part in parts] == [MOST_PART_TOKENS, MOST_PART_TOKENS, 1]
    assert [token for part in parts for token in part.tokens] == tokens
    assert [part.start for part in parts] == [3, 3 + MOST_PART_TOKENS, 3 + 2 * MOST_PART_TOKENS]


def test_a_kind_without_news_is_read_all_the_same() -> None:
    shared, kind = SharedAnswers(), a_kind()
    shared.publish(kind, "a", 3, [])
    assert shared.take() == {kind: []}


@pytest.mark.parametrize("other", [a_kind(salt=b"other"), a_kind(salt=b"")])
def test_a_session_has_another_hash_for_another_tenant(other: SharedKind) -> None:
    shared, kind = SharedAnswers(), a_kind()
    for of in (kind, other):
        shared.publish(of, "a", 3, [1])
    taken = shared.take()
    assert taken[kind][0].session != taken[other][0].session


def test_received_parts_are_indexed_some_at_a_time() -> None:
    shared, kind = SharedAnswers(), a_kind()
    parts = [AnswerPart(SESSION, i * 100, list(range(i * 100, i * 100 + 100))) for i in range(5)]
    shared.deliver(kind, parts)
    sizes = []
    while shared.has_work:
        shared.work()
        sizes.append(len(kind.answers.newer))
    assert sizes == [300, 500]


def test_what_waits_is_bounded() -> None:
    shared, kind = SharedAnswers(), a_kind()
    for i in range(20_000):
        shared.publish(kind, "a", i, [1])
        shared.deliver(kind, [AnswerPart(SESSION, i, [1])])
    [(part, *_)] = shared.take().values()
    assert part.start > 10_000
    while shared.has_work:
        shared.work()
    assert len(kind.answers.newer) < 10_000
