"""What is prepared for refused guesses: ready when it comes to that, bounded, and in nobody's way."""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch

from services.core.step import Draw, Sampled
from services.draft.drafter import Drafter, Proposed
from services.draft.items import DraftInfo, read_item
from services.draft.loading import load_drafter
from services.draft.prepared import MOST_OUTCOMES, MOST_TOKENS, PreparedCounts
from services.draft.settings import DraftSettings
from services.draft.strategies.hybrid import HybridStrategy
from services.draft.strategies.lookups import Lookups
from services.draft.strategies.model import ModelStrategy
from services.draft.strategies.steps import ModelSteps
from services.engine.model import Rows
from services.engine.sampling import draw_all
from tests.draft.steps import MODEL, Gated, Stream, item, serving
from tests.target.items import GREEDY
from tests.target.tiny import VOCAB, greedy, load_tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from services.common.pb.galley.v1 import galley_pb2 as pb
    from services.core.params import SamplingParams
    from services.draft.strategies.base import Doubt, DraftJob, Guess, Preparing
    from services.engine.model import CausalModel

INFO = DraftInfo("", "", (MODEL,), MODEL, 32, VOCAB)


class Counted:
    """A strategy that can prepare; `batches` are the sizes of its steps."""

    def __init__(self, inner: Preparing) -> None:
        self._inner = inner
        self.batches: list[int] = []
        self.fails = False

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        return self._inner.begin(jobs)

    def advance(self, guesses: Sequence[Guess]) -> None:
        self.batches.append(len(guesses))
        if self.fails:
            raise ValueError("sick")
        self._inner.advance(guesses)

    def doubts(self, job: DraftJob) -> list[Doubt]:
        return self._inner.doubts(job)

    def branch(self, job: DraftJob, doubt: Doubt, k: int) -> Guess | None:
        return self._inner.branch(job, doubt, k)

    def adopt(self, job: DraftJob, branch: Guess) -> None:
        self._inner.adopt(job, branch)


class GatedPreparing(Gated):
    """One whose steps wait, what it prepares too."""

    def __init__(self, inner: Preparing) -> None:
        super().__init__(inner)
        self.doubts, self.branch, self.adopt = inner.doubts, inner.branch, inner.adopt


class Draft:
    """A drafter in the hands of one caller; `strategy` is the one that it has."""

    def __init__(self, drafter: Drafter, strategy: Counted) -> None:
        self.drafter = drafter
        self.strategy = strategy
        self._numbers = count()

    def ask(self, asked: pb.ProposeItem) -> tuple[list[int], int]:
        """What is proposed, and after how many steps."""
        self.strategy.batches.clear()
        return proposed(self.drafter, next(self._numbers), asked), len(self.strategy.batches)

    def rest(self) -> list[int]:
        """Prepare all there is; the sizes of the steps."""
        self.strategy.batches.clear()
        while self.drafter.prepare():
            pass
        assert not self.drafter.can_prepare
        return list(self.strategy.batches)


def proposed(drafter: Drafter, number: int, asked: pb.ProposeItem) -> list[int]:
    """The answer to the item of this number."""
    stepped = drafter.open({number: read_item(asked, INFO)}, {})
    while number not in stepped.answers:
        stepped = drafter.advance()
    outcome = stepped.answers[number]
    assert isinstance(outcome, Proposed), outcome
    return list(outcome.draft_tokens)


def draft_of(strategy: Preparing, prepare: int, max_sessions: int = 8) -> Draft:
    counted = Counted(strategy)
    drafter = Drafter(
        {MODEL: counted}, max_sessions=max_sessions, max_tokens=4096, max_batch=8, prepare=prepare
    )
    return Draft(drafter, counted)


@pytest.fixture(scope="module")
def model(tiny: Path) -> CausalModel:
    return load_tiny_model(tiny, kv_blocks=512)


def strategy_of(kind: str, model: CausalModel) -> Preparing:
    steps = ModelSteps(model)
    return ModelStrategy(steps) if kind == "model" else HybridStrategy(Lookups(), steps)


def runner_up(model: CausalModel, tokens: list[int], params: SamplingParams) -> tuple[int, float]:
    """What the model says if not the first, and its chance."""
    (logits,) = model.forward([Rows(model.new_cache(), tokens, 1)])
    draw = [Draw(params, tokens, 1, frozenset(), 0)]
    first = drawn(logits, draw)
    without = logits.clone()
    without[0, first] = -torch.inf
    second = drawn(without, draw)
    return second, float(torch.softmax(logits, -1)[0, second])


def drawn(logits: torch.Tensor, draw: list[Draw]) -> int:
    (sampled,) = draw_all(logits, draw)
    assert isinstance(sampled, Sampled)
    return sampled.tokens[0]


