"""Sessions with a grammar: which draft tokens are verified, and which tokens their states have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

from galley.core.content import prefix_hash, token_bytes
from galley.core.errors import Broken
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.hints import Hint
from galley.core.scheduler.messages import Confirmed
from galley.core.step import Sampled, StepChunk
from galley.engine.masking import confirmed_mask
from tests.fakes.engine import StrictEngine
from tests.fakes.scheduler_world import Bench, request, result_of
from tests.fakes.truth import IDS, STOP_ID
from tests.fakes.vocabularies import allowed

A, B, C, D, E, F = range(6)
PROMPT = [F, F, F]
# A token for each of the letters a to g, and the end.
VOCABULARY = Vocabulary.of_bytes([bytes([ord("a") + i]) for i in range(IDS - 1)] + [b"<end>"], [STOP_ID])
LONG = GrammarSpec("regex", "(a[b-d]|cd|e){50,90}")
SHORT = GrammarSpec("regex", "(a[b-d]|cd|e){3,5}")


def grammar(spec: GrammarSpec = SHORT) -> CompiledGrammar:
    return compile_grammar(VOCABULARY, spec)


def chosen(may_follow: set[int], tokens: Sequence[int]) -> int:
    """Return one of the tokens that may follow, a pure function of these and all tokens before."""
    return sorted(may_follow)[crc32(token_bytes(tokens)) % len(may_follow)]


def answer(compiled: CompiledGrammar, count: int = 40, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Return what a session generates without drafts: each position by a state that starts anew."""
    output: list[int] = []
    while len(output) < count and STOP_ID not in output:
        state = compiled.start()
        state.confirm(output)
        output.append(chosen(allowed(state.masks(())[0]), [*prompt, *output]))
    return output


class MaskedEngine(StrictEngine):
    """It draws from the masks of the draws' grammars, as the paged engine does."""

    def __init__(self, **info: Any) -> None:
        super().__init__(**info)
        self.states: list[GrammarState] = []
        self.slow_row_ns = 0

    def draw(self, chunk: StepChunk, seen: Sequence[int]) -> Sampled:
        draw = chunk.draw
        assert draw is not None
        assert draw.grammar is not None
        self.states.append(draw.grammar)
        tokens: list[int] = []
        for i, row in enumerate(confirmed_mask(draw.grammar, draw)):
            tokens.append(chosen(allowed(row), [*draw.history, *tokens]))
            if draw.draft_tokens[i : i + 1] != (tokens[-1],):
                break
        draw.grammar.row_ns = self.slow_row_ns or draw.grammar.row_ns
        return Sampled(tuple(tokens))


class Session:
    """A session whose requests bring its confirmed tokens, as a gateway's do."""

    def __init__(self, bench: Bench, compiled: CompiledGrammar, name: str = "s") -> None:
        self.bench = bench
        self.compiled = compiled
        self.name = name
        self.tokens = list(PROMPT)
        self.held = 0
        self.verified = 0

    def submit(self, drafts: Sequence[int] = (), **given: object) -> int:
        made = request(
            self.tokens,
            start=self.held,
            session=self.name,
            prompt_len=len(PROMPT),
            compiled=self.compiled,
            stop_token_ids=frozenset({STOP_ID}),
            draft_tokens=tuple(drafts),
        )
        return self.bench.submit(replace(made, **given))  # type: ignore[arg-type]  # the test's own

    def take(self, result: Confirmed) -> None:
        self.tokens += result.tokens
        self.held = result.kv_len
        self.verified += result.verified

    def round(self, drafts: Sequence[int] = (), **given: object) -> Confirmed:
        self.submit(drafts, **given)
        (response,) = self.bench.step()
        self.take(result_of(response))
        return result_of(response)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(PROMPT) :]


def bench_of() -> tuple[Bench, MaskedEngine]:
    bench, engine = Bench(max_rows=128), MaskedEngine(kv_block_tokens=4)
    bench.engine = engine
    return bench, engine


