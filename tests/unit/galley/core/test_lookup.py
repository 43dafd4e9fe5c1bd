"""Prompt lookup in a session and in recent answers, against the definitions."""

from __future__ import annotations

from weakref import ref

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.lookup.lookup import (
    NOTHING,
    AnswerLookup,
    AnswerPart,
    LookupResult,
    RecentAnswers,
    SessionLookup,
)

TOKENS = st.lists(st.integers(0, 2), max_size=24)
FEW = settings(max_examples=120)
PROMPT = [90, 91, 92]


def session(tokens: list[int]) -> SessionLookup:
    lookup = SessionLookup()
    lookup.follow(tokens)
    return lookup


def answered(answers: RecentAnswers, tokens: list[int], prompt: list[int] = PROMPT) -> AnswerLookup:
    lookup = AnswerLookup(answers)
    lookup.follow([*prompt, *tokens], len(prompt))
    return lookup


@FEW
@given(TOKENS, TOKENS, st.integers(1, 12))
def test_the_longest_match_is_followed(confirmed: list[int], ahead: list[int], count: int) -> None:
    whole = [*confirmed, *ahead]
    result = session(confirmed).find(ahead, count)
    if not result.matched:
        assert not whole or whole[-1] not in (confirmed if ahead else confirmed[:-1])
        return
    assert len(result.tokens) == count
    going_on = [*whole, *result.tokens]
    n = result.matched
    suffix = whole[len(whole) - n :]
    ends = [end for end in range(n, len(whole)) if whole[end - n : end] == suffix]
    assert any(tuple(going_on[end : end + count]) == result.tokens for end in ends)
    longer = whole[len(whole) - n - 1 :]
    within = confirmed if ahead else confirmed[:-1]
    assert n == len(whole) or not any(within[i : i + n + 1] == longer for i in range(len(within) - n))


@FEW
@given(TOKENS, st.integers(0, 24))
def test_the_pieces_of_a_session_do_not_matter(tokens: list[int], cut: int) -> None:
    pieces = session(tokens[:cut])
    pieces.find(tokens[cut:], 4)
    pieces.follow(tokens[cut:])
    assert pieces.find((), 5) == session(tokens).find((), 5)


def test_a_period_is_carried_on_through_what_is_ahead() -> None:
    assert session([7, 1, 2, 3, 1, 2, 3]).find((), 5).tokens == (1, 2, 3, 1, 2)
    assert session([5, 5, 5]).find([5], 3) == LookupResult((5, 5, 5), 3)
    assert session([5, 5, 5]).find([5, 5], 3).tokens == (5, 5, 5)
    assert session([7, 1, 2, 3, 1]).find([2, 3], 5).tokens == (1, 2, 3, 1, 2)


def test_without_a_repetition_there_is_no_match() -> None:
    for tokens in ([], [1], [1, 2, 3, 4]):
        assert session(tokens).find((), 4) == NOTHING
    assert session([1, 2, 3]).find([9], 4) == NOTHING


def test_is_prefix_of() -> None:
    lookup = session([1, 2, 3, 4])
    assert lookup.is_prefix_of([1, 2, 3, 4], 0)
    assert lookup.is_prefix_of([1, 2, 3, 4, 5], 2)
    assert not lookup.is_prefix_of([1, 2, 9, 4, 5], 2)
    assert not lookup.is_prefix_of([1, 2, 3], 0)
    assert lookup.is_prefix_of([1, 9, 3, 4, 5], 2)


class TestRecentAnswers:
    def test_an_answer_in_progress_of_another_session_matches(self) -> None:
        answers = RecentAnswers()
        first, second = answered(answers, [10, 11, 12, 13, 14]), answered(answers, [50, 10, 11])
        assert second.find((), 8) == LookupResult((12, 13, 14), 2)
        assert second.find([12], 8) == LookupResult((13, 14), 3)
        first.follow([*PROMPT, 10, 11, 12, 13, 14, 15], len(PROMPT))
        assert second.find([12, 13], 8) == LookupResult((14, 15), 4)

    def test_the_first_token_of_an_answer_follows_the_end_of_the_prompt(self) -> None:
        answers = RecentAnswers()
        answered(answers, [10, 11], [1, 2, *PROMPT])
        assert answered(answers, [], [3, *PROMPT]).find((), 2) == LookupResult((10, 11), 3)

    def test_only_the_end_of_a_prompt_is_kept(self) -> None:
        answers = RecentAnswers()
        answered(answers, [10, 11], list(range(60, 90)))
        assert answered(answers, [70, 71]).find((), 2) == LookupResult()

    def test_no_match_crosses_the_end_of_an_answer(self) -> None:
        answers = RecentAnswers()
        answered(answers, [10, 11], [1])
        answered(answers, [20, 21], [2])
        assert answered(answers, [11]).find((), 4) == LookupResult()
        assert answered(answers, [10]).find((), 4) == LookupResult((11,), 1)

    def test_answers_match_for_two_generations(self) -> None:
        answers = RecentAnswers(limit=80)
        reader = answered(answers, [])
        answered(answers, [10, 11, 12])
        for generation, expected in enumerate([(11, 12), (11, 12), ()]):
            assert answered(answers, [10]).find((), 2).tokens == expected, generation
            answered(answers, [generation] * 27)
        reader.follow([*PROMPT, 10], len(PROMPT))
        assert reader.find((), 2) == LookupResult()

    def test_a_long_answer_takes_only_the_room_of_what_is_kept_of_it(self) -> None:
        answers = RecentAnswers()
        answered(answers, [10, 11, 12])
        for _ in range(2):
            answered(answers, [0] * (answers.half + 1))
        assert answered(answers, [10]).find((), 2).tokens == (11, 12)

    def test_a_long_session_follows_a_new_generation(self) -> None:
        answers = RecentAnswers(limit=80)
        reader = answered(answers, [5, 6])
        answered(answers, [0] * 30)
        answered(answers, [10, 11, 12])
        reader.follow([*PROMPT, 5, 6, 10], len(PROMPT))
        assert reader.find((), 2) == LookupResult((11, 12), 1)
        assert answered(answers, [5, 6]).find((), 1) == LookupResult((10,), 5)

    @FEW
    @given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12))
    def test_answers_are_bounded(self, written: list[list[int]]) -> None:
        answers = RecentAnswers(limit=40)
        lookups = [AnswerLookup(answers) for _ in range(3)]
        tokens = [list(PROMPT) for _ in lookups]
        for i, more in enumerate(written):
            tokens[i % 3] += more
            lookups[i % 3].follow(tokens[i % 3], len(PROMPT))
            lookups[i % 3].find([1], 4)
            assert len(answers.newer) <= 20
            assert len(answers.older) <= 20


