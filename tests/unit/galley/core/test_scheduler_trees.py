"""Trees in the scheduler: acceptance by equality, compaction, hints in time and late, prices of nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from galley.core.content import prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.errors import Unavailable
from galley.core.hints import Hint, HintTail
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.hint_statistics import AcceptanceEstimate, leveled
from galley.core.scheduler.messages import Confirmed
from galley.core.step import StepPlan, TokenMove
from galley.core.trees import CHAIN, ROOT
from tests.fakes.draft_trees import knowing_tree, sampled_id
from tests.fakes.engine import StrictEngine
from tests.fakes.scheduler_world import FLAT, MS, Bench, request, result_of, true_answer
from tests.fakes.truth import IDS

PROMPT = [3, 1, 4, 1, 5]
ANSWER = true_answer(PROMPT, 60)


def wrong(token: int) -> int:
    return (token + 1) % IDS


def tree_after(true: Sequence[int]) -> HintTail:
    """Return a tree whose likeliest path is wrong, and whose other path is right for three tokens."""
    tokens = (wrong(true[0]), true[0], 0, true[1], true[2], wrong(true[2]))
    survival = (0.5, 0.45, 0.44, 0.43, 0.4, 0.02)
    return HintTail(tokens, survival, parents=(ROOT, ROOT, 0, 1, 3, 3))


def submitted(bench: Bench, tree: HintTail, **given: int) -> int:
    message = request(PROMPT, draft_tokens=tree.draft_tokens, survival=tree.survival, parents=tree.parents)
    return bench.submit(replace(message, **given))  # type: ignore[arg-type]  # the test's own


def only_result(bench: Bench) -> Confirmed:
    (answer,) = bench.step()
    return result_of(answer)


def test_the_path_that_the_target_takes_is_accepted() -> None:
    bench = Bench()
    submitted(bench, tree_after(ANSWER))
    result = only_result(bench)
    assert (result.tokens, result.accepted, result.verified) == (tuple(ANSWER[:4]), 3, 6)


def test_the_kv_of_an_accepted_path_is_moved_where_a_chain_has_it() -> None:
    bench = Bench()
    submitted(bench, tree_after(ANSWER), credit=20)
    plan = bench.begin()
    assert plan.moves == ()
    bench.finish(plan)
    # Nodes 1, 3 and 4 at positions 5, 6 and 7 lay in slots 6, 8 and 9; blocks have 4 tokens.
    blocks = plan.chunks[0].blocks
    then = bench.begin()
    assert then.moves == (
        TokenMove(blocks[1], 2, blocks[1], 1),
        TokenMove(blocks[2], 0, blocks[1], 2),
        TokenMove(blocks[2], 1, blocks[1], 3),
    )
    assert then.chunks[0].start == 8
    assert [result_of(answer).tokens for answer in bench.finish(then)] == [tuple(ANSWER[4:5])]
    assert bench.begin().moves == ()


def test_a_path_in_place_is_not_moved() -> None:
    bench = Bench()
    tree = HintTail((*ANSWER[:2], wrong(ANSWER[0])), (0.9, 0.8, 0.1), parents=(ROOT, 0, ROOT))
    submitted(bench, tree, credit=20)
    assert only_result(bench).accepted == 2
    assert bench.begin().moves == ()


def test_blocks_of_a_session_that_has_ended_are_found_with_their_moves() -> None:
    bench = Bench()
    item = submitted(bench, tree_after(ANSWER), credit=20)
    bench.step()
    bench.scheduler.cancel(item)
    assert bench.scheduler.plan(bench.now) is None
    bench.submit(request([*PROMPT, *ANSWER[:4]], session="other"))
    plan = bench.begin()
    assert plan.moves
    assert plan.chunks[0].start == 8, "the first two blocks are shared"
    (answer,) = bench.finish(plan)  # the engine compares what is in the blocks with the history
    assert result_of(answer).tokens == tuple(ANSWER[4:5])


def test_what_a_failed_step_was_to_move_is_computed_again() -> None:
    bench = Bench()
    submitted(bench, tree_after(ANSWER), credit=20)
    bench.step()
    bench.submit(request([*PROMPT, *ANSWER[:5]], session="other"))
    plan = bench.begin()
    assert plan.moves
    assert len(plan.chunks) == 2
    bench.scheduler.fail(plan, Unavailable("the step failed"))
    bench.check()
    bench.scheduler.take_responses()
    # The block before the moved ones is left; the second session shares what the first has computed again.
    for session, start in (("s", 4), ("other", 8)):
        bench.submit(request([*PROMPT, *ANSWER[:5]], session=session))
        plan = bench.begin()
        assert (plan.moves, plan.chunks[0].start) == ((), start)
        assert [result_of(answer).tokens for answer in bench.finish(plan)] == [tuple(ANSWER[5:6])]


def test_an_active_session_that_took_no_part_in_a_failed_step_goes_on() -> None:
    # One row of a prompt a step, so that a session waits while the step of another fails.
    bench = Bench(max_rows=2)
    submitted(bench, tree_after(ANSWER), credit=20, max_verified=2)
    item = bench.submit(request([*PROMPT, *ANSWER[:8]], session="long", arrival_ns=5))
    late = bench.submit(request([*PROMPT, *ANSWER[:9]], session="late", arrival_ns=9))
    for _ in range(3):
        bench.step()
    plan = bench.begin()
    bench.scheduler.fail(plan, Unavailable("the step failed"))
    bench.scheduler.take_responses()
    results = bench.results()
    assert {*results} <= {item, late}
    for confirmed in results.values():
        assert list(confirmed[0].tokens) == ANSWER[confirmed[0].position - 5 :][:1]


def test_an_engine_without_trees_verifies_the_main_path() -> None:
    bench = Bench()
    bench.scheduler.takes_trees = False
    tree = tree_after(ANSWER)
    item = submitted(bench, tree, credit=20)
    result = only_result(bench)
    assert (result.tokens, result.verified) == (tuple(ANSWER[:1]), 2)
    right = HintTail((ANSWER[1], 0, ANSWER[2]), (0.9, 0.5, 0.4), parents=(ROOT, ROOT, 0))
    digest = prefix_hash([*PROMPT, ANSWER[0]])
    bench.extend(item, hint=Hint(6, digest, right.draft_tokens, right.survival, parents=right.parents))
    assert bench.begin().chunks[0].parents == CHAIN


def test_of_a_tree_without_survival_the_main_path_is_verified() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, draft_tokens=(ANSWER[0], 0, ANSWER[1]), parents=(ROOT, ROOT, 0)))
    result = only_result(bench)
    assert (result.tokens, result.verified) == (tuple(ANSWER[:3]), 2)


@pytest.mark.parametrize(("bounds", "verified"), [({"max_verified": 4}, 4), ({"max_position": 8}, 2)])
def test_the_bounds_of_a_step_count_nodes(bounds: dict[str, int], verified: int) -> None:
    bench = Bench()
    submitted(bench, tree_after(ANSWER), **bounds)
    result = only_result(bench)
    assert result.verified == verified
    assert list(result.tokens) == ANSWER[: len(result.tokens)]


def test_a_hint_goes_on_below_the_path_that_was_confirmed_meanwhile() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20))
    bench.step()
    bench.step()
    tree = tree_after(ANSWER)
    hint = Hint(5, prefix_hash(PROMPT), tree.draft_tokens, tree.survival, parents=tree.parents)
    bench.extend(item, hint=hint)
    plan = bench.begin()
    assert plan.chunks[0].draw is not None
    assert plan.chunks[0].draw.draft_tokens == (ANSWER[2], wrong(ANSWER[2]))
    assert plan.chunks[0].parents == (ROOT, ROOT)
    (answer,) = bench.finish(plan)
    assert result_of(answer).tokens == tuple(ANSWER[2:4])


def test_after_a_token_that_no_candidate_was_only_the_main_path_may_recover() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20))
    bench.step()
    nodes = (wrong(ANSWER[0]), ANSWER[1], (ANSWER[0] + 2) % IDS, wrong(ANSWER[1]), ANSWER[2])
    parents = (ROOT, 0, ROOT, 0, 1)
    hint = Hint(5, prefix_hash(PROMPT), nodes, (0.9, 0.8, 0.7, 0.6, 0.5), parents=parents)
    bench.extend(item, hint=hint)
    plan = bench.begin()
    assert plan.chunks[0].draw is not None
    assert plan.chunks[0].draw.draft_tokens == (ANSWER[1], ANSWER[2])
    assert plan.chunks[0].parents == CHAIN
    (answer,) = bench.finish(plan)
    assert result_of(answer).accepted == 2


def test_only_nodes_that_pay_are_verified_the_likeliest_first() -> None:
    # A row costs a tenth of a step: what is accepted less often than that does not pay.
    times = StepTimes.measured([(rows, (9 + rows) * MS) for rows in range(1, 64)])
    bench = Bench(times=times)
    tokens = (ANSWER[0], ANSWER[1], wrong(ANSWER[0]), wrong(ANSWER[1]), ANSWER[2])
    tree = HintTail(tokens, (0.7, 0.4, 0.25, 0.02, 0.01), parents=(ROOT, 0, ROOT, 0, 1))
    submitted(bench, tree)
    plan = bench.begin()
    assert plan.chunks[0].draw is not None
    assert plan.chunks[0].draw.draft_tokens == tokens[:3]
    assert plan.chunks[0].parents == (ROOT, 0, ROOT)


def test_the_first_nodes_are_verified_whatever_their_sides_are_worth() -> None:
    # The gateway counts the first nodes as verified. It learns itself which sides are worth a row.
    times = StepTimes.measured([(rows, (9 + rows) * MS) for rows in range(1, 64)])
    bench, sizes = Bench(times=times), set[int]()
    for count in range(40):
        true = ANSWER[count:]
        tokens = (true[0], wrong(true[0]), true[1], wrong(true[1]), true[2])
        tree = HintTail(tokens, (0.6, 0.3, 0.3, 0.2, 0.15), parents=(ROOT, ROOT, 0, 0, 2))
        message = request([*PROMPT, *ANSWER[:count]], draft_tokens=tokens, survival=tree.survival)
        bench.submit(replace(message, parents=tree.parents))
        plan = bench.begin()
        draw = plan.chunks[0].draw
        assert draw is not None
        first = tree.first(len(draw.draft_tokens))
        assert (draw.draft_tokens, draw.parents) == (first.draft_tokens, first.parents)
        sizes.add(len(draw.draft_tokens))
        bench.finish(plan)
    assert len(sizes) > 1, "what the sides were worth has changed how many pay"


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ([], []),
        ([0.5, 0.4, 0.4], [0.5, 0.4, 0.4]),
        ([0.6, 0.02, 0.36], [0.6, 0.19, 0.19]),
        ([0.1, 0.2, 0.3, 0.0], [0.2, 0.2, 0.2, 0.0]),
    ],
)
def test_a_likelier_node_shares_its_chance_with_those_before_it(
    chances: list[float], expected: list[float]
) -> None:
    assert leveled(chances) == pytest.approx(expected)


def test_sides_are_judged_by_how_often_they_were_right() -> None:
    def after(right_share: float) -> list[float]:
        estimate, rng = AcceptanceEstimate(), random.Random(3)
        for _ in range(300):
            right = rng.random() < right_share
            estimate.record_token(right=not right, predicted=0.7)
            estimate.record_sides(right=right, predicted=0.2)
        return estimate.calibrated_tree((ROOT, ROOT, 0, ROOT), (0.7, 0.15, 0.1, 0.05))

    seldom, often, as_predicted = after(0.02), after(0.4), after(0.2)
    assert seldom[1] < 0.05
    assert often[1] == pytest.approx(0.3, abs=0.1)
    assert as_predicted[1] == pytest.approx(0.15, abs=0.05)
    for chances in (seldom, often, as_predicted):
        assert chances[0] + chances[1] + chances[3] <= 1.0 + 1e-9, "siblings exclude each other"
        assert chances[2] <= chances[0]


class SampledEngine(StrictEngine):
    """It draws with noise of seed and position, as the real one does."""

    def __init__(self, temperature: float) -> None:
        super().__init__(kv_block_tokens=4)
        self._temperature = temperature

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return sampled_id(history, seed, self._temperature)


class Stream:
    """A session whose hints are trees; some come late, for a position that has passed."""

    def __init__(self, bench: Bench, name: str, seed: int, temperature: float, width: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.bench, self.temperature, self.width = bench, temperature, width
        self.tokens = [2, *(self.rng.randrange(IDS) for _ in range(self.rng.randint(1, 12)))]
        self.sampling = SamplingParams(temperature, seed=seed)
        self.plain = list(self.tokens)
        for _ in range(24):
            self.plain.append(sampled_id(self.plain, seed, temperature))
        self.accepted = 0
        tree = self.tree(len(self.tokens))
        self.item = bench.submit(
            request(
                self.tokens,
                session=name,
                prompt_len=len(self.tokens),
                max_position=len(self.plain),
                sampling=self.sampling,
                draft_tokens=tree.draft_tokens,
                survival=tree.survival,
                parents=tree.parents,
                credit=100,
            )
        )

    def tree(self, position: int) -> HintTail:
        seed, nodes = self.sampling.seed, self.rng.randint(4, 16)
        return knowing_tree(self.tokens[:position], seed, self.temperature, nodes=nodes, width=self.width)

    def hint(self, late: int) -> None:
        position = max(1, len(self.tokens) - late)
        tree, digest = self.tree(position), prefix_hash(self.tokens[:position])
        hint = Hint(position, digest, tree.draft_tokens, tree.survival, parents=tree.parents)
        self.bench.extend(self.item, hint=hint)


def played(seed: int, temperature: float, width: int, *, blocks: int = 64) -> list[Stream]:
    rng, bench = random.Random(seed), Bench(blocks=blocks, times=FLAT)
    bench.engine = SampledEngine(temperature)
    streams = [Stream(bench, f"s{i}", seed + i, temperature, width) for i in range(3)]
    of_item = {stream.item: stream for stream in streams}
    while isinstance(plan := bench.scheduler.plan(bench.now), StepPlan):
        for answer in bench.finish(plan):
            stream, result = of_item[answer.request_id], result_of(answer)
            stream.tokens += result.tokens
            stream.accepted += result.accepted
        for stream in streams:
            if rng.random() < 0.8:
                stream.hint(rng.choice([0, 0, 1, 3]))
    return streams


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_tokens_of_trees_are_those_of_plain_decoding(temperature: float, width: int) -> None:
    for seed in range(6):
        for stream in played(seed, temperature, width):
            assert stream.tokens == stream.plain


def test_trees_are_accepted_more_often_than_chains() -> None:
    accepted = {
        width: sum(stream.accepted for seed in range(8) for stream in played(seed, 0.0, width))
        for width in (1, 3)
    }
    assert accepted[3] > 1.1 * accepted[1]