def test_drafts_change_no_token_of_a_constrained_answer() -> None:
    compiled = grammar()
    true = answer(compiled)
    assert 6 <= len(true) <= 11
    for right in range(4):
        session = Session(bench_of()[0], compiled)
        while STOP_ID not in session.output:
            at = len(session.output)
            drafts = [*true[at : at + right], *(token ^ 1 for token in true[at + right : at + 4])]
            session.round([token for token in drafts if token < IDS])
        assert session.output == true


def test_draft_tokens_that_the_grammar_does_not_allow_take_no_row() -> None:
    compiled = grammar()
    true = answer(compiled)
    session = Session(bench_of()[0], compiled)
    assert session.round([F, *true[:2]]).verified == 0
    second = session.round([*true[1:3], F, A])
    assert (second.verified, second.accepted) == (2, 2)


def test_a_hint_is_cut_anew_at_each_position() -> None:
    compiled = grammar(LONG)
    true = answer(compiled, 12)
    bench, _ = bench_of()
    session = Session(bench, compiled)
    item = session.submit(credit=11)
    wrong = [*true[:3], F, *true[4:12]]
    bench.extend(item, hint=Hint(len(PROMPT), prefix_hash(PROMPT), tuple(wrong)))
    results = bench.results()[item]
    assert [token for result in results for token in result.tokens] == true
    assert [result.verified for result in results][:2] == [3, 7]


def test_a_session_keeps_its_state_from_request_to_request() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(LONG))
    for _ in range(5):
        session.round()
    assert len({id(state) for state in engine.states}) == 1
    assert engine.states[0].length == 4, "it has seen what was confirmed before the last draw"


def test_rejected_draft_tokens_never_reach_a_state() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(LONG))
    for _ in range(6):
        at = session.compiled.start()
        at.confirm(session.output)
        wrong = sorted(allowed(at.masks(())[0]))
        session.round(wrong[:1])
        session.round(wrong[-1:])
    assert session.output == answer(session.compiled, len(session.output))
    assert engine.states[-1].length < len(session.output), "the last tokens are confirmed, but not seen yet"


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_another_replica_rebuilds_the_state_from_the_tokens(kept: int) -> None:
    compiled = grammar(LONG)
    first = Session(bench_of()[0], compiled)
    for _ in range(kept):
        first.round()
    second = Session(bench_of()[0], grammar(LONG))
    second.tokens = list(first.tokens)
    second.round(answer(compiled, kept + 3)[kept:])
    assert second.output == answer(compiled, len(second.output))
    assert second.verified == 3


def test_a_state_that_has_seen_other_tokens_is_not_used() -> None:
    bench, engine = bench_of()
    compiled = grammar(LONG)
    session = Session(bench, compiled)
    for _ in range(3):
        session.round()
    before, session.tokens, session.held = session.tokens, [*PROMPT, A, D], 0
    assert before[: len(session.tokens)] != session.tokens
    session.round()
    state = compiled.start()
    state.confirm([A, D])
    assert session.output[-1] == chosen(allowed(state.masks(())[0]), session.tokens[:-1])
    assert engine.states[-1] is not engine.states[0]


def test_a_request_of_earlier_tokens_rebuilds_the_state() -> None:
    """Its gateway may have lost a result that this replica confirmed."""
    bench, _ = bench_of()
    compiled = grammar(LONG)
    session = Session(bench, compiled)
    for _ in range(4):
        session.round()
    del session.tokens[len(PROMPT) + 1 :]
    session.held = 0
    session.round(answer(compiled, 3)[1:])
    assert session.output == answer(compiled, 4)


def test_sessions_of_one_grammar_share_no_state() -> None:
    bench, engine = bench_of()
    compiled = grammar(LONG)
    sessions = [Session(bench, compiled, name) for name in "xyz"]
    for session in sessions:
        session.tokens = list(PROMPT)
    sessions[1].tokens += [A, B]
    sessions[2].tokens += [E]
    items = {session.submit(): session for session in sessions}
    for response in bench.step():
        items[response.request_id].take(result_of(response))
    assert len({id(state) for state in engine.states}) == 3
    assert [session.output[:-1] for session in sessions] == [[], [A, B], [E]]


def test_another_grammar_of_the_session_starts_anew() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(LONG))
    session.round()
    session.compiled = grammar(GrammarSpec("regex", "[a-e]{9}"))
    session.round()
    assert engine.states[-1] is not engine.states[0]


