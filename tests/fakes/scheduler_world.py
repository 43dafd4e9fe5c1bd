"""A scheduler, an engine with known tokens and gateways with random requests, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from galley.core.content import Miss, prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError, Overloaded, Unavailable
from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES
from galley.core.hints import Hint, HintTail
from galley.core.kv.table import KvTable
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Extend, Response, Superseded, VerifyRequest
from galley.core.scheduler.scheduler import Linger, Scheduler
from galley.core.step import StepOutcome, StepPlan
from tests.fakes.draft_trees import random_tree
from tests.fakes.engine import DividingEngine, StrictEngine
from tests.fakes.kv_check import check_table
from tests.fakes.states import SIZE, states_of
from tests.fakes.truth import IDS, true_id, true_output

MS = 1_000_000
FLAT = StepTimes.measured([(1, 10 * MS), (512, 10 * MS + 511)])
STEEP = StepTimes.measured([(1, 10 * MS), (2, 20 * MS)])
RISING = StepTimes.measured([(1, 10 * MS), (64, 11 * MS)])


def true_answer(prompt: Sequence[int], count: int) -> list[int]:
    return true_output(prompt, count, next_token=true_id)


class Runner(Protocol):
    """What computes the steps of a scheduler."""

    def run(self, plan: StepPlan) -> Sequence[StepOutcome]: ...


class Bench:
    def __init__(
        self,
        *,
        blocks: int = 64,
        block_tokens: int = 4,
        max_sessions: int = 16,
        times: StepTimes = FLAT,
        max_rows: int = 64,
        max_waiting: int = 64,
        max_linger_ns: int = 0,
        max_itl_ns: int = 0,
        divides: random.Random | None = None,
    ) -> None:
        self.table = KvTable(blocks, block_tokens, max_sessions)
        self.engine: Runner = (
            StrictEngine(kv_block_tokens=block_tokens)
            if divides is None
            else DividingEngine(divides, kv_block_tokens=block_tokens)
        )
        self.scheduler = Scheduler(
            self.table,
            times,
            max_rows=max_rows,
            max_waiting=max_waiting,
            max_linger_ns=max_linger_ns,
            max_itl_ns=max_itl_ns,
            divides_prompts=divides is not None,
        )
        self.scheduler.takes_trees = divides is None
        self.scheduler.feature_size = SIZE if divides is None else 0
        self.times = times
        self.now = 0

    def check(self) -> None:
        """Raise AssertionError if what is kept of sessions and blocks does not agree."""
        check_table(self.table)

    def submit(self, request: VerifyRequest) -> int:
        return self.scheduler.submit(request, self.now)

    def extend(self, item: int, **reported: object) -> None:
        self.scheduler.extend(item, Extend(**reported), self.now)  # type: ignore[arg-type]  # the test's own

    def begin(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        assert isinstance(plan, StepPlan), plan
        return plan

    def finish(self, plan: StepPlan) -> list[Response]:
        return self.finish_as(plan, b"")

    def finish_as(self, plan: StepPlan, batch_span: bytes) -> list[Response]:
        self.now += self.times(plan.rows)
        self.scheduler.conclude(plan, self.engine.run(plan), self.now, batch_span)
        self.check()
        return self.scheduler.take_responses()

    def step(self) -> list[Response]:
        return self.finish(self.begin())

    def results(self) -> dict[int, list[Confirmed]]:
        got: dict[int, list[Confirmed]] = {}
        while isinstance(plan := self.scheduler.plan(self.now), StepPlan):
            for answer in self.finish(plan):
                got.setdefault(answer.request_id, []).append(result_of(answer))
        assert plan is None
        return got


def result_of(answer: Response) -> Confirmed:
    assert isinstance(answer.outcome, Confirmed), answer
    return answer.outcome


def request(
    tokens: Sequence[int], *, start: int = 0, session: str = "s", salt: bytes = b"", **given: object
) -> VerifyRequest:
    made = VerifyRequest(
        key=(salt, session),
        start=start,
        tokens=list(tokens[start:]),
        prefix_hash=prefix_hash(tokens[:start]),
        prompt_len=1,
        max_position=1000,
        sampling=SamplingParams(temperature=0.0),
    )
    return replace(made, **given)  # type: ignore[arg-type]  # the test's own


class Gateway:
    def __init__(
        self,
        bench: Bench,
        name: str,
        prompt: list[int],
        count: int,
        arrival_ns: int,
        layers: tuple[int, ...] = (),
    ) -> None:
        self.bench = bench
        self.layers = layers
        self.name = name
        self.prompt = prompt
        self.end = len(prompt) + count
        self.arrival_ns = arrival_ns
        self.tokens = list(prompt)
        self.true = [*prompt, *true_answer(prompt, count + 20)]
        self.item: int | None = None
        self.held = 0
        self.limit = 0
        self.refused = 0
        self.stale: list[Hint] = []
        self.states = NO_STATES
        self.is_first = True

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.end

    def submit(self, rng: random.Random) -> None:
        credit = rng.choice([0, 0, 1, 3, 10])
        start = rng.randint(0, min(self.held, len(self.tokens) - 1))
        drafts = self.draft(len(self.tokens), rng)
        message = request(
            self.tokens,
            start=start,
            session=self.name,
            prompt_len=len(self.prompt),
            max_position=self.end,
            draft_tokens=drafts.draft_tokens,
            survival=drafts.survival,
            parents=drafts.parents,
            credit=credit,
            hint_due=rng.random() < 0.3,
            arrival_ns=self.arrival_ns,
            feature_layers=self.layers,
        )
        self.is_first = True
        try:
            self.item = self.bench.submit(message)
        except Overloaded:
            self.item = None
        self.limit = message.limit

    def draft(self, position: int, rng: random.Random) -> HintTail:
        true = self.true[position : position + rng.choice([0, 1, 2, 4, 8])]
        if rng.random() < 0.5:
            return random_tree(rng, true, 2 * len(true))
        chain = tuple(token if rng.random() < 0.8 else (token + 1) % IDS for token in true)
        return HintTail(chain, tuple(rng.random() for _ in chain) if rng.random() < 0.3 else ())

    def extend(self, rng: random.Random) -> None:
        position = max(1, len(self.tokens) + rng.randint(-4, 3))
        anchor = prefix_hash(self.true[:position]) if rng.random() < 0.8 else prefix_hash([9])
        drafts = self.draft(position, rng)
        hint = Hint(position, anchor, drafts.draft_tokens, drafts.survival, parents=drafts.parents)
        self.stale.append(hint)
        self.limit = max(self.limit, len(self.tokens) + rng.randint(0, 8))
        assert self.item is not None
        self.bench.extend(
            self.item,
            limit=self.limit,
            hint=rng.choice([None, hint, rng.choice(self.stale)]),
            hint_due=rng.random() < 0.5,
        )

    def handle(self, answer: Response) -> None:
        outcome = answer.outcome
        if answer.is_last:
            self.item = None
        if isinstance(outcome, Confirmed):
            assert outcome.position == len(self.tokens)
            assert outcome.tokens
            self.tokens += outcome.tokens
            assert self.tokens == self.true[: len(self.tokens)]
            assert len(self.tokens) <= min(self.end, self.limit)
            assert outcome.accepted <= outcome.verified
            assert outcome.kv_len == len(self.tokens) - 1
            assert outcome.more is not answer.is_last
            self.held = outcome.kv_len
            self.check_states(outcome)
        elif isinstance(outcome, Miss):
            mine = outcome.have <= len(self.tokens) and outcome.prefix_hash == prefix_hash(
                self.tokens[: outcome.have]
            )
            self.held = outcome.have if mine else 0
        elif isinstance(outcome, GalleyError):
            assert isinstance(outcome, Overloaded | Unavailable)
            self.refused += 1
            self.held = 0
        else:
            assert isinstance(outcome, Superseded)

    def check_states(self, result: Confirmed) -> None:
        """Check that the states are the true ones up to the last token, and follow those before."""
        states = result.states
        if not self.layers:
            assert states is NO_STATES
            return
        assert states == states_of(self.tokens, states.position, len(self.tokens) - 1, self.layers)
        assert len(result.tokens) <= states.tokens <= MAX_FEATURE_TOKENS
        assert self.is_first or states.position == result.position - 1 == self.states.end
        self.states, self.is_first = states, False


class Load:
    def __init__(self, bench: Bench, gateways: Sequence[Gateway], seed: int) -> None:
        self.bench = bench
        self.gateways = gateways
        self.rng = random.Random(seed)
        self.turns = 0

    def run(self, *, faults: bool) -> None:
        stuck = 0
        while waiting := [gateway for gateway in self.gateways if not gateway.done]:
            oldest = min(waiting, key=lambda gateway: gateway.arrival_ns)
            before = len(oldest.tokens)
            self.turn(faults=faults and stuck < 20)
            stuck = 0 if len(oldest.tokens) > before else stuck + 1
            assert stuck < 60, f"{oldest.name} stands at {before} of {oldest.end}"
        self.settle()

    def turn(self, *, faults: bool) -> None:
        self.turns += 1
        self.act(faults=faults)
        plan = self.bench.scheduler.plan(self.bench.now)
        while isinstance(plan, Linger):
            assert plan.until_ns > self.bench.now
            self.bench.now = plan.until_ns
            plan = self.bench.scheduler.plan(self.bench.now)
        self.deliver()
        if plan is None:
            return
        self.act(faults=faults)
        self.deliver()
        self.bench.now += self.bench.times(plan.rows)
        if faults and self.rng.random() < 0.05:
            self.bench.scheduler.fail(plan, Unavailable("the step failed"))
        else:
            self.bench.scheduler.conclude(plan, self.bench.engine.run(plan), self.bench.now)
        self.deliver()
        self.bench.check()

    def act(self, *, faults: bool) -> None:
        self.bench.now += self.rng.randrange(3 * MS)
        for gateway in self.gateways:
            if gateway.done:
                self.leave(gateway)
            elif gateway.item is None:
                gateway.submit(self.rng)
            else:
                self.disturb(gateway, faults=faults)
        self.deliver()

    def disturb(self, gateway: Gateway, *, faults: bool) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            gateway.extend(self.rng)
        elif faults and chance < 0.34:
            self.leave(gateway)
        elif faults and chance < 0.37:
            gateway.submit(self.rng)

    def leave(self, gateway: Gateway) -> None:
        if gateway.item is not None:
            self.bench.scheduler.cancel(gateway.item)
            gateway.item = None

    def deliver(self) -> None:
        for answer in self.bench.scheduler.take_responses():
            for gateway in self.gateways:
                if gateway.item == answer.request_id:
                    gateway.handle(answer)

    def settle(self) -> None:
        for gateway in self.gateways:
            self.leave(gateway)
        assert self.bench.scheduler.plan(self.bench.now) is None
        assert self.bench.scheduler.queue_depth == 0
        assert self.bench.scheduler.kv.live_blocks == 0
        assert self.bench.scheduler.kv.free == self.bench.scheduler.kv.total
        self.bench.check()
