"""The sessions of a vLLM replica: the `KvMemory` of its scheduler, and the sequence that each session has.

Blocks are vLLM's own affair: it allocates, shares, evicts and preempts. Rules:

1. A session has at most one sequence, which goes on over many requests. If the confirmed tokens are no longer
   the sequence's record, or the request samples otherwise, the sequence is replaced; the prefix cache keeps
   its full blocks.
2. A session is live (opened for a request) or idle: its sequence is paused, and keeps its blocks until vLLM
   needs them. The record stays then, so that the session is no cache miss.
3. There are at most `max_sessions`. A new one replaces the longest idle one, whose sequence is ended.

Everything happens on the event loop. Each step takes its `Orders` to the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from galley.core.content import Hit, Miss, PrefixHasher, SessionKey, block_hashes, look_up
from galley.core.errors import GalleyError, Overloaded
from galley.core.kv.table import Reservation
from galley.core.scheduler.messages import VerifyRequest
from galley.core.step import Draw
from services.target.engine.vllm.prefixes import PrefixIndex
from services.target.engine.vllm.protocol import CoreFacts, NewSequence, SequenceStep

# The number of evicted sessions that `take_evicted` reports at most.
_NAMED = 16
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Orders:
    """The work of a step on the engine's thread: sequences to end, then to add, then those that take part.

    `constrained` are the draws of those that have a grammar.
    """

    ended: tuple[str, ...]
    added: tuple[NewSequence, ...]
    drafts: dict[str, tuple[int, ...]]
    constrained: dict[str, Draw] = field(default_factory=dict)


class _Session:
    """A session and its sequence `id`; [0, computed) of the sequence's `record` have KV as far as known.

    `hashes` are those of the record's first full blocks, as far as its last request knew them.
    """

    __slots__ = ("computed", "expected", "hashes", "id", "prefix", "record", "rules")

    def __init__(self) -> None:
        self.expected: tuple[object, ...] = ()  # the rules of its next request
        self.hashes: Sequence[bytes] = ()
        self.begin("", ())

    def begin(self, name: str, tokens: Sequence[int]) -> None:
        """Let a sequence of this name stand for the session; vLLM does not know it yet."""
        self.id = name
        self.record = list(tokens)
        self.computed = 0
        self.prefix = PrefixHasher()
        self.rules: tuple[object, ...] = ()  # empty: vLLM does not know the sequence


def _rules(message: VerifyRequest) -> tuple[object, ...]:
    """Return all that a sequence's tokens and its place in vLLM depend on, besides the tokens before."""
    return (
        message.sampling,
        message.prompt_len,
        message.stop_token_ids,
        message.min_tokens,
        message.logprobs,
        message.priority,
    )