def test_after_an_error_the_state_is_rebuilt() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(LONG))
    session.round()
    session.submit()
    plan = bench.begin()
    bench.scheduler.conclude(plan, [Broken("NaN")], bench.now)
    assert isinstance(bench.scheduler.take_responses()[0].outcome, Broken)
    session.held = 0
    session.round()
    assert engine.states[-1] is not engine.states[0]
    assert session.output == answer(session.compiled, 2)


def test_sessions_that_have_kv_keep_their_states() -> None:
    bench, engine = Bench(max_rows=2048, blocks=2048, max_sessions=300), MaskedEngine(kv_block_tokens=4)
    bench.engine = engine
    compiled = grammar(LONG)
    sessions = [Session(bench, compiled, str(number)) for number in range(300)]
    for session in sessions * 2:
        session.round()
    assert engine.states[:300] == engine.states[300:], "none was built anew"


def test_a_state_that_lags_far_behind_is_brought_up_by_the_engine_before_drafts_are_verified() -> None:
    bench, engine = bench_of()
    compiled = grammar(LONG)
    true = answer(compiled, 85)
    session = Session(bench, compiled)
    session.tokens += true[:70]
    assert session.round(true[70:74]).verified == 0
    assert engine.states[0].length >= 70
    assert session.round(true[71:75]).verified == 4
    assert session.output == true[:76]


def test_draft_tokens_after_tokens_that_the_grammar_does_not_allow_are_not_verified() -> None:
    """The log cannot hold such tokens; if it does, the engine reports it, and the scheduler goes on."""
    bench, _ = bench_of()
    session = Session(bench, grammar())
    session.tokens += [F]
    session.submit([A, B])
    plan = bench.begin()
    (chunk,) = plan.chunks
    assert chunk.draw is not None
    assert chunk.draw.draft_tokens == ()
    with pytest.raises(Broken, match="does not allow output token 0"):
        bench.engine.run(plan)


def test_sessions_without_a_grammar_have_no_state() -> None:
    bench = Bench()
    bench.submit(request(PROMPT))
    (chunk,) = bench.begin().chunks
    assert chunk.draw is not None
    assert chunk.draw.grammar is None


def test_where_masks_take_long_no_draft_token_is_verified() -> None:
    """A step waits for its masks, so each draft token of such a grammar would delay all sessions."""
    bench, engine = bench_of()
    session = Session(bench, grammar(LONG))
    true = answer(session.compiled, 9)
    session.round()
    (state,) = engine.states
    engine.slow_row_ns = 20_000_000
    assert session.round(true[1:3]).verified == 2
    assert session.round(true[4:6]).verified == 0
    assert session.round(true[5:7]).verified == 0
    engine.slow_row_ns = 0
    session.round()
    assert session.round(true[7:8]).verified == 1
    assert session.output == true
    assert state.length < len(true)


FORCED = GrammarSpec("regex", "(abcd|abce)ed{3}(a|b)")


def test_forced_tokens_are_verified_before_their_hint_has_come() -> None:
    compiled = grammar(FORCED)
    true = answer(compiled)
    session = Session(bench_of()[0], compiled)
    session.submit(credit=20, max_verified=8)
    results = session.bench.results()
    [confirmed] = results.values()
    assert [token for result in confirmed for token in result.tokens] == true
    assert sum(result.verified for result in confirmed) == sum(result.accepted for result in confirmed) == 7
    assert len(confirmed) == len(true) - 7


def test_a_session_without_speculation_verifies_no_forced_token() -> None:
    session = Session(bench_of()[0], grammar(FORCED))
    session.submit(credit=20)
    [confirmed] = session.bench.results().values()
    assert {result.verified for result in confirmed} == {0}


def test_a_hint_goes_before_forced_tokens() -> None:
    compiled = grammar(FORCED)
    true = answer(compiled)
    session = Session(bench_of()[0], compiled)
    result = session.round(true[:4], max_verified=8)
    assert (result.verified, result.accepted) == (4, 4)
    second = session.round([F], max_verified=8)
    assert (second.verified, second.accepted) == (1, 1), "in place of the one that is not allowed"
