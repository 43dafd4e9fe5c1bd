"""Prompt lookup at the gateway: guesses by the session's own tokens, anchored as a draft's are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.answer.answer import SessionSpec
from galley.core.content import prefix_hash
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from services.gateway.replicas.draft_session import LocalLookup

SPEC = SessionSpec("s", (1,), SamplingParams(), max_position=64, vocab_size=100)
PERIOD = [5, 6, 7, 8]


def ask(lookup: LocalLookup, tokens: list[int], *, start: int = 0, k: int = 4, ahead: int = 0) -> ev.Proposed:
    part = ev.Slice(start, tuple(tokens[start:]), prefix_hash(tokens[:start]))
    answer = lookup.propose(SPEC, ev.Propose(1, part, k, "model", ahead))
    assert isinstance(answer, ev.Proposed)
    assert (answer.position, answer.prefix_hash) == (len(tokens), prefix_hash(tokens))
    return answer


def test_it_proposes_what_followed_before() -> None:
    lookup = LocalLookup()
    tokens = [1, *PERIOD, *PERIOD[:2]]
    assert ask(lookup, tokens).tokens == (7, 8, 5, 6)
    assert ask(lookup, [*tokens, 7, 8], start=len(tokens) - 1, ahead=2, k=2).tokens == (5, 6)
    assert ask(lookup, [*tokens, 7, 9], start=len(tokens)).tokens == (), "the guesses were no tokens of it"


def test_a_match_of_one_token_is_no_guess() -> None:
    assert ask(LocalLookup(), [1, 5, 9, 5]).tokens == ()


def test_other_content_at_the_same_length_is_a_miss() -> None:
    lookup = LocalLookup()
    ask(lookup, [1, 2, 3])
    part = ev.Slice(2, (4,), prefix_hash([1, 9]))
    assert isinstance(lookup.propose(SPEC, ev.Propose(1, part, 4, "")), ev.CacheMissed)
    part = ev.Slice(9, (4,), prefix_hash([1] * 9))
    answer = lookup.propose(SPEC, ev.Propose(1, part, 4, ""))
    assert answer == ev.CacheMissed(1, 3, prefix_hash([1, 2, 3]))


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    lookup, tokens = LocalLookup(), PERIOD * 700
    spec_room = SPEC.max_position
    assert len(tokens) > spec_room
    answers = [ask(lookup, tokens, start=0 if i == 0 else len(tokens)) for i in range(3)]
    assert [answer.tokens for answer in answers] == [(), (), ()]


def test_it_proposes_nothing_beyond_the_end() -> None:
    tokens = (PERIOD * 20)[: SPEC.max_position - 2]
    assert len(ask(LocalLookup(), tokens).tokens) == 1


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def test_a_round_of_a_long_session_is_incremental() -> None:
    lookup, tokens, took = LocalLookup(), PERIOD * 2500, list[int]()
    with traced():
        for at in range(0, len(tokens), 1000):
            ask(lookup, tokens[: at + 1000], start=at)
        for round_ in range(5):
            part = ev.Slice(len(tokens), (round_,), prefix_hash(tokens))
            tokens.append(round_)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert isinstance(lookup.propose(SPEC, ev.Propose(1, part, 4, "model")), ev.Proposed)
            took.append(tracemalloc.get_traced_memory()[1] - before)
    assert min(took) < len(tokens), "bytes at a time; a round now and then makes room for many"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(5, 7), max_size=6), st.integers(0, 3))))
def test_it_proposes_as_a_fresh_lookup_would(requests: list[tuple[int, list[int], int]]) -> None:
    lookup, tokens = LocalLookup(), [1]
    ask(lookup, tokens)
    for kept, further, guessed in requests:
        tokens = [*tokens[:kept], *further]
        start, ahead = len(tokens) - len(further), min(guessed, len(tokens))
        assert ask(lookup, tokens, start=start, ahead=ahead) == ask(LocalLookup(), tokens, ahead=ahead)