class VllmSessions:
    def __init__(self, blocks: int, block_tokens: int, max_sessions: int) -> None:
        self.block_tokens = block_tokens
        self.total = blocks
        self.max_sessions = max_sessions
        self._live: dict[SessionKey, _Session] = {}
        self._idle: OrderedDict[SessionKey, _Session] = OrderedDict()  # longest idle first
        self._prefixes = PrefixIndex(block_tokens)
        self._used_blocks = 0
        self._ended: list[str] = []
        self._lost: deque[SessionKey] = deque(maxlen=_NAMED)
        self._last_id = 0

    @property
    def live_blocks(self) -> int:
        """Return about how many blocks live sessions hold: shared ones count for each."""
        return min(self._used_blocks, sum(self._blocks(session.computed) for session in self._live.values()))

    @property
    def free(self) -> int:
        return self.total - self.live_blocks

    @property
    def empty(self) -> int:
        """Return about how many blocks hold nothing. A sequence's last block is not in the prefix cache."""
        cached = self._prefixes.blocks
        return self.total - min(self.total, max(self._used_blocks, cached + len(self._live)))

    @property
    def evicted_blocks(self) -> int:
        return self._prefixes.dropped

    def cached_prefixes(self, limit: int) -> list[bytes]:
        return self._prefixes.recent(limit)

    def has_blocks(self, key: SessionKey) -> bool:
        """Return True if the session has a sequence, whether or not vLLM has taken its blocks meanwhile."""
        return self._session(key) is not None

    def tokens_of(self, key: SessionKey) -> Sequence[int]:
        session = self._session(key)
        return session.record if session is not None else ()

    def hashes_of(self, key: SessionKey) -> Sequence[bytes]:
        session = self._session(key)
        return session.hashes if session is not None else ()

    def blocks_of(self, key: SessionKey) -> Sequence[int]:  # noqa: ARG002  # the protocol's
        return ()

    def take_evicted(self) -> tuple[SessionKey, ...]:
        evicted = tuple(self._lost)
        self._lost.clear()
        return evicted

    def cached_prefix(self, key: SessionKey) -> Miss:
        session = self._session(key) or _Session()
        return Miss(len(session.record), session.prefix.digest(session.record, len(session.record)))

    def look_up(self, key: SessionKey, start: int, tokens: Sequence[int], prefix_hash: bytes) -> Hit | Miss:
        session = self._session(key) or _Session()
        return look_up(session.record, start, tokens, prefix_hash, session.prefix)

    def expect(self, message: VerifyRequest) -> None:
        """Note the rules of a session's next request, which `open` compares."""
        session = self._session(message.key)
        if session is not None:
            session.expected = _rules(message)

    def open(
        self,
        key: SessionKey,
        arrival: int,  # noqa: ARG002  # each request brings the same
        tokens: Sequence[int],
        priority: int = 0,  # noqa: ARG002  # likewise
        hashes: Sequence[bytes] = (),
    ) -> int:
        """Make the session live for these confirmed tokens; return how many have KV. Raise Overloaded.

        A sequence with another record or other rules is replaced. What the prefix cache has for the new one
        is known only once vLLM has begun it.
        """
        session = self._idle.pop(key, None) or self._live.get(key)
        if session is None:
            self._make_place()
            session = _Session()
        self._live[key] = session
        if session.record != list(tokens) or session.rules != session.expected:
            self._begin(session, tokens)
        session.hashes = hashes
        return session.computed

    @property
    def moved(self) -> int:
        """Return 0: vLLM moves its blocks in its own process."""
        return 0

    def make_room(self, lengths: Mapping[SessionKey, int], until: int) -> bool:  # noqa: ARG002  # the protocol's
        """Do nothing, because vLLM reserves."""
        return True

    def reserve(self, key: SessionKey, length: int, busy: Container[SessionKey] = ()) -> Reservation:  # noqa: ARG002  # the protocol's
        """Return nothing, because vLLM reserves. Raise Overloaded if no memory could hold `length` tokens."""
        if self._blocks(length) > self.total:
            raise Overloaded(f"KV memory holds {self.total * self.block_tokens} tokens", _RETRY_AFTER_S)
        return Reservation()

    def append_computed(self, key: SessionKey, tokens: Sequence[int]) -> None:
        """Do nothing: `record` notes what a step has computed."""

    def truncate(self, key: SessionKey, length: int) -> None:
        """Do nothing: a record that is too long is replaced when the session goes on."""

    def distrust(self, blocks: Collection[int]) -> None:
        """Do nothing: no step moves tokens."""

    def make_idle(self, key: SessionKey) -> None:
        session = self._live.pop(key, None)
        if session is not None:
            self._idle[key] = session

    def clear(self) -> None:
        """Forget all sessions; the next step ends their sequences. vLLM keeps its prefix cache."""
        for session in (*self._live.values(), *self._idle.values()):
            self._end(session)
        self._live.clear()
        self._idle.clear()

    def orders(self, messages: Sequence[tuple[VerifyRequest, Draw]]) -> Orders:
        """Return the orders of a step of these requests, whose sessions are live."""
        added: list[NewSequence] = []
        drafts: dict[str, tuple[int, ...]] = {}
        constrained: dict[str, Draw] = {}
        for message, draw in messages:
            session = self._live[message.key]
            new = self._continue(session, message, draw)
            if new is not None:
                added.append(new)
            drafts[session.id] = draw.draft_tokens
            if draw.grammar is not None:
                constrained[session.id] = draw
        ended, self._ended = tuple(self._ended), []
        return Orders(ended, tuple(added), drafts, constrained)

    def record(self, key: SessionKey, step: SequenceStep) -> None:
        """Note what a step did for the live session's sequence, which is replaced after an error or a cut."""
        session = self._live[key]
        if step.cached:
            cached = session.record[: step.cached]
            self._prefixes.touch(block_hashes(key[0], cached, self.block_tokens, session.hashes))
        if isinstance(step.outcome, GalleyError):
            self._begin(session, session.record)
            return
        if step.outcome is not None:
            session.record += step.outcome.tokens
        session.computed = step.computed
        if step.is_cut:
            self._begin(session, session.record)

    def note(self, facts: CoreFacts) -> None:
        self._used_blocks = facts.used_blocks
        self._prefixes.record(facts.events)

    def undo(self, orders: Orders, keys: Sequence[SessionKey]) -> None:
        """Let these live sessions begin anew, because a step with these orders failed, or never ran."""
        self._ended += orders.ended
        for key in keys:
            self._begin(self._live[key], self._live[key].record)

    def _continue(self, session: _Session, message: VerifyRequest, draw: Draw) -> NewSequence | None:
        """Return a new sequence, or None if the session's goes on. Its record is `draw.history`."""
        if session.rules:
            return None
        session.rules = _rules(message)
        tokens = tuple(draw.history)
        return NewSequence(
            session.id,
            tokens,
            replace(draw, history=tokens, draft_tokens=(), grammar=None),
            salt=message.key[0].hex(),
            priority=message.priority,
            arrival_ns=message.arrival_ns,
            lora=message.lora,
        )

    def _begin(self, session: _Session, tokens: Sequence[int]) -> None:
        self._end(session)
        self._last_id += 1
        session.begin(str(self._last_id), tokens)

    def _end(self, session: _Session) -> None:
        if session.rules:
            self._ended.append(session.id)

    def _session(self, key: SessionKey) -> _Session | None:
        return self._live.get(key) or self._idle.get(key)

    def _make_place(self) -> None:
        if len(self._live) >= self.max_sessions:
            raise Overloaded(f"all {self.max_sessions} sessions are live", _RETRY_AFTER_S)
        if len(self._live) + len(self._idle) >= self.max_sessions:
            key, session = self._idle.popitem(last=False)
            self._end(session)
            self._lost.append(key)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_tokens)
