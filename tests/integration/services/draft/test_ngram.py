"""The strategy that looks up: what it proposes, learns and keeps apart."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.draft.answers.mailbox import SharedAnswers
from services.draft.strategies.base import DraftSession, Proposal
from services.draft.strategies.ngram import Lookups, NgramStrategy
from tests.integration.services.draft.jobs import job_of

PROMPT = [1, 2, 3]
TOKENS = st.lists(st.integers(0, 2), max_size=6)


class Talk:
    def __init__(
        self, strategy: NgramStrategy, prompt: list[int], *, salt: bytes = b"", workload: str = ""
    ) -> None:
        self.session = DraftSession()
        self.tokens = list(prompt)
        self._strategy, self._prompt_len, self._salt, self._workload = strategy, len(prompt), salt, workload
        self.proposal: Proposal = self.ask()

    def ask(self, *confirmed: int, ahead: tuple[int, ...] = (), k: int = 4) -> Proposal:
        self.tokens += confirmed
        job = job_of(
            self.session,
            [*self.tokens, *ahead],
            k,
            ahead=len(ahead),
            prompt_len=self._prompt_len,
            salt=self._salt,
            workload=self._workload,
        )
        (self.proposal,) = self._strategy.begin([job])
        return self.proposal


def test_it_guesses_what_followed_and_says_how_likely_that_is() -> None:
    proposal = Talk(NgramStrategy(Lookups()), [5, 6, 7, 8, 9, 5, 6]).proposal
    assert proposal.tokens == [7, 8, 9, 5]
    assert proposal.done
    assert proposal.survival == pytest.approx([1 / 2, 3 / 10, 1 / 5, 1 / 7])


def test_unseen_tokens_give_no_proposal() -> None:
    assert Talk(NgramStrategy(Lookups()), [1, 2, 3, 4]).proposal.tokens == []
    assert Talk(NgramStrategy(Lookups()), [5, 6, 5]).ask(k=0).tokens == []


def test_guesses_end_after_a_stop_token() -> None:
    session = DraftSession()
    job = job_of(session, [5, 6, 2, 8, 5], 4, stop_token_ids=frozenset([2, 3]))
    assert NgramStrategy(Lookups()).begin([job])[0].tokens == [6, 2]


def test_tokens_ahead_are_followed_and_forgotten() -> None:
    talk = Talk(NgramStrategy(Lookups()), [5, 6, 7, 8, 9, 1, 5])
    assert talk.proposal.tokens == [6, 7, 8, 9]
    assert talk.ask(ahead=(6, 7), k=2).tokens == [8, 9]
    assert talk.ask(1).tokens == [5, 1, 5, 1]
    assert talk.ask(6, ahead=(7, 8), k=2).tokens == [9, 1]


def test_being_right_raises_survival() -> None:
    strategy = NgramStrategy(Lookups())
    period = [1, 2, 3, 4, 5, 6, 7, 8]
    talk = Talk(strategy, period * 3)
    before = talk.proposal.survival[0]
    for i in range(80):
        talk.ask(period[i % 8])
    assert Talk(strategy, period * 3).proposal.survival[0] > before > 0.8


def test_being_wrong_lowers_survival() -> None:
    strategy = NgramStrategy(Lookups())
    before = Talk(strategy, [5, 6, 8, 9, 5]).proposal.survival[0]
    talk = Talk(strategy, [0])
    for i in range(20):
        talk.ask(7)
        talk.ask(i + 10)
    assert 0 < Talk(strategy, [5, 6, 8, 9, 5]).proposal.survival[0] < before / 2


def test_unlikely_tokens_are_not_proposed() -> None:
    strategy = NgramStrategy(Lookups())
    talk = Talk(strategy, [0])
    for i in range(400):
        talk.ask(7)
        talk.ask(i + 10)
    assert Talk(strategy, [5, 6, 8, 9, 5]).proposal.tokens == []


def test_nothing_is_learnt_of_guesses_that_are_ahead() -> None:
    strategy = NgramStrategy(Lookups())
    talk = Talk(strategy, [5, 6, 7, 8, 9, 5])
    before = list(talk.proposal.survival)
    for _ in range(50):
        talk.ask(ahead=(6, 7))
    assert talk.ask().survival == before


def test_other_sessions_learn_from_an_answer_of_their_kind() -> None:
    strategy = NgramStrategy(Lookups())
    Talk(strategy, PROMPT, workload="code").ask(10, 11, 12, 13)
    same = Talk(strategy, [50, 51], workload="code")
    assert same.ask(10, 11).tokens == [12, 13]
    other = Talk(strategy, [50, 51], workload="chat")
    assert other.ask(10, 11).tokens == []


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.lists(st.integers(0, 3), min_size=1)), max_size=20),
    st.sampled_from([b"", b"own"]),
)
def test_tenants_do_not_affect_each_others_proposals(
    observed: list[tuple[bool, bool, list[int]]], own_salt: bytes
) -> None:
    shared, alone = NgramStrategy(Lookups()), NgramStrategy(Lookups())
    foreign = [Talk(shared, [0, 1], salt=b"other"), Talk(shared, [1], salt=b"other")]
    pairs = [[Talk(strategy, [2, i], salt=own_salt) for strategy in (shared, alone)] for i in range(2)]
    for is_foreign, first, tokens in observed:
        if is_foreign:
            foreign[first].ask(*tokens)
        else:
            here, there = (talk.ask(*tokens) for talk in pairs[first])
            assert (here.tokens, here.survival) == (there.tokens, there.survival)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 12), TOKENS, TOKENS), max_size=8))
def test_session_with_changed_tokens_starts_over(
    changes: list[tuple[int, list[int], list[int]]],
) -> None:
    strategy, session, tokens = NgramStrategy(Lookups()), DraftSession(), [0]
    for i, (kept, more, ahead) in enumerate(changes):
        tokens = [*tokens[:kept], *more]
        ask = partial(job_of, tokens=[*tokens, *ahead], k=4, ahead=len(ahead), salt=bytes([i]))
        (here,) = strategy.begin([ask(session, prompt_len=len(tokens))])
        (there,) = NgramStrategy(Lookups()).begin([ask(DraftSession(), prompt_len=len(tokens))])
        assert (here.tokens, here.survival) == (there.tokens, there.survival)


def test_a_session_can_go() -> None:
    strategy = NgramStrategy(Lookups())
    gone = weakref.ref(Talk(strategy, [5, 6, 7, 5]).session)
    gc.collect()
    assert gone() is None


def test_kinds_are_bounded_the_last_used_stay() -> None:
    strategy = NgramStrategy(Lookups())
    Talk(strategy, PROMPT, workload="first").ask(10, 11, 12)
    Talk(strategy, PROMPT, workload="used").ask(10, 11, 12)
    for i in range(31):
        Talk(strategy, PROMPT, workload=f"{i}")
        Talk(strategy, PROMPT, workload="used")
    assert Talk(strategy, [50], workload="first").ask(10).tokens == []
    assert Talk(strategy, [50], workload="used").ask(10).tokens == [11, 12]


def test_a_kind_stays_while_the_draft_knows_a_session_of_it() -> None:
    strategy, salts = NgramStrategy(Lookups()), [bytes([i]) for i in range(40)]
    talks = [Talk(strategy, [1, 2, 3, 1, 2], salt=salt) for salt in salts]
    for talk in talks:
        talk.ask(10, 11, 12)
    new = Talk(strategy, [7, 8, 9, 7, 8], salt=b"new").proposal
    for salt in salts:
        assert Talk(strategy, [50], salt=salt).ask(10).tokens == [11, 12]
        proposal = Talk(strategy, [7, 8, 9, 7, 8], salt=salt).proposal
        assert proposal.tokens[0] == new.tokens[0] == 9
        assert proposal.survival[0] < new.survival[0], "the first match of two tokens was wrong"


def test_tokens_are_shared_once_however_many_kinds_draft_in_turn() -> None:
    shared = SharedAnswers()
    strategy = NgramStrategy(Lookups(shared))
    talks = [Talk(strategy, PROMPT, salt=bytes([i])) for i in range(40)]
    kinds = shared.take().keys()
    for talk in talks:
        talk.ask(9)
    published = shared.take()
    assert published.keys() == kinds
    assert [part.tokens for parts in published.values() for part in parts] == [[9]] * 40


def test_a_long_prompt_is_followed_a_piece_a_step() -> None:
    strategy, session = NgramStrategy(Lookups()), DraftSession()
    tokens = [*range(3000), 1, 2]
    (proposal,) = strategy.begin([job_of(session, tokens, 3)])
    steps = 0
    while not proposal.done:
        assert proposal.tokens == []
        strategy.advance([proposal])
        steps += 1
    assert (proposal.tokens, steps) == ([3, 4, 5], 2)
    other = DraftSession()
    started = [strategy.begin([job_of(other, tokens, 3)])[0] for _ in range(3)]
    assert [again.tokens for again in started] == [[], [], [3, 4, 5]]


def test_a_long_session_takes_no_longer() -> None:
    talk = Talk(NgramStrategy(Lookups()), [i * i % 1009 for i in range(8000)])
    while not talk.proposal.done:
        talk.ask()
    times = []
    for i in range(51):
        start_ns = time.perf_counter_ns()
        talk.ask(i * 7 % 1009)
        times.append(time.perf_counter_ns() - start_ns)
    # The least, because this measures the code and not the machine's other work.
    assert min(times) < 1_000_000
