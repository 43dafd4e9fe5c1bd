"""A world for the session machine without sockets: the test controls draft, target, wire, log and client.

The correct next token is a function of the tokens before it, so all target replicas give the same answer, and
every action of the machine can be compared with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from galley.core.answer.answer import Answer, Chunk, SessionSpec
from galley.core.content import Miss, prefix_hash
from galley.core.errors import DeadlinePassed, Fenced, StoreUnavailable
from galley.core.hints import HintTail
from galley.core.names import GRAMMAR, PREDICTION
from galley.core.records import PositionLogprobs, TokenRecord
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Phase, Session, SessionLimits
from galley.core.session.sources import LocalSources
from galley.core.store import LogBehind
from galley.core.trees import parent_of
from tests.fakes.draft_trees import random_tree
from tests.fakes.owners import hashes_of
from tests.fakes.target import OpenRequest, admit
from tests.fakes.truth import IDS, STOP_ID, letters, true_id, true_output

MS = 1_000_000

TREE_LIES = ["cyclic", "other count", "twins", "no survival", "other survival", "rising survival"]


class World:
    """Executes the machine's effects when the test says so, and checks the rules after each."""

    def __init__(
        self,
        spec: SessionSpec,
        limits: SessionLimits,
        session_type: type[Session] = Session,
        sources: Callable[[list[int]], LocalSources | None] = lambda output: None,
    ) -> None:
        """`sources` makes those of the session from the true output, each time that it starts."""
        self.spec = spec
        self._sources = sources
        self.shared = SharedStatistics()
        self.proposals = 0
        self.limits = limits
        most, stops = spec.max_position - len(spec.prompt), spec.stop_token_ids
        self.truth = [*spec.prompt, *true_output(spec.prompt, most, stops=stops, next_token=true_id)]
        self.log = list(spec.prompt)
        self.records: list[TokenRecord] = []
        self.draft_cache: list[int] = []
        self.target_cache: list[int] = []
        self.seen: list[int] = []
        self.seen_text = ""
        self.finish_stored = False
        self.end: ev.End | None = None
        self.now = 0
        self.accepted_counts: set[int] = set()
        self.rounds: list[RoundEnded] = []
        self.extensions = 0
        self.verifies = 0
        self._session_type = session_type
        self.start()

    def start(self) -> None:
        answer = Answer(self.spec, letters)
        for token, record in zip(self.log[len(self.spec.prompt) :], self.records, strict=True):
            answer.append(token, record)
        self.waiting: dict[str, ev.Effect] = {}
        self.to_target: list[ev.Verify | ev.ExtendVerify | ev.CancelVerify] = []
        self.item: OpenRequest[ev.Verify] | None = None
        self.answers: list[ev.Event] = []
        self.open_request: int | None = None
        self.end = None
        self.taken = len(self.seen)
        self.known_logged = len(self.log)
        self.session = self._session_type(
            answer,
            self.limits,
            stream_from=len(self.seen),
            seen_hash=prefix_hash(self.seen),
            shared=self.shared,
            sources=self._own_sources(answer),
        )
        self._carry_out(self.session.start(self.now))

    def _own_sources(self, answer: Answer) -> LocalSources | None:
        sources = self._sources(self.truth[len(self.spec.prompt) :])
        if sources is not None:
            sources.confirm(answer.output)
        return sources

    def send(self, event: ev.Event) -> None:
        self.now += MS
        self._carry_out(self.session.step(event, now=self.now))

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Propose() | ev.CancelPropose():
                    self._to_draft(effect)
                case ev.Verify() | ev.ExtendVerify() | ev.CancelVerify():
                    self._send(effect)
                case ev.Commit():
                    assert "commit" not in self.waiting, "two commits at once"
                    self.waiting["commit"] = effect
                case ev.StoreFinish():
                    self.waiting["finish"] = effect
                case ev.SetTimer():
                    self.waiting["wake"] = effect
                case RoundEnded():
                    self.accepted_counts.add(effect.accepted)
                    self._check_sources(effect)
                    self.rounds.append(effect)
                case ev.Emit():
                    self._receive(effect)
                case ev.End():
                    self.end = effect
                    assert self.open_request is None, "a request is left open"
        self.check()

    def _to_draft(self, effect: ev.Propose | ev.CancelPropose) -> None:
        if isinstance(effect, ev.Propose):
            assert "draft" not in self.waiting, "two proposals are pending"
            self.proposals += 1
            self.waiting["draft"] = effect
            return
        given_up = self.waiting.pop("draft")
        assert isinstance(given_up, ev.Propose)
        assert given_up.request_id == effect.request_id

    def _send(self, effect: ev.Verify | ev.ExtendVerify | ev.CancelVerify) -> None:
        match effect:
            case ev.Verify():
                assert self.open_request is None, "two requests are open"
                self.open_request = effect.request_id
                self.verifies += 1
                self._must_have_room(self._opened(effect).limit)
            case ev.ExtendVerify():
                assert self.open_request == effect.request_id, "an extension of a closed request"
                self.extensions += 1
                self._must_have_room(effect.limit)
            case ev.CancelVerify():
                assert self.open_request == effect.request_id, "a closed request is cancelled"
                self.open_request = None
        self.to_target.append(effect)

    def _opened(self, effect: ev.Verify) -> OpenRequest[ev.Verify]:
        return OpenRequest(effect, self.spec, len(self.spec.prompt), true_id)

    def _must_have_room(self, limit: int) -> None:
        """Check that the target may not get further ahead than the log and the client can follow."""
        assert limit <= self.known_logged + self.limits.window
        assert limit <= len(self.spec.prompt) + self.taken + self.limits.buffer
        assert limit <= self.spec.max_position

    def _receive(self, effect: ev.Emit) -> None:
        for item in self.session.answer.chunks(effect.start, effect.end):
            if isinstance(item, Chunk):
                assert item.index == len(self.seen), "an index twice or skipped"
                self.seen += item.tokens
                self.seen_text += item.text
                logged = self.log[len(self.spec.prompt) :]
                assert self.seen == logged[: len(self.seen)], "streamed what the log does not hold"

    def _check_sources(self, done: RoundEnded) -> None:
        """Check that the draft tokens of a round, divided by their sources, are those of the round."""
        sums = [
            sum(getattr(of, count) for of in done.sources) for count in ("drafted", "verified", "accepted")
        ]
        assert sums == [done.drafted, done.verdict.verified, done.accepted]
        assert {of.source for of in done.sources} <= {self.spec.strategy, GRAMMAR, PREDICTION}

    def check(self) -> None:
        assert self.log == self.truth[: len(self.log)], "the log is not what the target alone generates"
        unlogged = len(self.session.answer.tokens) - len(self.log)
        assert unlogged <= self.limits.window, "too far ahead of the log"
        if self.end is not None and self.end.ending is not None:
            assert self.finish_stored
            assert self.log == self.truth
            assert self.seen == self.truth[len(self.spec.prompt) :]

    @property
    def pool_waits(self) -> bool:
        return "draft" in self.waiting or self.target_waits

    @property
    def target_waits(self) -> bool:
        return bool(self.to_target or self.item or self.answers)

    def reply(self, *, spoil_at: int | None = None, lie: str = "", fail: bool = False) -> None:
        """Let the draft answer if it has a request, else the target; a draft may lie, either may fail."""
        if "draft" in self.waiting:
            self.draft_answers(spoil_at=spoil_at, lie=lie, fail=fail)
        else:
            self.target_answers(fail=fail)

    def draft_answers(self, *, spoil_at: int | None = None, lie: str = "", fail: bool = False) -> None:
        effect = self.waiting.pop("draft")
        assert isinstance(effect, ev.Propose)
        self.send(ev.Failed(effect.request_id, "away") if fail else self._propose(effect, spoil_at, lie))

    def target_answers(self, *, fail: bool = False) -> None:
        while self.to_target:
            self.deliver()
        if self.item is not None and not self.answers:
            self.target_fails() if fail else self.target_passes()
        if self.answers:
            self.deliver_answer()

    def deliver(self) -> None:
        message = self.to_target.pop(0)
        match message:
            case ev.Verify():
                self.item = self._opened(message)
            case ev.ExtendVerify() if self._is_at_target(message.request_id):
                assert self.item is not None
                self.item.extend(message.limit, message.hint)
            case ev.CancelVerify() if self._is_at_target(message.request_id):
                self.item = None

    def _is_at_target(self, request_id: int) -> bool:
        return self.item is not None and self.item.verify.request_id == request_id

    def target_passes(self, at_most: int | None = None) -> None:
        item = self.item
        assert item is not None
        if item.tokens is None:
            tokens = admit(self.target_cache, item.verify.slice)
            if isinstance(tokens, Miss):
                self._close(ev.CacheMissed(item.verify.request_id, tokens.have, tokens.prefix_hash))
                return
            item.begin(tokens)
        answer = self._verify(item, at_most)
        if answer.more:
            self.answers.append(answer)
        else:
            self._close(answer)

    def target_fails(self) -> None:
        assert self.item is not None
        self._close(ev.Failed(self.item.verify.request_id, "away"))

    def target_preempts(self, keep: int) -> None:
        assert self.item is not None
        held = self.target_cache = self.target_cache[:keep]
        self._close(ev.CacheMissed(self.item.verify.request_id, len(held), prefix_hash(held)))

    def _close(self, answer: ev.Event) -> None:
        self.answers.append(answer)
        self.item = None

    def deliver_answer(self) -> None:
        answer = self.answers.pop(0)
        assert isinstance(answer, ev.Verified | ev.CacheMissed | ev.Failed)
        last = not (isinstance(answer, ev.Verified) and answer.more)
        if last and self.open_request == answer.request_id:
            self.open_request = None
        self.send(answer)

    def _propose(self, effect: ev.Propose, spoil_at: int | None, lie: str) -> ev.Event:
        tokens = admit(self.draft_cache, effect.slice)
        if isinstance(tokens, Miss):
            return ev.CacheMissed(effect.request_id, tokens.have, tokens.prefix_hash)
        position, anchor = len(tokens), prefix_hash(tokens)
        offered = self._tree(effect, tokens) if effect.width > 1 else _chain(tokens, effect.k, spoil_at)
        tokens += offered.main.draft_tokens
        self.draft_cache = list(tokens)
        guesses = offered.draft_tokens
        parents, survival = _spoilt_tree(offered, lie)
        match lie:
            case "too many":
                guesses = guesses * 3
            case "other vocabulary":
                guesses = (*guesses[:1], IDS + 5, *guesses[1:])
            case "negative":
                guesses = (-1,)
            case "nothing":
                guesses = ()
            case "other position":
                position += 1
            case "other content":
                anchor = b"x" * 16
            case "long cache":
                self.draft_cache = []
        return ev.Proposed(
            effect.request_id,
            position,
            anchor,
            guesses,
            len(tokens),
            survival=survival,
            parents=parents,
        )

    def _tree(self, effect: ev.Propose, tokens: list[int]) -> HintTail:
        right = true_output(tokens, effect.k, next_token=true_id)
        return random_tree(random.Random(self.proposals), right, effect.k)

    def _verify(self, item: OpenRequest[ev.Verify], at_most: int | None) -> ev.Verified:
        tokens = item.tokens
        assert tokens is not None
        position = len(tokens)
        verdict, verified = item.step(at_most)
        self.target_cache = tokens[:-1]
        return ev.Verified(
            request_id=item.verify.request_id,
            position=position,
            tokens=verdict.tokens,
            accepted=verdict.accepted,
            verified=verified,
            cache_len=len(self.target_cache),
            fingerprint="build-1",
            logprobs=tuple(PositionLogprobs(-float(token)) for token in verdict.tokens),
            more=item.may_go_on,
        )

    def store(self) -> None:
        if "commit" in self.waiting:
            commit = self.waiting.pop("commit")
            assert isinstance(commit, ev.Commit)
            if commit.expected_len > len(self.log):
                self.known_logged = len(self.log)
                self._fall_behind()
                return
            assert commit.expected_len == len(self.log)
            assert commit.hashes == hashes_of(self.log, commit.tokens)
            assert len(commit.records) == len(commit.tokens)
            self.log += commit.tokens
            self.records += commit.records
            self.known_logged = len(self.log)
            self.send(ev.Committed(len(self.log)))
        elif "finish" in self.waiting:
            finish = self.waiting.pop("finish")
            assert isinstance(finish, ev.StoreFinish)
            if finish.log_len > len(self.log):
                self.known_logged = len(self.log)
                self._fall_behind()
                return
            assert finish.log_hash == prefix_hash(self.log)
            self.finish_stored = True
            self.send(ev.FinishStored())

    def _fall_behind(self) -> None:
        behind = LogBehind(self.spec.session_id, len(self.log), prefix_hash(self.log))
        self.send(ev.StoreFailed(behind))

    def lose_log_tail(self, tokens: int) -> None:
        keep = max(len(self.spec.prompt), len(self.log) - tokens)
        self.log = self.log[:keep]
        self.records = self.records[: keep - len(self.spec.prompt)]

    def take(self) -> None:
        self.taken = len(self.seen)
        self.send(ev.Sent(self.taken))

    def wake(self) -> None:
        effect = self.waiting.pop("wake")
        assert isinstance(effect, ev.SetTimer)
        self.now = max(self.now, effect.at_ns)
        self.send(ev.TimerFired())

    def interrupt(self, kind: str) -> None:
        match kind:
            case "deadline":
                self.send(ev.Interrupted(DeadlinePassed()))
            case "fenced":
                self.send(ev.StoreFailed(Fenced(self.spec.session_id)))
            case "store":
                self.send(ev.StoreFailed(StoreUnavailable("away")))
            case "drain":
                self.send(ev.Draining())

    @property
    def over(self) -> bool:
        return self.session.phase is Phase.ENDED

    def run_to_end(self, *, spoil_at: int | None = None, lie: str = "", max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.over:
                return
            if "commit" in self.waiting or "finish" in self.waiting:
                self.store()
            elif self.pool_waits:
                self.reply(spoil_at=spoil_at, lie=lie)
            elif "wake" in self.waiting:
                self.wake()
            else:
                self.take()
        raise AssertionError("the session does not end")


def _chain(tokens: list[int], k: int, spoil_at: int | None) -> HintTail:
    guesses: list[int] = []
    for index in range(k):
        token = true_id([*tokens, *guesses])
        guesses.append((token + 1) % IDS if index == spoil_at else token)
    return HintTail(tuple(guesses))


def _spoilt_tree(offered: HintTail, lie: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the parents and the survival of a proposal, which lie if that is a lie about trees."""
    count = len(offered.draft_tokens)
    parents, survival = offered.parents, offered.survival
    tree = tuple(parent_of(parents, node) for node in range(count))
    match lie:
        case "cyclic":
            return (*tree[:-1], count), survival
        case "other count":
            return tree[:-1], survival
        case "twins":
            return (-1,) * count, survival
        case "no survival":
            return tree, ()
        case "other survival":
            return tree, (*survival[:-1], math.nan)
        case "rising survival":
            return tree, survival[::-1]
    return parents, survival


class StreamsBeforeCommit(Session):
    """Emit confirmed tokens before they are logged."""

    def _commit(self) -> None:
        super()._commit()
        self._emit()

    def _emit(self) -> None:
        delivery = self._delivery
        logged, delivery.logged = delivery.logged, len(self.answer.tokens)
        try:
            super()._emit()
        finally:
            delivery.logged = logged


def spec(**changes: object) -> SessionSpec:
    fields: dict[str, object] = {
        "session_id": "s",
        "prompt": (1, 2, 3),
        "sampling": SamplingParams(),
        "max_position": 60,
        "vocab_size": IDS,
        "stop_token_ids": frozenset({STOP_ID}),
        "k": 4,
        "strategy": "any",
        **changes,
    }
    return SessionSpec(**fields)  # type: ignore[arg-type]  # the fields of the tests' own making
