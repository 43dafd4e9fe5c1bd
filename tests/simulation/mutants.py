"""Faults put into the product on purpose, each of which the simulator has to find.

A mutant replaces a class where the gateway imports it; the product itself contains none of this.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from galley.core.answer.answer import Answer, Chunk, SessionSpec
from galley.core.content import chain_start
from galley.core.errors import Fenced, GalleyError
from galley.core.grammar.compiled import CompiledGrammar, GrammarState
from galley.core.grammar.follower import GrammarFollower
from galley.core.kv.session import KvSession
from galley.core.routing.breaker import Breaker
from galley.core.routing.choice import DraftCandidate, choose_draft
from galley.core.session.delivery import Delivery
from galley.core.session.drafting import Drafting
from galley.core.session.events import Replica, StoreFailed
from galley.core.step import Draw, Sampled, StepChunk, StepOutcome, StepPlan, StepTrace
from galley.core.store import Exchange, Exchanged, OwnerChanged, StoredSession, TokenBucket
from galley.core.versions.split import Split
from galley.core.versions.state import VersionState
from galley.engine import masking
from services.gateway.audit.verification import audited_spec
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.positions import Position, event_id
from services.gateway.http.api.stream import EventStream
from services.gateway.replicas.drafts import DraftPool, DraftReplica
from services.gateway.request.validate import ResumeSpec, session_id_for, tenant_salt_for
from services.gateway.session.streams import Streams, check_resume
from services.gateway.store.session_log import SessionLog, StoreTime, retry
from services.gateway.versions.keeper import VersionKeeper
from tests.fakes.session_world import StreamsBeforeCommit
from tests.simulation.grammars import VOCAB
from tests.simulation.schedules.audits import AUDITS
from tests.simulation.schedules.deletes import DELETES
from tests.simulation.schedules.versions import VERSIONS
from tests.simulation.system.mutated import (
    REFUSED,
    AnyPrincipal,
    AppendsTwice,
    ForgetsAborts,
    KeepsDeleted,
    LateAborts,
    LateDeletes,
    NoFencing,
    OneForAll,
    RefusesRepeats,
    TrustsLogs,
    Unconditional,
)
from tests.simulation.system.redis import SimStore, at_once
from tests.simulation.system.replicas import SimEngine
from tests.simulation.truth import true_token
from tests.simulation.world import Kinds

_NEVER_MS = 10**15
_LONG_LIST = 20


async def _changed_any_time(
    streams: Streams, operation: str, _session_id: str, change: Callable[..., Awaitable[Any]], until_ns: int
) -> Any:
    """Change the store whenever the call reaches it."""
    return await retry(operation, lambda: change(StoreTime(_NEVER_MS, 0, 0)), until_ns, streams._clock)


async def _read_at_once(store: SimStore, session_id: str, principal: str) -> StoredSession:
    """Need no call for what is not read: the claim comes first."""
    return at_once(store._sessions.read(session_id, principal))


class WrongInLongLists(SimEngine):
    """An engine whose fault no session meets, but audits do."""

    def draw(self, chunk: StepChunk, seen: Sequence[int]) -> Sampled | GalleyError:
        outcome = super().draw(chunk, seen)
        if isinstance(outcome, GalleyError) or chunk.draw is None or (chunk.draw.logprobs or 0) < _LONG_LIST:
            return outcome
        *tokens, last = outcome.tokens
        return replace(outcome, tokens=(*tokens, (last + 1) % VOCAB))


class MovesNothing(SimEngine):
    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        return super().run(replace(plan, moves=()), watch)


class NoiseByRound(SimEngine):
    """Make the noise of a token depend on the step that samples it."""

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_token(self.info.fingerprint, seed, self.passes, history)


def _trusting_length(session: KvSession, tokens: list[int], _: Sequence[bytes] = ()) -> None:
    session.truncate(min(len(session.tokens), max(0, len(tokens) - 1)))


class NeverRequestedAgain(Drafting):
    """Request no drafts any more after the first failure."""

    def _cool_down(self, now: int) -> None:
        super()._cool_down(now)
        self._off_until = math.inf  # type: ignore[assignment]  # beyond all time


class NeverCloses(Breaker):
    """Ignore a successful probe, so that the circuit stays open."""

    def record_success(self, attempt: int) -> bool:
        return not self._probing and super().record_success(attempt)


def _only_accepted_once(draft: DraftReplica) -> bool:
    return not draft.is_accepted


def _unchecked(_stored: StoredSession, _spec: SessionSpec, _resume: ResumeSpec, _output_hash: bytes) -> int:
    """Let every Resume pass, as if nothing of the answer were left."""
    return 0


_exchange = SimStore.exchange


async def _own_bucket(store: SimStore, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
    """Keep a bucket for each gateway."""
    own = replace(bucket, principal=f"{bucket.principal} at {store._caller.name}")
    return await _exchange(store, own, exchange)


def _reserving_nothing(
    stored: StoredSession, spec: SessionSpec, resume: ResumeSpec, output_hash: bytes
) -> int:
    check_resume(stored, spec, resume, output_hash)
    return 0


def _unchecked_at_the_end(
    stored: StoredSession, spec: SessionSpec, resume: ResumeSpec, output_hash: bytes
) -> int:
    """Check `seen_hash` only if the log holds more than the client has."""
    if resume.next_index == len(stored.tokens) - stored.prompt_len:
        resume = replace(resume, seen_hash=b"")
    return check_resume(stored, spec, resume, output_hash)


class Unchecked(Delivery):
    def __init__(self, answer: Answer, stream_from: int, _seen_hash: bytes) -> None:
        super().__init__(answer, stream_from, b"")


def _run_together(principal: str, key: str, secret: bytes) -> str:
    return session_id_for("", principal + key, secret)


def _one_salt(_principal: str, secret: bytes) -> bytes:
    return tenant_salt_for("", secret)


def _no_salt(_salt: bytes) -> bytes:
    return chain_start(b"")


_follow = masking.confirmed_mask


def _advanced_by_drafts(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
    """Advance a grammar by draft tokens, accepted or not."""
    rows = _follow(state, draw)
    state.confirm(draw.draft_tokens[: state.allowed_prefix(draw.draft_tokens)])
    return rows


def _mask_of_the_position_before(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
    rows = _follow(state, draw)
    return np.concatenate([rows[:1], rows[:-1]])


class NeverRebuilt(GrammarFollower):
    """Begin the grammar where the log ends, as if nothing of the output were there."""

    def __init__(self, grammar: CompiledGrammar, tokens: Sequence[int], prompt_len: int) -> None:
        super().__init__(grammar, tokens, prompt_len)
        self.state.length = len(tokens) - prompt_len


def _one_state(grammar: CompiledGrammar, **_: object) -> GrammarState:
    """Give the sessions of a grammar one state."""
    state: GrammarState = grammar.__dict__.setdefault("shared", GrammarState(grammar))
    return state


def _nothing(*_: object) -> None:
    """Do nothing."""


async def _never_over(_streams: Streams, _slot: object, held: StoredSession, *_: object) -> StoredSession:
    raise OwnerChanged(held.ownership.session_id)


async def _no_renewal(_log: SessionLog) -> None:
    await asyncio.Future()


async def _fenced_by_nobody(log: SessionLog) -> StoreFailed:
    await asyncio.sleep(0.5)
    return StoreFailed(Fenced(log.owner.session_id))


def _one_less(positions: Sequence[Position]) -> str:
    return event_id([replace(at, index=max(0, at.index - 1)) for at in positions])


def _without_hash(positions: Sequence[Position]) -> str:
    return event_id([replace(at, seen_hash=b"") for at in positions])


def _last_build(answer: Answer, _index: int) -> str | None:
    return answer.fingerprint


_advance = Choice.advance


def _name_the_place_before(choice: Choice, chunk: Chunk) -> None:
    """Let the id of an event name the place before its tokens."""
    before = choice.__dict__.get("reached", choice.position)
    _advance(choice, chunk)
    choice.__dict__["reached"], choice.position = choice.position, before


async def _done_at_once(events: EventStream, choice: Choice, _answer: object) -> None:
    choice.end()
    await events._finish()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault; `breaks` is the text of the rule that finds it, `patches` replaces objects by name."""

    name: str
    breaks: str
    kinds: Kinds = field(default_factory=Kinds)
    patches: Mapping[str, object] = field(default_factory=dict)
    theme: str = ""

    @contextmanager
    def put_in(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, replacement in self.patches.items():
                stack.enter_context(mock.patch(name, replacement))
            yield


def _first_only(keeper: VersionKeeper, state: VersionState) -> None:
    """Take over the first state that is read, and no other."""
    if not keeper.state.epoch:
        _use(keeper, state)


_use = VersionKeeper._use


async def _no_end(_keeper: VersionKeeper) -> None:
    """Never end a trial."""


def _of_its_version_only(  # as `choose_draft`
    strategy: str,
    candidates: Sequence[DraftCandidate],
    home: Replica | None,
    avoid: Collection[str],
    session_id: str,
    split: Split | None,
    *,
    is_canary: bool,
) -> DraftCandidate | None:
    able = [c for c in candidates if not is_canary or split is None or c.lease.version == split.canary]
    return choose_draft(strategy, able, home, avoid, session_id, split, is_canary=is_canary)


def _for_new_sessions(drafts: DraftPool, split: Split) -> None:
    """Use a split without telling the sessions that are open."""
    drafts._split = split


_draws = itertools.count()


def _drawn_each_time(split: Split, _session_id: str, _tenant_salt: bytes, _workload: str) -> bool:
    return bool(split.canary) and next(_draws) % 2 == 0


def _with_its_salt(spec: SessionSpec) -> SessionSpec:
    return replace(audited_spec(spec), tenant_salt=spec.tenant_salt)


MUTANTS = (
    Mutant(
        "streams before the commit",
        "which the log never held",
        patches={"services.gateway.session.streams.Session": StreamsBeforeCommit},
    ),
    Mutant("does not fence", "wrote after a later claim", Kinds(sessions=NoFencing)),
    Mutant("appends a repeated commit", "the truth is", Kinds(sessions=AppendsTwice)),
    Mutant("refuses a repeated commit", REFUSED, Kinds(sessions=RefusesRepeats)),
    Mutant(
        "executes claims that were given up",
        "given up",
        Kinds(sessions=Unconditional),
        {
            "services.gateway.session.streams.Streams._change": _changed_any_time,
            "tests.simulation.system.redis.SimStore.read": _read_at_once,
        },
    ),
    Mutant(
        "claims before it checks a Resume",
        "was refused, but has changed a session",
        patches={"services.gateway.session.streams.check_resume": _unchecked},
    ),
    Mutant(
        "executes aborts that were given up",
        "aborts a session by a call that it has given up",
        Kinds(sessions=LateAborts),
        theme="aborted late",
    ),
    Mutant(
        "executes deletions that were given up",
        "deletes a session by a call that it has given up",
        Kinds(sessions=LateDeletes),
        theme=DELETES,
    ),
    Mutant(
        "keeps what was deleted",
        "for a call that came after its deletion",
        Kinds(sessions=KeepsDeleted),
        theme=DELETES,
    ),
    Mutant("forgets an abort", "made anew after its abort", Kinds(sessions=ForgetsAborts), theme="aborted"),
    Mutant("gives sessions to all principals", "of another principal", Kinds(sessions=AnyPrincipal)),
    Mutant(
        "lets principal and key run together in a session id",
        "another principal",
        patches={
            "services.gateway.generation.session_id_for": _run_together,
            "tests.simulation.schedules.sessions.session_id_for": _run_together,
        },
        theme="twins",
    ),
    Mutant(
        "salts the caches of all principals alike",
        "with the salt of another principal",
        patches={"services.gateway.generation.tenant_salt_for": _one_salt},
    ),
    Mutant(
        "publishes cached prefixes by unsalted hashes",
        "by names that can be guessed",
        patches={"galley.core.kv.session.chain_start": _no_salt},
    ),
    Mutant(
        "trusts a damaged log", "lost or changed what it held", Kinds(sessions=TrustsLogs), theme="damaged"
    ),
    Mutant(
        "takes one copy for two", "tokens were acknowledged", Kinds(copies=OneForAll), theme="failing over"
    ),
    Mutant(
        "checks no hash at the end of a log",
        "mixes two answers",
        patches={
            "services.gateway.session.streams.check_resume": _unchecked_at_the_end,
            "galley.core.session.machine.Delivery": Unchecked,
        },
        theme="rewritten",
    ),
    Mutant(
        "trusts a lost session for six renewals",
        "by an owner that had been fenced",
        patches={"services.gateway.clock.Timeouts.trusted_ns": property(lambda it: 6 * it.renew_ns)},
        theme="outlived",
    ),
    Mutant(
        "gives up after all breaks together have taken its time",
        "before its time",
        patches={"galley.client.streams.Recovery.reset": _nothing},
        theme="breaking",
    ),
    Mutant(
        "admits more streams than it has places for",
        "slots are held",
        patches={"galley.core.admission.admission.Admission._check_slots": _nothing},
        theme="few places",
    ),
    Mutant(
        "keeps the place of a stream that has ended",
        "that nobody uses",
        patches={"services.gateway.session.streams.Streams._release": _nothing},
    ),
    Mutant(
        "waits for a client that has left",
        "goes on without its client",
        patches={"services.gateway.session.outbox.Outbox.discard": _nothing},
        theme="orphans",
    ),
    Mutant(
        "lets nobody replace an owner",
        "although all faults have ended",
        patches={"services.gateway.session.streams.Streams._take_over": _never_over},
    ),
    Mutant(
        "replays a whole answer at once",
        "before others get a turn",
        patches={"services.gateway.session.replay.SLICE_TOKENS": 10**6},
        theme="replayed",
    ),
    Mutant(
        "hands nothing over when it drains",
        "as its drain has ended",
        patches={"galley.core.session.machine.Session._on_draining": _nothing},
        theme="leaving",
    ),
    Mutant("draws noise by round", "the truth is", Kinds(engine=NoiseByRound)),
    Mutant("leaves the KV of an accepted path where it is", "the truth is", Kinds(engine=MovesNothing)),
    Mutant(
        "trusts a cache by length",
        "the truth is",
        patches={"galley.core.kv.session.KvSession.restore": _trusting_length},
        theme="wandering",
    ),
    Mutant(
        "never closes a breaker",
        "was not drafted for again",
        patches={"services.gateway.replicas.drafts.Breaker": NeverCloses},
        theme="failing draft",
    ),
    Mutant(
        "never requests a draft again after a failure",
        "was not drafted for again",
        patches={"galley.core.session.machine.Drafting": NeverRequestedAgain},
    ),
    Mutant(
        "never reconnects to a draft",
        "was not drafted for again",
        patches={"services.gateway.replicas.drafts.DraftReplica.is_unknown": _only_accepted_once},
        theme="failing draft",
    ),
    Mutant(
        "does not renew a session",
        "its session has expired",
        patches={"services.gateway.store.session_log.SessionLog.keep_alive": _no_renewal},
        theme="standing still",
    ),
    Mutant(
        "takes a session for another owner's that nobody claimed",
        "is fenced without a living successor",
        patches={"services.gateway.store.session_log.SessionLog.keep_alive": _fenced_by_nobody},
    ),
    Mutant(
        "reserves nothing at Resume",
        "tokens, at most",
        patches={"services.gateway.session.streams.check_resume": _reserving_nothing},
        theme="metered",
    ),
    Mutant(
        "counts tokens for each gateway",
        "tokens, at most",
        patches={"tests.simulation.system.redis.SimStore.exchange": _own_bucket},
        theme="metered",
    ),
    Mutant(
        "counts one token less in the id of an event",
        "whose first tokens the client has seen",
        patches={"services.gateway.http.api.stream.event_id": _one_less},
    ),
    Mutant(
        "names the place before an event in its id",
        "mixes two answers",
        patches={"services.gateway.http.api.choices.Choice.advance": _name_the_place_before},
    ),
    Mutant(
        "sends ids of events without their hash",
        "must be the id of an event",
        patches={"services.gateway.http.api.stream.event_id": _without_hash},
    ),
    Mutant(
        "names the build of the last token in all events",
        "an event names",
        patches={"galley.core.answer.answer.Answer.build_of": _last_build},
        theme="wandering",
    ),
    Mutant(
        "tells tokens of an aborted response before their commit",
        "told '",
        patches={
            "services.gateway.http.responses.objects.ResponseObjects.output_len": property(
                lambda it: it.answer.output_len
            )
        },
        theme="aborted",
    ),
    Mutant(
        "sends [DONE] in place of the end of an answer",
        "[DONE] comes before the end",
        patches={"services.gateway.http.api.stream.EventStream.end": _done_at_once},
    ),
    Mutant(
        "advances a grammar by rejected tokens",
        "the truth is",
        patches={"galley.engine.masking.confirmed_mask": _advanced_by_drafts},
        theme="constrained",
    ),
    Mutant(
        "takes the mask of the position before",
        "the truth is",
        patches={"galley.engine.masking.confirmed_mask": _mask_of_the_position_before},
        theme="constrained",
    ),
    Mutant(
        "does not rebuild a grammar's state after a failover",
        "the truth is",
        patches={"galley.core.grammar.follower.GrammarFollower": NeverRebuilt},
        theme="constrained",
    ),
    Mutant(
        "shares a grammar's state between sessions",
        "the truth is",
        patches={"galley.core.grammar.compiled.CompiledGrammar.start": _one_state},
        theme="constrained",
    ),
    Mutant(
        "reads the split once",
        "versions of drafts are not settled",
        patches={"services.gateway.versions.keeper.VersionKeeper._use": _first_only},
        theme=VERSIONS,
    ),
    Mutant(
        "never ends a trial",
        "versions of drafts are not settled",
        patches={"services.gateway.versions.keeper.VersionKeeper._due_end": _no_end},
        theme=VERSIONS,
    ),
    Mutant(
        "gives a canary's session no draft of another version",
        "was not drafted for again",
        patches={"services.gateway.replicas.drafts.choose_draft": _of_its_version_only},
        theme=VERSIONS,
    ),
    Mutant(
        "draws a session's version each time",
        "is given to both versions",
        patches={"galley.core.versions.split.Split.is_canary": _drawn_each_time},
        theme=VERSIONS,
    ),
    Mutant(
        "lets any draft serve any session",
        "which another version was given",
        patches={"services.gateway.replicas.drafts.DraftPool.use_split": _nothing},
        theme=VERSIONS,
    ),
    Mutant(
        "keeps an open session at its draft when the split changes",
        "which another version was given",
        patches={"services.gateway.replicas.drafts.DraftPool.use_split": _for_new_sessions},
        theme=VERSIONS,
    ),
    Mutant(
        "draws other tokens where many logprobs are listed",
        "raises a false alarm",
        Kinds(engine=WrongInLongLists),
        theme=AUDITS,
    ),
    Mutant(
        "audits with the caches of the session",
        "with the salt of a principal",
        patches={"services.gateway.audit.auditor.audited_spec": _with_its_salt},
        theme=AUDITS,
    ),
)
