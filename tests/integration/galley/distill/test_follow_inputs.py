"""Which sessions a cycle learns from, and when it finds a draft better."""

from __future__ import annotations

import math

import numpy as np
import pytest

from galley.common.registry.spool import SpooledSession
from galley.distill.data.corpus import Conversation, corpus_of
from galley.distill.follow.comparison import MIXED, compared, paired
from galley.distill.follow.inputs import Inputs, choose, is_held_out, is_looping

_VOCAB = 1000
_PROMPT = 4


def session(name: str, answer: list[int]) -> SpooledSession:
    return SpooledSession(name, "chat", 0.0, _PROMPT, [1, 2, 3, 4, *answer])


def spooled(principal: str, count: int, length: int = 40, seed: int = 1) -> list[SpooledSession]:
    source = np.random.default_rng([seed, len(principal)])
    return [
        session(f"{principal}-{number}", source.integers(5, _VOCAB, length).tolist())
        for number in range(count)
    ]


def names(inputs: Inputs) -> set[str]:
    return {one.session.session_id for one in (*inputs.train, *inputs.held_out)}


def test_a_flood_of_one_principal_gets_no_more_than_half() -> None:
    flood = {"flood": spooled("flood", 3000), "a": spooled("a", 40), "bc": spooled("bc", 40)}
    inputs = choose(flood, _VOCAB, 8_000, 2_000)
    tokens = {name: counts.train_tokens for name, counts in inputs.counts.items()}
    assert tokens["a"] == inputs.counts["a"].train * 40
    assert inputs.counts["a"].train + inputs.counts["a"].held_out == 40
    assert sum(len(one.session.tokens) for one in inputs.train if one.principal == "flood") <= 4_000
    assert sum(len(one.session.tokens) for one in inputs.train) <= 8_000
    assert inputs.counts["flood"].held_out <= 2_000 // 44 // 2 + 1
    alone = choose({"flood": flood["flood"]}, _VOCAB, 8_000, 2_000)
    assert alone.train_tokens > 7_000


def test_the_newest_sessions_are_chosen() -> None:
    inputs = choose({"a": spooled("a", 100)}, _VOCAB, 440, 440)
    assert [one.session.session_id for one in inputs.train] == [
        f"a-{number}" for number in range(100) if not is_held_out(f"a-{number}")
    ][:10]


def test_a_tenth_is_held_out_by_its_id() -> None:
    first = choose({"a": spooled("a", 900)}, _VOCAB, 10**6, 10**6)
    second = choose({"a": spooled("a", 900, seed=2)}, _VOCAB, 10**6, 10**6)
    assert 60 < len(first.held_out) < 120
    assert {one.session.session_id for one in first.held_out} == {
        one.session.session_id for one in second.held_out
    }
    assert not {one.session.session_id for one in first.train} & {
        one.session.session_id for one in first.held_out
    }


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ([7, 8, 9] * 20, "looping"),
        ([5] * 40, "looping"),
        ([*range(5, 44), _VOCAB], "invalid"),
        ([*range(5, 44), -1], "invalid"),
        ([5, 6, 7], "short"),
    ],
)
def test_bad_sessions_are_left_out_and_counted(answer: list[int], fault: str) -> None:
    inputs = choose({"a": [session("bad", answer), *spooled("a", 3)]}, _VOCAB, 10_000, 10_000)
    assert names(inputs) == {"a-0", "a-1", "a-2"}
    assert getattr(inputs.counts["a"], fault) == 1


def test_an_answer_is_learned_once_whoever_got_it() -> None:
    [one] = spooled("a", 1)
    again = [session(f"again-{number}", list(one.tokens[_PROMPT:])) for number in range(50)]
    inputs = choose({"a": [one, *again], "b": again}, _VOCAB, 10_000, 10_000)
    assert names(inputs) == {"a-0"}
    assert inputs.counts["a"].repeated == 50
    assert inputs.counts["b"].repeated == 50


def test_lists_and_tables_are_no_loops() -> None:
    rows = [token for row in range(30) for token in (5, 6, 100 + row, 7, 8, 200 + row, 9)]
    assert not is_looping(rows)
    assert is_looping([*range(20), *rows[:7] * 30])


def test_a_long_session_is_cut_around_its_answers_begin() -> None:
    source = np.random.default_rng(1)
    prompt, answer = (source.integers(0, _VOCAB, length).tolist() for length in (5000, 3000))
    one = SpooledSession("long", "", 0.0, 5000, [*prompt, *answer])
    inputs = choose({"a": [one]}, _VOCAB, 10_000, 10_000)
    [chosen] = [*inputs.train, *inputs.held_out]
    assert chosen.session.tokens == [*prompt[-1024:], *answer[:1024]]
    assert chosen.session.prompt_len == 1024


def hits(counts: list[int], tokens: int) -> list[bool]:
    return [at < count for count in counts for at in range(tokens)]


def compare(before: list[int], after: list[int], parts: list[str], tokens: int = 20) -> str:
    held_out = corpus_of([Conversation([1, *range(tokens)], 1, "chat", 0.0) for _ in before])
    return compared(held_out, parts, np.array(hits(before, tokens)), np.array(hits(after, tokens))).problem()


def test_a_draft_is_better_by_the_lower_bound_of_the_pairs() -> None:
    parts = ["a"] * 12
    before = [2, 12, 5, 9, 1, 14, 3, 8, 6, 11, 4, 7]
    assert compare(before, [count + 1 + at % 2 for at, count in enumerate(before)], parts) == ""
    noise = [count + (6 if at % 2 else -5) for at, count in enumerate(before)]
    assert "not better" in compare(before, noise, parts)
    assert "not better" in compare(before, before, parts)
    assert "not better" in compare(before, [count - 1 for count in before], parts)
    assert "held-out sessions" in compare(before[:5], [9] * 5, parts[:5])


def test_a_draft_that_is_worse_for_one_principal_is_refused() -> None:
    before, parts = [8] * 36, ["a"] * 24 + ["b"] * 12
    worse = [14 + at % 2 for at in range(24)] + [4 + at % 2 for at in range(12)]
    assert compare(before, worse, parts).startswith("worse for b")
    assert compare(before, worse[:24] + [8] * 12, parts) == ""


def test_a_draft_that_forgets_the_corpus_is_refused() -> None:
    before, parts = [8] * 36, ["a"] * 24 + [MIXED] * 12
    forgets = [14 + at % 2 for at in range(24)] + [4 + at % 2 for at in range(12)]
    assert compare(before, forgets, parts).startswith("worse for corpus")
    learned = [8 + at % 2 - (at + 1) % 2 for at in range(24)] + [18] * 12
    assert "not better" in compare(before, learned, parts), "the corpus is no traffic"


def test_the_error_of_a_difference_is_that_of_a_ratio_over_sessions() -> None:
    source = np.random.default_rng(3)
    tokens = source.integers(20, 200, 400)
    gains = []
    for _ in range(300):
        drawn = source.integers(0, 400, 400)
        before, after = tokens * 0.3, tokens * 0.35 + np.sin(np.arange(400)) * 8
        gains.append(float((after - before)[drawn].sum() / tokens[drawn].sum()))
    measured = paired(
        (tokens * 0.3).astype(np.int64), (tokens * 0.35 + np.sin(np.arange(400)) * 8).astype(np.int64), tokens
    )
    assert measured.difference.error == pytest.approx(float(np.std(gains)), rel=0.2)
    assert paired(*(np.zeros(0, np.int64),) * 3).difference.error == math.inf
