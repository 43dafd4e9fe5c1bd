"""A world that throws everything at a target's scheduler and what lies below it, and checks every answer.

Sessions come with prompts that share stems, go on from what was confirmed, are cut, rewritten, repeated,
given up, told stale and false hints, and fight for memory that cannot hold them all; steps fail, logits are
NaN. Each confirmed token is compared with a fresh one: drawn after the whole sequence alone. So are the
states of sessions that want some. All randomness comes from one seed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from galley.core.content import Miss, SessionKey, prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken, DeadlinePassed, GalleyError, InvalidField, Overloaded, ServerFault
from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES, States, state_bytes
from galley.core.hints import Hint, HintTail
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Extend, Response, VerifyRequest
from galley.core.scheduler.scheduler import Linger, Scheduler
from galley.core.step import Draw, Sampled, StepOutcome, StepPlan
from galley.core.trees import ROOT, parent_of, simplified
from tests.fakes.draft_trees import random_tree

TICK_NS = 1_000_000
TIMES = StepTimes.measured([(1, TICK_NS), (8, TICK_NS * 11 // 10), (64, TICK_NS * 3)])


@dataclass(frozen=True, slots=True)
class FuzzSize:
    vocab: int
    context: int
    blocks: int
    sessions: int
    prompt_tokens: int
    max_rows: int
    stop: int
    # A token whose logits are NaN; None: there is none.
    poison: int | None = None


@dataclass(slots=True)
class _Session:
    """`tokens` are confirmed; the target was last known to hold `held` of them."""

    key: SessionKey
    tokens: list[int]
    prompt_len: int
    arrival_ns: int
    sampling: SamplingParams
    min_tokens: int = 0
    logprobs: int | None = None
    priority: int = 0
    feature_layers: tuple[int, ...] = ()
    held: int = 0
    item: int | None = None
    request: VerifyRequest | None = None


@dataclass(slots=True)
class FuzzCounts:
    passes: int = 0
    rows: int = 0
    tokens_checked: int = 0
    verified: int = 0
    accepted: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    def as_record(self) -> dict[str, object]:
        return {
            "passes": self.passes,
            "rows": self.rows,
            "tokens_checked": self.tokens_checked,
            "verified": self.verified,
            "accepted": self.accepted,
            "happened": dict(self.happened),
        }


class FuzzWorld(ABC):
    # The engine may verify fewer draft tokens than planned.
    cuts_drafts = False
    # Layers after which sessions want states, in turn.
    feature_layers: Sequence[tuple[int, ...]] = ((),)

    def __init__(self, scheduler: Scheduler, size: FuzzSize, seed: int) -> None:
        self._scheduler = scheduler
        self._size = size
        self._random = random.Random(seed)
        self._stems = [self._some(size.prompt_tokens) for _ in range(3)]
        self._sessions: dict[SessionKey, _Session] = {}
        self._by_item: dict[int, _Session] = {}
        self._under_way: StepPlan | None = None
        self._born = 0
        self._now = 0
        self.counts = FuzzCounts()

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if what is kept of sessions and blocks does not agree."""

    @abstractmethod
    def check_empty(self, keys: Sequence[SessionKey]) -> None:
        """Drop these idle sessions. Raise AssertionError if anything is left."""

    @abstractmethod
    def run(self, plan: StepPlan) -> Sequence[StepOutcome]:
        """Return the outcomes of a step."""

    @abstractmethod
    def fresh(self, draw: Draw) -> StepOutcome:
        """Return what is drawn after the whole sequence alone."""

    def fresh_states(self, tokens: Sequence[int], layers: tuple[int, ...]) -> bytes:
        """Return the states of all tokens of a sequence that is alone."""
        raise NotImplementedError

    def step(self) -> None:
        self._now += TICK_NS
        ways = [
            (self._begin, 4),
            (self._go_on, 8),
            (self._cut, 1),
            (self._rewrite, 1),
            (self._repeat, 1),
            (self._give_up, 1),
            (self._extend, 6),
            (self._lie, 1),
            (self._forget, 1),
        ]
        way = self._random.choices([w for w, _ in ways], [weight for _, weight in ways])[0]
        way()
        self._scheduler.expire(self._now)
        self._take_answers()
        if self._under_way is None:
            self._plan()
        if self._under_way is not None and self._random.random() < 0.8:
            self._carry_out()
        self._take_answers()

    def play(self, steps: int, *, check_every: int = 20) -> None:
        for step in range(steps):
            self.step()
            if step % check_every == 0:
                self.check()
        self.finish()

    def finish(self) -> None:
        while self._by_item or self._under_way is not None:
            for item in list(self._by_item):
                if self._random.random() < 0.1:
                    self._cancel(item)
            if self._under_way is None:
                self._plan()
            if self._under_way is not None:
                self._carry_out()
            self._now += TICK_NS
            self._take_answers()
        self.check()
        if self._scheduler.queue_depth or self._scheduler.kv.live_blocks:
            raise AssertionError("an item or a live session was left behind")
        self.check_empty(list(self._sessions))
        if self._scheduler.kv.free != self._scheduler.kv.total:
            raise AssertionError("blocks are lost")

    def _begin(self) -> None:
        if len(self._sessions) >= self._size.sessions:
            gone = self._random.choice(list(self._sessions.values()))
            if gone.item is not None:
                self._cancel(gone.item)
            del self._sessions[gone.key]
        self._born += 1
        stem = self._random.choice(self._stems)
        tokens = [*stem[: self._random.randint(1, len(stem))], *self._some(self._random.randint(0, 12))]
        if self._size.poison is not None and self._random.random() < 0.02:
            tokens[self._random.randrange(len(tokens))] = self._size.poison
        session = _Session(
            key=(self._random.choice((b"", b"salt")), f"s{self._born}"),
            tokens=tokens,
            prompt_len=len(tokens),
            arrival_ns=self._now + self._random.randint(-5, 5) * TICK_NS,
            sampling=self._sampling(),
            min_tokens=self._random.choice((0, 0, 6)),
            logprobs=self._random.choice((None, None, 1)),
            priority=self._random.randint(0, 2),
            feature_layers=self.feature_layers[self._born % len(self.feature_layers)],
        )
        self._sessions[session.key] = session
        self._submit(session)

    def _go_on(self) -> None:
        session = self._pick(lambda s: s.item is None and len(s.tokens) < self._size.context - 2)
        if session is not None:
            self._submit(session)

    def _cut(self) -> None:
        session = self._pick(lambda s: s.item is None and len(s.tokens) > 2)
        if session is not None:
            self._shorten(session, self._random.randint(1, len(session.tokens) - 1))
            self._submit(session)

    def _rewrite(self) -> None:
        session = self._pick(lambda s: len(s.tokens) > 2)
        if session is not None:
            self._shorten(session, self._random.randint(1, len(session.tokens) - 1))
            session.tokens += self._some(self._random.randint(1, 40))
            del session.tokens[self._size.context - 4 :]
            session.prompt_len = len(session.tokens)
            self._submit(session)

    def _shorten(self, session: _Session, length: int) -> None:
        del session.tokens[length:]
        session.prompt_len = min(session.prompt_len, length)
        session.held = min(session.held, length - 1)

    def _repeat(self) -> None:
        session = self._pick(lambda s: s.item is not None)
        if session is not None:
            self._submit(session)

    def _lie(self) -> None:
        session = self._pick(lambda s: 3 < len(s.tokens) < self._size.context - 2)
        if session is not None:
            self._submit(session, start=len(session.tokens) - 1, wrong_hash=self._random.random() < 0.5)

    def _give_up(self) -> None:
        session = self._pick(lambda s: s.item is not None)
        if session is not None and session.item is not None:
            self._cancel(session.item)

    def _forget(self) -> None:
        session = self._pick(lambda s: s.item is None)
        if session is not None:
            session.held = 0

    def _extend(self) -> None:
        session = self._pick(lambda s: s.item is not None)
        if session is None or session.item is None:
            return
        position = len(session.tokens) + self._random.randint(-6, 3)
        hint = None
        if position > 0 and self._random.random() < 0.8:
            prefix = session.tokens[:position]
            digest = prefix_hash(prefix) if self._random.random() < 0.9 else prefix_hash([0, *prefix])
            drafts = self._drafts(session, session.tokens[position:])
            hint = Hint(position, digest, drafts.draft_tokens, drafts.survival, parents=drafts.parents)
        limit = len(session.tokens) + self._random.randint(0, 12)
        extension = Extend(limit, hint, hint_due=self._random.random() < 0.3)
        self._scheduler.extend(session.item, extension, self._now)
        if session.request is not None:
            self.counts.happened["extended"] += 1

    def _submit(self, session: _Session, start: int | None = None, *, wrong_hash: bool = False) -> None:
        begin = min(session.held, len(session.tokens) - 1) if start is None else start
        drafts = self._drafts(session, ())
        if self._random.random() < 0.05:
            self._change(session)
        request = VerifyRequest(
            key=session.key,
            start=begin,
            tokens=tuple(session.tokens[begin:]),
            prefix_hash=prefix_hash([0] if wrong_hash else session.tokens[:begin]),
            prompt_len=session.prompt_len,
            max_position=min(self._size.context, len(session.tokens) + self._random.randint(1, 60)),
            sampling=session.sampling,
            stop_token_ids=frozenset({self._size.stop}),
            min_tokens=session.min_tokens,
            logprobs=session.logprobs,
            draft_tokens=drafts.draft_tokens,
            survival=drafts.survival,
            parents=drafts.parents,
            credit=self._random.choice((0, 0, 1, 8, 40)),
            hint_due=self._random.random() < 0.2,
            arrival_ns=session.arrival_ns,
            priority=session.priority,
            deadline_ns=self._now + TICK_NS // 2 if self._random.random() < 0.02 else None,
            feature_layers=session.feature_layers,
        )
        try:
            item = self._scheduler.submit(request, self._now)
        except (Overloaded, InvalidField) as error:
            self.counts.happened[f"refused: {type(error).__name__}"] += 1
            return
        session.item, session.request = item, request
        self._by_item[item] = session

    def _change(self, session: _Session) -> None:
        """Let the next request sample otherwise."""
        session.sampling = self._sampling()
        session.min_tokens = self._random.choice((0, 6, 12))
        session.logprobs = self._random.choice((None, 1))
        session.priority = self._random.randint(0, 2)

    def _cancel(self, item: int) -> None:
        session = self._by_item.pop(item)
        self._scheduler.cancel(item)
        self.counts.happened["cancelled"] += 1
        if session.item == item:
            session.item, session.request = None, None

    def fed_rows(self, plan: StepPlan) -> int:
        """Return how many rows the engine fed in the step that it has just run."""
        return plan.rows

    def _plan(self) -> None:
        planned = self._scheduler.plan(self._now)
        if isinstance(planned, Linger):
            self.counts.happened["lingered"] += 1
        else:
            self._under_way = planned

    def _carry_out(self) -> None:
        plan, self._under_way = self._under_way, None
        if plan is None:
            return
        self.counts.passes += 1
        self.counts.rows += plan.rows
        self._now += TICK_NS
        if self._random.random() < 0.01:
            self.counts.happened["failed passes"] += 1
            if self._random.random() < 0.5:
                self.run(plan)
            self._scheduler.fail(plan, ServerFault("a pass that came to nothing"))
            return
        done = self._scheduler.conclude(plan, self.run(plan), self._now)
        assert done.rows == self.fed_rows(plan)

    def _take_answers(self) -> None:
        for answer in self._scheduler.take_responses():
            session = self._by_item.get(answer.request_id)
            if session is not None:
                self._check_answer(session, answer)

    def _check_answer(self, session: _Session, answer: Response) -> None:
        current = session.item == answer.request_id
        if answer.is_last:
            del self._by_item[answer.request_id]
        outcome = answer.outcome
        self.counts.happened[type(outcome).__name__] += 1
        if isinstance(outcome, Confirmed):
            self._check_confirmed(session, outcome, current=current)
        elif isinstance(outcome, Miss):
            agrees = outcome.prefix_hash == prefix_hash(session.tokens[: outcome.have])
            session.held = min(outcome.have, len(session.tokens) - 1) if agrees else 0
        elif isinstance(outcome, GalleyError) and current:
            self._check_error(session, outcome)
        if current and answer.is_last:
            session.item, session.request = None, None

    def _check_confirmed(self, session: _Session, confirmed: Confirmed, *, current: bool) -> None:
        if not current:
            return
        if confirmed.position != len(session.tokens):
            raise AssertionError(f"told of position {confirmed.position} at {len(session.tokens)}")
        self._compare(session, confirmed)
        session.tokens += confirmed.tokens
        session.held = confirmed.kv_len
        if (
            not self.cuts_drafts
            and confirmed.accepted == len(confirmed.tokens)
            and confirmed.tokens[-1] != self._size.stop
        ):
            self.counts.happened["accepted, then nothing"] += 1
            if not self._comes_to_nothing(session):
                raise AssertionError("no token of its own after the accepted ones, but there is one")
        self.counts.verified += confirmed.verified
        self.counts.accepted += confirmed.accepted
        if session.request is not None and len(session.tokens) > session.request.max_position:
            raise AssertionError("confirmed beyond max_position")

    def _check_error(self, session: _Session, error: GalleyError) -> None:
        if not isinstance(error, Broken | Overloaded | DeadlinePassed) and type(error) is not ServerFault:
            raise AssertionError(f"an error of another kind: {error!r}") from error
        if isinstance(error, Broken):
            if not self._comes_to_nothing(session):
                raise AssertionError(f"a session that could go on is broken: {error}") from error
            self._sessions.pop(session.key, None)
            session.item, session.request = None, None

    def _comes_to_nothing(self, session: _Session) -> bool:
        return isinstance(self.fresh(self._draw(session, session.tokens)), Broken)

    def _draw(self, session: _Session, tokens: Sequence[int], draft_tokens: Sequence[int] = ()) -> Draw:
        return Draw(
            params=session.sampling,
            history=list(tokens),
            prompt_len=session.prompt_len,
            stop_token_ids=frozenset({self._size.stop}),
            min_tokens=session.min_tokens,
            draft_tokens=tuple(draft_tokens),
            logprobs=session.logprobs,
        )

    def _compare(self, session: _Session, confirmed: Confirmed) -> None:
        tokens = confirmed.tokens
        expected = self.fresh(self._draw(session, session.tokens, tokens[:-1]))
        if not isinstance(expected, Sampled) or expected.tokens != tokens:
            problem = f"confirmed {tokens}, a fresh run says {expected}"
            raise AssertionError(f"after {session.tokens}: {problem}")
        if session.logprobs is not None and len(confirmed.logprobs) != len(tokens):
            raise AssertionError(f"{len(confirmed.logprobs)} logprobs for {len(tokens)} tokens")
        self.counts.tokens_checked += len(tokens)
        self._compare_states(session, confirmed.states, tokens)

    def _compare_states(self, session: _Session, states: States, tokens: Sequence[int]) -> None:
        if not session.feature_layers:
            assert states is NO_STATES
            return
        have = [*session.tokens, *tokens[:-1]]
        assert len(tokens) <= states.tokens <= MAX_FEATURE_TOKENS
        assert states.end == len(have)
        each = state_bytes(len(session.feature_layers), self._scheduler.feature_size)
        expected = self.fresh_states(have, session.feature_layers)[states.position * each :]
        if states.data != expected:
            raise AssertionError(
                f"after {session.tokens}: states of {states.position} on are not those alone"
            )
        self.counts.happened["states"] += states.tokens

    def _pick(self, fits: Callable[[_Session], bool]) -> _Session | None:
        sessions = [session for session in self._sessions.values() if fits(session)]
        return self._random.choice(sessions) if sessions else None

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(2, self._size.vocab - 1) for _ in range(count)]

    def _sampling(self) -> SamplingParams:
        temperature = self._random.choice((0.0, 0.0, 0.7, 1.0))
        seed = self._random.randrange(2**64)
        if self._random.random() < 0.3:
            return SamplingParams(temperature, seed=seed, top_p=0.9, top_k=20, repetition_penalty=1.2)
        return SamplingParams(temperature, seed=seed)

    def _drafts(self, session: _Session, known: Sequence[int]) -> HintTail:
        """Return `known` tokens and then draft tokens: a chain, or a tree that holds some right ones."""
        if self._random.random() < 0.5:
            tokens = (*known, *self._chain(session))
            return HintTail(tokens, self._survival(len(tokens)))
        is_short = len(session.tokens) + 4 < self._size.context and self._size.poison not in session.tokens
        right = self._known(session, 3) if is_short else []
        tree = random_tree(self._random, right, 10, vocab=self._size.vocab)
        below = [len(known) + parent_of(tree.parents, node) for node in range(len(tree.draft_tokens))]
        return HintTail(
            (*known, *tree.draft_tokens),
            (1.0,) * len(known) + tree.survival,
            parents=simplified([*range(ROOT, len(known) + ROOT), *below]),
        )

    def _chain(self, session: _Session) -> tuple[int, ...]:
        tokens = session.tokens
        kind = self._random.random()
        count = self._random.randint(1, 8)
        if kind < 0.3 or len(tokens) + count >= self._size.context:
            return ()
        if kind < 0.5 or (self._size.poison is not None and self._size.poison in tokens):
            return tuple(self._random.randrange(self._size.vocab) for _ in range(count))
        known = self._known(session, count)
        if known and kind < 0.65:
            known[-1] = (known[-1] + 1) % self._size.vocab
        return tuple(known)

    def _known(self, session: _Session, count: int) -> list[int]:
        """Return the next tokens as far as they are drawn, at most three."""
        known: list[int] = []
        while len(known) < min(count, 3) and self._size.poison not in known:
            outcome = self.fresh(self._draw(session, [*session.tokens, *known]))
            if not isinstance(outcome, Sampled):
                break
            known += outcome.tokens
        return known

    def _survival(self, count: int) -> tuple[float, ...]:
        if self._random.random() < 0.5:
            return ()
        return tuple(self._random.random() ** (0.2 * (i + 1)) for i in range(count))
