"""Prompt lookup at the gateway: guesses by the session's own tokens, anchored as a draft's are."""

from __future__ import annotations

from services.core import events as ev
from services.core.answer import SessionSpec
from services.core.content import prefix_hash
from services.core.params import SamplingParams
from services.gateway.lookup import Lookup

SPEC = SessionSpec("s", (1,), SamplingParams(), max_position=64, vocab_size=100)
PERIOD = [5, 6, 7, 8]


def ask(lookup: Lookup, tokens: list[int], *, start: int = 0, k: int = 4, ahead: int = 0) -> ev.Proposed:
    part = ev.Slice(start, tuple(tokens[start:]), prefix_hash(tokens[:start]))
    answer = lookup.propose(SPEC, ev.Propose(1, part, k, "model", ahead))
    assert isinstance(answer, ev.Proposed)
    assert (answer.position, answer.prefix_hash) == (len(tokens), prefix_hash(tokens))
    return answer


def test_it_guesses_what_followed_before_and_goes_on_from_guesses() -> None:
    lookup = Lookup()
    tokens = [1, *PERIOD, *PERIOD[:2]]
    assert ask(lookup, tokens).tokens == (7, 8, 5, 6)
    assert ask(lookup, [*tokens, 7, 8], start=len(tokens) - 1, ahead=2, k=2).tokens == (5, 6)
    assert ask(lookup, [*tokens, 7, 9], start=len(tokens)).tokens == (), "the guesses were no tokens of it"


def test_a_match_of_one_token_is_no_guess() -> None:
    assert ask(Lookup(), [1, 5, 9, 5]).tokens == ()


def test_other_content_at_the_same_length_is_a_miss() -> None:
    lookup = Lookup()
    ask(lookup, [1, 2, 3])
    part = ev.Slice(2, (4,), prefix_hash([1, 9]))
    assert isinstance(lookup.propose(SPEC, ev.Propose(1, part, 4, "")), ev.CacheMissed)
    part = ev.Slice(9, (4,), prefix_hash([1] * 9))
    answer = lookup.propose(SPEC, ev.Propose(1, part, 4, ""))
    assert answer == ev.CacheMissed(1, 3, prefix_hash([1, 2, 3]))


def test_a_long_prompt_is_followed_a_piece_at_a_time() -> None:
    lookup, tokens = Lookup(), PERIOD * 700
    spec_room = SPEC.max_position
    assert len(tokens) > spec_room
    answers = [ask(lookup, tokens, start=0 if i == 0 else len(tokens)) for i in range(3)]
    assert [answer.tokens for answer in answers] == [(), (), ()]


def test_no_guess_stands_where_the_target_takes_none() -> None:
    tokens = (PERIOD * 20)[: SPEC.max_position - 2]
    assert len(ask(Lookup(), tokens).tokens) == 1
