"""A world for the session machine without sockets: draft, target, log and client, each under command.

The one true answer is a function of the tokens before it, so every replica of the target says the same, and
whatever the machine does can be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from services.core import events as ev
from services.core.answer import Answer, Chunk, SessionSpec
from services.core.content import Miss, look_up, prefix_hash
from services.core.errors import DeadlinePassed, Fenced, StoreUnavailable
from services.core.params import SamplingParams
from services.core.records import PositionLogprobs, TokenRecord
from services.core.session import Phase, Session, SessionLimits
from services.core.store import LogBehind

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 8
STOP_TOKEN = 7
MS = 1_000_000


def true_next(tokens: Sequence[int]) -> int:
    """What the target says after `tokens`; the stop token is rare."""
    byte = blake2b(bytes(tokens), digest_size=2).digest()
    return STOP_TOKEN if byte[0] < 6 else byte[1] % STOP_TOKEN


def true_answer(prompt: Sequence[int], max_position: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_position and (len(tokens) == len(prompt) or tokens[-1] != STOP_TOKEN):
        tokens.append(true_next(tokens))
    return tokens


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


@dataclass
class Replica:
    """A cache of one session, addressed by content."""

    held: list[int] = field(default_factory=list)

    def admit(self, part: ev.Slice) -> Miss | list[int]:
        found = look_up(self.held, part.start, part.tokens, part.prefix_hash)
        if isinstance(found, Miss):
            return found
        self.held = [*self.held[: part.start], *part.tokens]
        return list(self.held)


class World:
    """Carries out the machine's effects at the test's command and checks the rules after each."""

    def __init__(
        self,
        spec: SessionSpec,
        limits: SessionLimits,
        session_type: type[Session] = Session,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.truth = true_answer(spec.prompt, spec.max_position)
        self.log = list(spec.prompt)
        self.records: list[TokenRecord] = []
        self.draft, self.target = Replica(), Replica()
        self.seen: list[int] = []
        self.seen_text = ""
        self.finish_stored = False
        self.end: ev.End | None = None
        self.now = 0
        self.accepted_counts: set[int] = set()
        self._session_type = session_type
        self.start()

    # ---------------------------------------------------------------------------- gateways --

    def start(self) -> None:
        """A gateway takes the session over, from the log, for a client that has `seen`."""
        answer = Answer(self.spec, decode)
        for token, record in zip(self.log[len(self.spec.prompt) :], self.records, strict=True):
            answer.absorb(token, record)
        self.waiting: dict[str, ev.Effect] = {}
        self.end = None
        self.taken = len(self.seen)
        self.session = self._session_type(
            answer, self.limits, stream_from=len(self.seen), seen_hash=prefix_hash(self.seen)
        )
        self._carry_out(self.session.start(self.now))

    def tell(self, event: ev.Event) -> None:
        self.now += MS
        self._carry_out(self.session.step(event, self.now))

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Propose() | ev.Verify():
                    self.waiting["pool"] = effect
                case ev.Commit():
                    assert "commit" not in self.waiting, "two commits at once"
                    self.waiting["commit"] = effect
                case ev.StoreFinish():
                    self.waiting["finish"] = effect
                case ev.WakeAt():
                    self.waiting["wake"] = effect
                case ev.RoundEnded():
                    self.accepted_counts.add(effect.accepted)
                case ev.Emit():
                    self._receive(effect)
                case ev.End():
                    self.end = effect
        self.check()

    def _receive(self, effect: ev.Emit) -> None:
        for item in effect.items:
            if isinstance(item, Chunk):
                assert item.index == len(self.seen), "an index twice or skipped"
                self.seen += item.tokens
                self.seen_text += item.text
                logged = self.log[len(self.spec.prompt) :]
                assert self.seen == logged[: len(self.seen)], "streamed what the log does not hold"

    def check(self) -> None:
        assert self.log == self.truth[: len(self.log)], "the log is not what the target alone would have said"
        unlogged = len(self.session.answer.tokens) - len(self.log)
        assert unlogged <= self.limits.window, "too far ahead of the log"
        if self.end is not None and self.end.ending is not None:
            assert self.finish_stored
            assert self.log == self.truth
            assert self.seen == self.truth[len(self.spec.prompt) :]

    # ------------------------------------------------------------------------------- pools --

    def reply(self, *, spoil_at: int | None = None, lie: str = "", fail: bool = False) -> None:
        """The pool that was asked answers; a draft may lie, either may fail."""
        effect = self.waiting.pop("pool")
        if fail:
            assert isinstance(effect, ev.Propose | ev.Verify)
            self.tell(ev.Failed(effect.request_id, "away"))
        elif isinstance(effect, ev.Propose):
            self.tell(self._propose(effect, spoil_at, lie))
        elif isinstance(effect, ev.Verify):
            self.tell(self._verify(effect))

    def _propose(self, effect: ev.Propose, spoil_at: int | None, lie: str) -> ev.Event:
        tokens = self.draft.admit(effect.slice)
        if isinstance(tokens, Miss):
            return ev.CacheMissed(effect.request_id, tokens.have, tokens.prefix_hash)
        position, anchor = len(tokens), prefix_hash(tokens)
        for index in range(effect.k):
            token = true_next(tokens)
            tokens.append((token + 1) % VOCAB if index == spoil_at else token)
        self.draft.held = list(tokens)
        guesses = tuple(tokens[position:])
        match lie:
            case "too many":
                guesses = guesses * 3
            case "other vocabulary":
                guesses = (*guesses[:1], VOCAB + 5, *guesses[1:])
            case "negative":
                guesses = (-1,)
            case "nothing":
                guesses = ()
            case "other position":
                position += 1
            case "other content":
                anchor = b"x" * 16
            case "long cache":
                self.draft.held = []
        return ev.Proposed(effect.request_id, position, anchor, guesses, len(tokens))

    def _verify(self, effect: ev.Verify) -> ev.Event:
        tokens = self.target.admit(effect.slice)
        if isinstance(tokens, Miss):
            return ev.CacheMissed(effect.request_id, tokens.have, tokens.prefix_hash)
        position = len(tokens)
        accepted = 0
        confirmed: list[int] = []
        for guess in (*effect.draft_tokens, None):
            token = true_next([*tokens, *confirmed])
            confirmed.append(token)
            if token == STOP_TOKEN or position + len(confirmed) == self.spec.max_position or token != guess:
                accepted += token == guess
                break
            accepted += 1
        self.target.held = [*tokens, *confirmed[:-1]]
        return ev.Verified(
            request_id=effect.request_id,
            position=position,
            tokens=tuple(confirmed),
            accepted=accepted,
            verified=len(effect.draft_tokens),
            cache_len=len(self.target.held),
            fingerprint="build-1",
            logprobs=tuple(PositionLogprobs(-float(token)) for token in confirmed),
        )

    # ------------------------------------------------------------------- store, client, time --

    def store(self) -> None:
        """The commit that waits, or the finish, takes effect and is answered."""
        if "commit" in self.waiting:
            commit = self.waiting.pop("commit")
            assert isinstance(commit, ev.Commit)
            if commit.expected_len > len(self.log):
                self.tell(ev.StoreFailed(LogBehind(self.spec.session_id, len(self.log))))
                return
            assert commit.expected_len == len(self.log)
            assert len(commit.records) == len(commit.tokens)
            self.log += commit.tokens
            self.records += commit.records
            self.tell(ev.Committed(len(self.log)))
        elif "finish" in self.waiting:
            finish = self.waiting.pop("finish")
            assert isinstance(finish, ev.StoreFinish)
            if finish.log_len > len(self.log):
                self.tell(ev.StoreFailed(LogBehind(self.spec.session_id, len(self.log))))
                return
            self.finish_stored = True
            self.tell(ev.FinishStored())

    def lose_log_tail(self, tokens: int) -> None:
        """The store comes back from a crash without its last moments."""
        keep = max(len(self.spec.prompt), len(self.log) - tokens)
        self.log = self.log[:keep]
        self.records = self.records[: keep - len(self.spec.prompt)]

    def take(self) -> None:
        """The client's transport takes what was emitted."""
        self.taken = len(self.seen)
        self.tell(ev.Taken(self.taken))

    def wake(self) -> None:
        effect = self.waiting.pop("wake")
        assert isinstance(effect, ev.WakeAt)
        self.now = max(self.now, effect.at_ns)
        self.tell(ev.Woken())

    def interrupt(self, kind: str) -> None:
        """The stream ends early; the session stays where its log is."""
        match kind:
            case "deadline":
                self.tell(ev.Interrupted(DeadlinePassed()))
            case "fenced":
                self.tell(ev.StoreFailed(Fenced(self.spec.session_id)))
            case "store":
                self.tell(ev.StoreFailed(StoreUnavailable("away")))
            case "drain":
                self.tell(ev.Draining())

    @property
    def over(self) -> bool:
        return self.session.phase is Phase.ENDED

    def run_to_end(self, *, spoil_at: int | None = None, lie: str = "", max_steps: int = 10_000) -> None:
        """Everything answers at once, until the stream ends."""
        for _ in range(max_steps):
            if self.over:
                return
            if "commit" in self.waiting or "finish" in self.waiting:
                self.store()
            elif "pool" in self.waiting:
                self.reply(spoil_at=spoil_at, lie=lie)
            elif "wake" in self.waiting:
                self.wake()
            else:
                self.take()
        raise AssertionError("the session does not end")


def spec(**changes: object) -> SessionSpec:
    fields: dict[str, object] = {
        "session_id": "s",
        "prompt": (1, 2, 3),
        "sampling": SamplingParams(),
        "max_position": 60,
        "vocab_size": VOCAB,
        "stop_token_ids": frozenset({STOP_TOKEN}),
        "k": 4,
        "strategy": "any",
        **changes,
    }
    return SessionSpec(**fields)  # type: ignore[arg-type]  # the fields of the tests' own making