def doubtful(model: CausalModel, sampling: pb.SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Of some prompts the one after which the runner-up is likeliest, and that."""
    chance = random.Random(3)
    params = read_item(item([2], 1, "s", sampling=sampling), INFO).slice.sampling
    prompts = [chance.sample(range(2, VOCAB - 1), 6) for _ in range(20)]
    seconds = [runner_up(model, prompt, params) for prompt in prompts]
    (second, _), prompt = max(zip(seconds, prompts, strict=True), key=lambda one: one[0][1])
    return prompt, second


WARM = item([2], 1, "s").slice.sampling
WARM.temperature, WARM.seed = 0.7, 11


@pytest.mark.parametrize("kind", ["model", "hybrid"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_refused_guess_is_answered_without_a_step(
    model: CausalModel, kind: str, sampling: pb.SamplingParams
) -> None:
    prompt, second = doubtful(model, sampling)
    ready, fresh = (draft_of(strategy_of(kind, model), prepare) for prepare in (4, 0))
    for draft in (ready, fresh):
        draft.ask(item(prompt, 1, "a", sampling=sampling))
        draft.rest()
    came, steps = ready.ask(item([*prompt, second], MOST_TOKENS, "a", sampling=sampling))
    expected, needed = fresh.ask(item([*prompt, second], MOST_TOKENS, "a", sampling=sampling))
    assert came == expected
    assert (steps, needed) == (0, len(expected))
    assert ready.drafter.prepared == PreparedCounts(len(came), len(came), 0)
    # And it goes on from there.
    further = [*prompt, second, *came[:2]]
    ours = ready.ask(item(further, 6, "a", sampling=sampling))
    assert ours == fresh.ask(item(further, 6, "a", sampling=sampling))


def test_what_is_guessed_goes_on_as_if_nothing_were_prepared(model: CausalModel) -> None:
    prompt, _ = doubtful(model)
    ready, plain = (draft_of(strategy_of("model", model), prepare) for prepare in (4, 0))
    tokens = list(prompt)
    for ahead in (False, True, False):
        asked = item(tokens, 3, "a", ahead=3 if ahead else 0)
        ours, theirs = ready.ask(asked), plain.ask(asked)
        assert ours == theirs
        ready.rest()
        tokens += ours[0]
    counts = ready.drafter.prepared
    assert counts.used == 0
    assert 0 < counts.wasted <= counts.prepared


@pytest.mark.parametrize("seed", range(3))
def test_no_token_depends_on_what_was_prepared(tiny: Path, model: CausalModel, seed: int) -> None:
    """Sessions that go on, ahead, and to the runner-up of a guess; against sessions that have no past.

    The pool of keys and values is as small as for these settings, so that some sessions must go.
    """
    chance = random.Random(seed)
    settings = DraftSettings(
        model=str(tiny), dtype="float32", prepare=3, max_sessions=3, max_kv_tokens=180, max_draft_tokens=8
    )
    drafter = load_drafter(settings).drafter
    params = read_item(item([2], 1, "s"), INFO).slice.sampling
    sessions = {name: [chance.randrange(2, VOCAB - 1) for _ in range(3)] for name in "abc"}
    for turn in range(60):
        name = chance.choice("abc")
        tokens = sessions[name]
        ahead = chance.randrange(min(4, len(tokens)))
        asked = item(tokens, chance.randint(1, 6), name, ahead=ahead, prompt_len=1)
        came = proposed(drafter, turn, asked)
        if turn % 6 == 0:
            asked.ahead = 0
            assert draft_of(strategy_of("model", model), prepare=0).ask(asked)[0] == came
        for _ in range(chance.randrange(12)):
            drafter.prepare()
        confirmed = tokens + came[: chance.randint(0, len(came))]
        if chance.random() < 0.7:
            confirmed = [*confirmed, runner_up(model, confirmed, params)[0]]
        sessions[name] = confirmed if len(confirmed) < 100 else confirmed[:3]
    counts = drafter.prepared
    assert 0 < counts.used < counts.prepared


def test_it_is_bounded_and_goes_with_its_sessions(model: CausalModel) -> None:
    draft, (prompt, _) = draft_of(strategy_of("model", model), prepare=2, max_sessions=3), doubtful(model)
    for name in "abc":
        draft.ask(item(prompt, 8, name))
    batches = draft.rest()
    assert batches[0] == max(batches) == 2
    prepared = draft.drafter.prepared.prepared
    assert MOST_TOKENS < prepared <= 3 * MOST_OUTCOMES * MOST_TOKENS
    assert draft.rest() == []
    for name in "def":
        draft.ask(item([5, 9, 2], 2, name))
    assert draft.drafter.prepared == PreparedCounts(prepared, 0, prepared)


async def test_an_item_that_comes_waits_for_the_step_under_way_alone(tiny: Path, model: CausalModel) -> None:
    prompt, second = doubtful(model)
    gated = GatedPreparing(strategy_of("model", model))
    async with serving(gated, prepare=4) as draft:
        stream = Stream(draft.stub)
        try:
            await stream.send(item(prompt, 1, "a"))
            await gated.begun()
            await gated.pass_on()
            await stream.next()
            # What is prepared for a is under way, and waits.
            await stream.send(item([3, 2, 8, 7], 2, "b"))
            await gated.pass_on()
            await gated.pass_on()
            assert gated.steps == ["a", "a", "b", "b"]
            gated.open()
            served = await stream.next()
            assert list(served.result.draft_tokens) == greedy(tiny, [3, 2, 8, 7], 2)
            await stream.send(item([*prompt, second], MOST_TOKENS, "a"))
            refused = await stream.next()
            assert list(refused.result.draft_tokens) == greedy(tiny, [*prompt, second], MOST_TOKENS)
        finally:
            gated.open()


def test_off_is_off(model: CausalModel) -> None:
    draft = draft_of(strategy_of("model", model), prepare=0)
    draft.ask(item(doubtful(model)[0], 4, "a"))
    assert not draft.drafter.can_prepare
    assert draft.rest() == []
    assert draft.drafter.prepared == PreparedCounts(0, 0, 0)


def test_preparing_that_fails_harms_nobody(model: CausalModel) -> None:
    prompt, second = doubtful(model)
    draft = draft_of(strategy_of("model", model), prepare=4)
    draft.ask(item(prompt, 1, "a"))
    draft.strategy.fails = True
    assert draft.rest() == [1]
    draft.strategy.fails = False
    came, steps = draft.ask(item([*prompt, second], 4, "a"))
    assert steps == 4
    assert came == draft_of(strategy_of("model", model), prepare=0).ask(item([*prompt, second], 4, "a"))[0]
