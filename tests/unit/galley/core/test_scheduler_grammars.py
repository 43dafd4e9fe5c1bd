"""Sessions with a grammar: which draft tokens are verified, and which tokens their states have seen."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from galley.core.content import prefix_hash, token_bytes
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken, GalleyError
from galley.core.grammar.compiled import CompiledGrammar, GrammarState, compile_grammar
from galley.core.grammar.follower import GrammarFollower
from galley.core.grammar.spec import GrammarSpec
from galley.core.hints import Hint
from galley.core.scheduler.messages import Confirmed
from galley.core.step import Sampled, StepChunk, StepPlan
from galley.core.trees import CHAIN, ROOT, Parents, child_of, kept
from galley.engine.masking import confirmed_mask
from tests.fakes.draft_trees import random_tree
from tests.fakes.engine import StrictEngine
from tests.fakes.scheduler_world import MS, STEEP, Bench, request, result_of
from tests.fakes.states import states_of
from tests.fakes.truth import IDS, STOP_ID
from tests.fakes.vocabularies import allowed, of_bytes

A, B, C, D, E, F = range(6)
PROMPT = [F, F, F]
# A token for each of the letters a to g, and the end.
VOCABULARY = of_bytes(
    [bytes([ord("a") + i]) for i in range(IDS - 1)] + [b"<end>"], [STOP_ID], time.monotonic_ns
)
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
        self.drawn_rows: list[int] = []
        self.fails_at = -1
        self.row_ns = 0

    def draw(self, chunk: StepChunk, seen: Sequence[int]) -> Sampled | GalleyError:
        draw = chunk.draw
        assert draw is not None
        assert draw.grammar is not None
        self.states.append(draw.grammar)
        self.drawn_rows.append(chunk.want_logits)
        if len(draw.history) == self.fails_at:
            return Broken("no maximum")
        tokens: list[int] = []
        rows = confirmed_mask(draw.grammar, draw)
        node: int | None = ROOT
        while node is not None:
            tokens.append(chosen(allowed(rows[node + 1]), [*draw.history, *tokens]))
            node = child_of(draw.draft_tokens, draw.parents, node, tokens[-1])
        draw.grammar.row_ns = self.row_ns or draw.grammar.row_ns
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

    def answer(self, **given: object) -> list[Confirmed]:
        """Return all results of one request with credit."""
        self.submit(**{"credit": 20, "max_verified": 8, **given})  # type: ignore[arg-type]  # the test's own
        [results] = self.bench.results().values()
        return results

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


def test_a_grammar_makes_no_allowed_token_less_likely() -> None:
    compiled = grammar()
    true = answer(compiled)
    bench = Bench(max_rows=128, times=StepTimes.measured([(1, 10 * MS), (9, 58 * MS)]))
    bench.engine = MaskedEngine(kv_block_tokens=4)
    session = Session(bench, compiled)
    item = session.submit(credit=4)
    hint = Hint(len(PROMPT), prefix_hash(PROMPT), tuple(true[:5]), (0.99, 0.98, 0.97, 0.96, 0.95))
    bench.extend(item, hint=hint)
    assert bench.results()[item][0].verified == 4


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
    engine.row_ns = 10_000
    session.round()
    (state,) = engine.states
    engine.row_ns = 20_000_000
    assert session.round(true[1:3]).verified == 2
    assert session.round(true[4:6]).verified == 0
    assert session.round(true[5:7]).verified == 0
    engine.row_ns = 10_000
    session.round()
    assert session.round(true[7:8]).verified == 1
    assert session.output == true
    assert state.length < len(true)


FORCED = GrammarSpec("regex", "(abcd|abce)ed{3}(a|b)")


def tokens_of(results: Sequence[Confirmed]) -> list[int]:
    return [token for result in results for token in result.tokens]


def test_certain_tokens_are_confirmed_before_their_hint_has_come() -> None:
    compiled = grammar(FORCED)
    true = answer(compiled)
    results = Session(bench_of()[0], compiled).answer()
    assert tokens_of(results) == true
    assert sum(result.verified for result in results) == sum(result.accepted for result in results) == 7
    assert len(results) == len(true) - 7


def test_the_model_is_asked_for_no_certain_token() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(FORCED))
    results = session.answer()
    assert engine.drawn_rows == [1] * len(results)
    assert tokens_of(results) == answer(session.compiled)


def test_certain_tokens_have_states() -> None:
    session, end = Session(bench_of()[0], grammar(FORCED)), 0
    for result in session.answer(feature_layers=(1, 3)):
        session.take(result)
        assert result.states.position == end
        end = len(session.tokens) - 1
        assert result.states == states_of(session.tokens, result.states.position, end, (1, 3))


def test_where_logprobs_are_wanted_each_token_is_drawn() -> None:
    bench, engine = bench_of()
    session = Session(bench, grammar(FORCED))
    results = session.answer(logprobs=1)
    assert tokens_of(results) == answer(session.compiled)
    assert sum(engine.drawn_rows) == len(tokens_of(results))


def test_certain_tokens_take_the_place_of_a_hint_that_differs() -> None:
    compiled = grammar(FORCED)
    result = Session(bench_of()[0], compiled).round([A, C], max_verified=8)
    assert result.verified == result.accepted == 2, "as many as the request has room for"
    assert list(result.tokens) == answer(compiled)[:3]


@pytest.mark.parametrize("at", range(len(answer(grammar(FORCED)))))
def test_an_error_after_certain_tokens_comes_where_it_does_without_drafts(at: int) -> None:
    outcomes = []
    for max_verified in (0, 8):
        bench, engine = bench_of()
        engine.fails_at = len(PROMPT) + at
        session = Session(bench, grammar(FORCED))
        session.submit(credit=20, max_verified=max_verified)
        confirmed: list[int] = []
        error: object = None
        while isinstance(plan := bench.scheduler.plan(bench.now), StepPlan):
            for response in bench.finish(plan):
                if isinstance(response.outcome, Confirmed):
                    confirmed += response.outcome.tokens
                else:
                    error = str(response.outcome)
        outcomes.append((confirmed, error))
    plain, drafted = outcomes
    true = answer(grammar(FORCED))
    assert plain == (true[:at], "no maximum")
    # What is certain is not drawn, so nothing fails there.
    assert drafted == ((true, None) if at in {0, 1, 2, 4, 5, 6, 7} else plain)


def falling(count: int) -> tuple[float, ...]:
    return tuple(0.5 ** (i + 1) for i in range(count))


def test_nodes_that_the_grammar_forbids_take_no_row_nor_what_is_below_them() -> None:
    compiled = grammar(LONG)
    true = answer(compiled)
    bench, _ = bench_of()
    session = Session(bench, compiled)
    nodes = (F, true[0], F, true[1], (true[1] + 1) % F, A)
    parents = (ROOT, ROOT, 1, 1, 1, 0)
    session.submit(nodes, survival=falling(6), parents=parents, max_verified=20)
    plan = bench.begin()
    draw = plan.chunks[0].draw
    assert draw is not None
    allowed_nodes = compiled.start().allowed_nodes(nodes, parents)
    assert {1, 3} <= set(allowed_nodes) <= {1, 3, 4}
    assert draw.draft_tokens == tuple(nodes[node] for node in allowed_nodes)
    assert draw.parents == kept(parents, allowed_nodes)
    (response,) = bench.finish(plan)
    assert (result_of(response).tokens, result_of(response).accepted) == (tuple(true[:3]), 2)


def test_a_tree_follows_the_certain_tokens() -> None:
    compiled = grammar(FORCED)
    bench, engine = bench_of()
    session = Session(bench, compiled)
    # a, b and c are certain; then comes d or e.
    tokens, parents = (A, B, F, C, D, E), (ROOT, 0, 0, 1, 3, 3)
    session.submit(tokens, survival=falling(6), parents=parents, max_verified=8)
    plan = bench.begin()
    chunk = plan.chunks[0]
    assert chunk.draw is not None
    assert list(chunk.draw.history) == [*PROMPT, A, B, C]
    assert (chunk.draw.draft_tokens, chunk.draw.parents) == ((D, E), (ROOT, ROOT))
    assert chunk.root == len(PROMPT) + 3
    (response,) = bench.finish(plan)
    result = result_of(response)
    assert list(result.tokens) == answer(compiled)[: len(result.tokens)]
    assert (result.accepted, result.verified, engine.drawn_rows) == (4, 5, [3])


@pytest.mark.parametrize("spec", [LONG, FORCED])
def test_random_trees_change_no_token_of_a_constrained_answer(spec: GrammarSpec) -> None:
    compiled, rng = grammar(spec), random.Random(5)
    true = answer(compiled)
    for _ in range(10):
        session = Session(bench_of()[0], compiled)
        while len(session.output) < len(true):
            tree = random_tree(rng, true[len(session.output) :], 12, vocab=IDS - 1)
            given = {"survival": tree.survival, "parents": tree.parents}
            session.round(tree.draft_tokens, max_verified=rng.choice([0, 4, 16]), **given)
        assert session.output[: len(true)] == true


def test_certain_tokens_are_fed_where_no_draft_token_pays() -> None:
    """Each takes a row in any case: now, or in a step of its own."""
    compiled = grammar(FORCED)
    bench, engine = Bench(max_rows=128, times=STEEP), MaskedEngine(kv_block_tokens=4)
    bench.engine = engine
    results = Session(bench, compiled).answer()
    assert tokens_of(results) == answer(compiled)
    assert sum(result.verified for result in results) == 7


def test_certain_tokens_of_many_sessions_keep_within_the_rows_of_a_step() -> None:
    bench = Bench(max_rows=8)
    bench.engine = MaskedEngine(kv_block_tokens=4)
    sessions = [Session(bench, grammar(FORCED), f"s{i}") for i in range(4)]
    for session in sessions:
        session.submit(credit=20, max_verified=8)
    rows: list[int] = []
    got: dict[int, list[int]] = {}
    while isinstance(plan := bench.scheduler.plan(bench.now), StepPlan):
        if all(chunk.draw is not None and chunk.start for chunk in plan.chunks):
            rows.append(plan.rows)
        for response in bench.finish(plan):
            got.setdefault(response.request_id, []).extend(result_of(response).tokens)
    assert max(rows) <= 8
    assert list(got.values()) == [answer(session.compiled) for session in sessions]


def test_a_session_without_speculation_verifies_no_certain_token() -> None:
    results = Session(bench_of()[0], grammar(FORCED)).answer(max_verified=0)
    assert {result.verified for result in results} == {0}


def test_a_hint_goes_before_certain_tokens() -> None:
    compiled = grammar(FORCED)
    true = answer(compiled)
    session = Session(bench_of()[0], compiled)
    result = session.round(true[:4], max_verified=8)
    assert (result.verified, result.accepted) == (4, 4)
    second = session.round([F], max_verified=8)
    assert (second.verified, second.accepted) == (1, 1), "in place of the one that is not allowed"


class OddState(GrammarState):
    """It counts the rows of its masks, and does what states of llguidance do not, or seldom."""

    rows = 0
    is_unready = False
    other_token_at: int | None = None

    def masks(self, draft_tokens: Sequence[int], parents: Parents = CHAIN) -> NDArray[np.uint32]:
        if self.is_unready:
            raise Broken("unready")
        rows = super().masks(draft_tokens, parents)
        self.rows += len(rows)
        if self.other_token_at is not None:
            rows[self.other_token_at] |= 1 << A
        return rows


def odd_follower() -> tuple[GrammarFollower, OddState]:
    compiled = grammar(FORCED)
    follower = GrammarFollower(compiled, PROMPT, len(PROMPT))
    follower.state = state = OddState(compiled)
    return follower, state


def test_nodes_that_the_grammar_forbids_fall_with_those_below_them() -> None:
    follower, state = odd_follower()
    assert follower.allowed_nodes(()) == ()
    assert list(follower.allowed_nodes((A, B, A))) == [0, 1]
    tokens, parents = (A, B, C, D, B), (-1, -1, 1, 0, 0)
    assert list(follower.allowed_nodes(tokens, parents)) == [0, 4]
    state.row_ns = 5_000_000
    assert follower.allowed_nodes(tokens, parents) == (), "its rows take too long"


def test_a_token_is_certain_only_if_its_mask_allows_no_other() -> None:
    follower, state = odd_follower()
    state.other_token_at = 2
    assert follower.certain(8) == (A, B)


def test_no_more_masks_are_computed_than_tokens_are_certain_and_of_use() -> None:
    follower, state = odd_follower()
    assert [follower.certain(2), follower.certain(1), follower.certain(2)] == [(A, B), (A,), (A, B)]
    assert state.rows == 2
    assert [follower.certain(8), follower.certain(9)] == [(A, B, C)] * 2
    assert state.rows == 2 + 3


def test_a_slow_grammar_has_fewer_certain_tokens_and_one_that_is_not_ready_has_none() -> None:
    follower, state = odd_follower()
    state.row_ns = 500_000
    assert follower.certain(8) == (A, B)
    follower, state = odd_follower()
    state.row_ns = 1_500_000
    assert follower.certain(8) == ()
    assert state.rows == 0
    follower, state = odd_follower()
    state.is_unready = True
    assert follower.certain(8) == ()