class TestSharedAnswers:
    """Answers that other replicas followed."""

    def test_they_match_as_those_of_this_replica_do_and_say_so(self) -> None:
        answers = RecentAnswers()
        answers.receive(AnswerPart(b"other", 5, [10, 11, 12, 13]))
        answered(answers, [20, 21, 22])
        assert answered(answers, [10, 11]).find((), 2) == LookupResult((12, 13), 2, is_shared=True)
        assert answered(answers, [20, 21], [1]).find((), 2) == LookupResult((22,), 2)

    def test_a_part_continues_the_one_before(self) -> None:
        answers = RecentAnswers()
        answers.receive(AnswerPart(b"other", 5, [10, 11]))
        answers.receive(AnswerPart(b"another", 7, [30, 31]))
        answers.receive(AnswerPart(b"other", 7, [12, 13]))
        assert answered(answers, [10, 11]).find((), 4).tokens == (12, 13)
        assert answered(answers, [11]).find((), 4).tokens == (12, 13)

    def test_a_part_after_a_gap_continues_nothing(self) -> None:
        answers = RecentAnswers()
        answers.receive(AnswerPart(b"other", 5, [10, 11]))
        answers.receive(AnswerPart(b"other", 8, [13, 14]))
        answers.receive(AnswerPart(b"other", 10, [15]))
        assert answered(answers, [10]).find((), 4).tokens == (11,)
        assert answered(answers, [13]).find((), 4).tokens == (14, 15)

    @FEW
    @given(TOKENS, st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=8), TOKENS)
    def test_known_tokens_are_left_out(
        self, answer: list[int], ranges: list[tuple[int, int]], asked: list[int]
    ) -> None:
        whole, parts = RecentAnswers(), RecentAnswers()
        reached = 0
        for start, end in ranges:
            if start <= reached < end <= len(answer):
                reached = end
            if start < end <= reached:
                parts.receive(AnswerPart(b"other", 3 + start, answer[start:end]))
        if reached:
            whole.receive(AnswerPart(b"other", 3, answer[:reached]))
        assert len(parts.newer) == len(whole.newer) == reached
        assert answered(parts, asked).find((), 4) == answered(whole, asked).find((), 4)

    @FEW
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 9)), max_size=24))
    def test_they_are_bounded_too(self, received: list[tuple[int, int, int]]) -> None:
        answers = RecentAnswers(limit=40)
        lookup, tokens = AnswerLookup(answers), list(PROMPT)
        for session, start, count in received:
            answers.receive(AnswerPart(bytes([session]), start, [1] * count))
            tokens.append(2)
            lookup.follow(tokens, len(PROMPT))
            assert lookup.find((), 4).tokens == (2,) * (lookup.find((), 4).matched > 0)
            assert max(len(answers.newer), len(answers.older)) <= 20

    def test_idle_sessions_keep_no_generation(self) -> None:
        answers, lookups = RecentAnswers(limit=40), []
        generations = [ref(answers.older), ref(answers.newer)]
        for number in range(6):
            lookups.append(answered(answers, [1, 2, 1]))
            answers.receive(AnswerPart(bytes([number]), 0, [7] * 20))
            generations.append(ref(answers.newer))
        assert [generation() for generation in generations[:-2]] == [None] * 6
        assert [lookup.find((), 4).tokens for lookup in lookups] == [()] * 5 + [(2, 1)]
        lookup = lookups[0]
        lookup.follow([*PROMPT, 1, 2, 1, 7], len(PROMPT))
        assert lookup.find((), 2).tokens == (7, 7), "it goes on with what is recent"
