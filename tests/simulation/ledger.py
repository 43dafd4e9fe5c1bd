"""The invariants of every schedule: of logs, owners, streamed tokens and the tokens that clients get."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

from galley.core.admission.admission import Principal
from galley.core.answer.answer import SessionSpec
from galley.core.audit import AuditReport, Verdict
from galley.core.content import block_hashes, common_prefix_len
from galley.core.records import decode_records
from galley.core.store import Ownership, StoredSession
from services.gateway.audit.verification import AUDIT_PREFIX
from services.gateway.session import streams
from tests.simulation.system.loop import running_loop
from tests.simulation.truth import is_over, text_of, true_next

if TYPE_CHECKING:
    from tests.simulation.system.call import Call

BLOCK_TOKENS = 8
"""Size of a target's KV blocks."""
_KEPT_LINES = 4000
_MOST_REPLAYED = 32
"""Most tokens that a gateway replays before others get a turn: about 1 ms of work (decision 029)."""


class Violation(Exception):
    """A rule was violated."""


class _SessionRecord:
    """The log of one session, the build of each output token, and every earlier log.

    After a roll-back another build may confirm other tokens; until then no logged token changes.
    """

    def __init__(self, spec: SessionSpec, principal: Principal) -> None:
        self.spec = spec
        self.principal = principal
        self.log: list[int] = list(spec.prompt)
        self.builds: list[str] = []
        self.changes: set[int] = set()
        self.meta_bytes = 0
        self.former: list[list[int]] = []
        self.epochs: dict[int, bytes] = {}
        self.latest = 0
        self.aborted = False
        self.has_aborted = False
        self.acknowledged = 0
        """How many tokens the store has said to hold."""
        self.holder: Call | None = None
        """The call by which the session has its owner; None if that is not known."""
        self.held_since_s = 0.0
        self.ended_for: set[Call] = set()
        """The calls whose owner knows that the session has ended: it does not find out who owns it later."""
        self.excused: set[str] = set()
        """The clients whose stream an ended call has replaced, where no promise forbids that."""
        self.claimant: str | None = None
        """The client that came to own the session last by a call that it waited for."""

    def cut(self, length: int) -> None:
        self.former.append(list(self.log))
        output = max(0, length - len(self.spec.prompt))
        del self.log[length:]
        del self.builds[output:]
        self.changes = {index for index in self.changes if index < output}

    def held(self, index: int, tokens: Sequence[int]) -> bool:
        start = len(self.spec.prompt) + index
        end = start + len(tokens)
        sent = list(tokens)
        return self.log[start:end] == sent or any(log[start:end] == sent for log in self.former)


class Ledger:
    """All sessions of a schedule, and its trace, whose hash identifies the run."""

    def __init__(self, *, keep: bool = False) -> None:
        self.lines: list[str] = []
        self.events = 0
        self.met: Counter[str] = Counter()
        self.drafted_at: dict[str, float] = {}
        self.grew_at: dict[str, float] = {}
        self.owned_at: dict[str, float] = {}
        self.left_at: dict[str, float] = {}
        """When its latest owner left a session, or took one that it does not run yet."""
        self.made_at: dict[str, float] = {}
        self.deleted_at: dict[str, float] = {}
        self.was_streamed: set[str] = set()
        self.finished_at: dict[str, float] = {}
        """When a session finished or was aborted."""
        self.rests_until_s = 0.0
        self.roll_backs = 0
        self.stepped_s = -math.inf
        """When the clock of the store was last set."""
        self.stepped_back_s = -math.inf
        """When it was last set back."""
        self.damaged: set[str] = set()
        self.lost: set[str] = set()
        """The sessions of which the store has lost acknowledged tokens."""
        self.forgotten: set[str] = set()
        self.violation: str | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._records: dict[str, _SessionRecord] = {}
        self._output: Counter[str] = Counter()
        """The tokens in the logs of each principal; one that is lost and computed again counts once."""
        self._forward_s = 0.0
        self._salts: dict[str, bytes] = {}
        self._replayed = (0, 0, 0)
        self._guesses: set[bytes] = set()
        self._keep = keep
        self._loop = running_loop()
        self._hash = blake2b(digest_size=12)

    def note(self, line: str) -> None:
        self.events += 1
        stamped = f"{self._loop.now_s:9.6f} {line}"
        self._hash.update(stamped.encode())
        if self._keep and len(self.lines) < _KEPT_LINES:
            self.lines.append(stamped)

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()

    def violate(self, rule: str) -> NoReturn:
        """Raise Violation, and keep it: a caller may swallow it."""
        self.note(f"VIOLATION {rule}")
        self.violation = self.violation or rule
        if not self.failed.done():
            self.failed.set_result(None)
        raise Violation(rule)

    def unhandled(self, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Violation):
            with suppress(Violation):
                self.violate(f"unhandled: {context.get('message')}: {error!r}")

    def rests(self, draft: str, for_s: float) -> None:
        """Note that a gateway sends no requests to a draft for `for_s` seconds."""
        self.met["breaker opened"] += 1
        self.note(f"{draft} is left alone for {for_s:.3f} s")
        self.rests_until_s = max(self.rests_until_s, asyncio.get_running_loop().time() + for_s)

    def drafted(self, session_id: str) -> None:
        """Note that a draft got a request for the session."""
        self.drafted_at[session_id] = asyncio.get_running_loop().time()

    def opened(self, spec: SessionSpec, principal: Principal, salt: bytes) -> None:
        """Note that a session with this spec will be created; its principal has this salt."""
        self._records[spec.session_id] = _SessionRecord(spec, principal)
        self._salts[spec.session_id] = salt
        self._guesses.update(block_hashes(b"", spec.prompt, BLOCK_TOKENS))

    def audited(self, gateway: str, report: AuditReport) -> None:
        """Check a report: the answers are true, so only a log that a fault has damaged is an incident."""
        self.met[f"audit: {report.verdict.value}"] += 1
        self.met["audited tokens"] += report.compared
        self.note(f"{gateway} audited {report.session_id}: {report.verdict.value}, {report.compared} tokens")
        is_damaged = report.verdict is Verdict.DAMAGED and report.session_id not in self.damaged
        if report.differing or is_damaged:
            self.violate(f"{gateway} raises a false alarm over {report.session_id}: {report.verdict.value}")

    def requested(self, replica: str, session_id: str, salt: bytes) -> None:
        """Check that a replica gets the salt of the session's principal, and audits one of their own."""
        if session_id.startswith(AUDIT_PREFIX):
            if salt in self._salts.values():
                self.violate(f"{replica} gets {session_id} with the salt of a principal")
            return
        if self._salts[session_id] != salt:
            self.violate(f"{replica} gets {session_id} with the salt of another principal")

    def published(self, replica: str, cached_prefixes: frozenset[bytes]) -> None:
        """Check that who reads leases cannot confirm a guessed prompt."""
        self.met["published what it caches"] += bool(cached_prefixes)
        if not cached_prefixes.isdisjoint(self._guesses):
            self.violate(f"{replica} publishes by names that can be guessed what it caches")

    def rolled_back(
        self, before: Mapping[str, int], after: Mapping[str, int], copied: Mapping[str, int] | None = None
    ) -> None:
        """Note that the store has lost its latest writes: epochs may repeat.

        Its logs have the lengths `after` instead of `before`. If it must keep what was acknowledged, check
        that by the lengths that were `copied`. A session whose renewals are lost may have expired.
        """
        self.roll_backs += 1
        self.met["roll-back"] += 1
        self.note("redis rolled back")
        for session_id, session in self._records.items():
            has = session.acknowledged if copied is None else copied.get(session_id, 0)
            self._shortened(session, before.get(session_id, 0), after.get(session_id, 0), has)
            session.epochs.clear()
            session.latest = 0
            if session.holder is not None and copied is None:  # the claim may be lost, the owner before back
                session.excused.add(session.holder.near.name)
            session.holder = None

    def _shortened(self, session: _SessionRecord, before: int, after: int, copied: int) -> None:
        if after < session.acknowledged <= before:
            session_id = session.spec.session_id
            if copied < session.acknowledged:
                self.violate(
                    f"{session_id}: {session.acknowledged} tokens were acknowledged, {copied} are left"
                )
            self.met["lost what it had acknowledged"] += 1
            self.lost.add(session_id)
        session.acknowledged = min(session.acknowledged, after)

    def acknowledged(self, session_id: str, length: int) -> None:
        """Note that the store has told a gateway that it holds `length` tokens."""
        session = self._records[session_id]
        session.acknowledged = max(session.acknowledged, length)

    def stepped(self, by_s: float) -> None:
        """Note that the clock of the store was set: it does not know any more which call is late."""
        self._forward_s += max(0.0, by_s)
        self.stepped_s = asyncio.get_running_loop().time()
        if by_s < 0:
            self.stepped_back_s = self.stepped_s

    def made(self, session_id: str) -> None:
        """Note that the store creates, for a call, a session that it does not hold."""
        self._begin_again(session_id)

    def _begin_again(self, session_id: str) -> None:
        """Note that the epochs of a session start again.

        One that a set clock has made the store forget may have a stream, whose owner loses it.
        """
        self.made_at[session_id] = asyncio.get_running_loop().time()
        session = self._records[session_id]
        holder = session.holder
        if holder is not None and holder.waits and self.stepped_s >= session.held_since_s:
            session.excused.add(holder.near.name)
        session.has_aborted = False
        if session.epochs or len(session.log) > len(session.spec.prompt):
            self.met["made again"] += 1
            self.forgotten.add(session_id)
            self._cut(session, len(session.spec.prompt))
            session.meta_bytes = 0
            session.acknowledged = 0
            session.epochs.clear()
            session.latest = 0
            session.holder = None

    def made_anew(self, owner: Ownership) -> None:
        """Note that an owner has created a session that the store had lost."""
        self.met["made anew by its owner"] += 1
        session = self._records[owner.session_id]
        if session.has_aborted and not self.roll_backs:
            self.violate(f"{owner.session_id} was made anew after its abort")
        if owner.epoch < session.latest and self.stepped_s < 0:
            self.violate(f"{owner.session_id} was made anew by an owner that had been fenced")
        self._begin_again(owner.session_id)

    def owned(self, stored: StoredSession, by: str, call: Call | None) -> bool:
        """Note the owner that a session has by `call`; return True if it had another one."""
        owner = stored.ownership
        session = self._records[owner.session_id]
        is_new = session.epochs.get(owner.epoch) != owner.nonce
        if is_new and stored.state == "finished":
            session.ended_for |= {each for each in (session.holder, call) if each is not None}
        if is_new and call is not None:
            self._succeeds(session, call)
        self.owned_at[owner.session_id] = asyncio.get_running_loop().time()
        if is_new:
            self.left_at[owner.session_id] = self.owned_at[owner.session_id]
        self.note(f"{by} owns {owner.session_id} epoch {owner.epoch} at {len(stored.tokens)}")
        session.latest = max(session.latest, owner.epoch)
        self._has_one_owner(owner)
        self._is_true(owner.session_id, stored.tokens, stored.meta)
        return is_new

    def _succeeds(self, session: _SessionRecord, call: Call) -> None:
        """Check that a stream that is read is not fenced for a call that ended before it began."""
        former, session.holder = session.holder, call
        session.held_since_s = asyncio.get_running_loop().time()
        call.has_changed = True
        if call.waits:
            session.claimant = call.near.name
        ended_s = call.ended_s if call.near.alive else call.near.died_s
        if former is None or former is call or ended_s is None or not former.waits:
            return
        # Decision 028 promises nothing if clocks are set, gateways freeze, or calls come at about one time;
        # and of a call that comes late, only that it takes nothing from a later one of its stream.
        session.excused.add(former.near.name)
        is_other_stream = not call.stream or call.stream != former.stream
        excused = self.stepped_s > call.began_s or call.looks_newer or (call.came_late and is_other_stream)
        leeway_s = streams._LEEWAY_MS / 1000  # calls that follow each other so closely: decision 028
        if not excused and ended_s + leeway_s < former.began_s:
            self.violate(f"{former.near.name} is fenced for a call that {call.near.name} had given up")

    def fenced_s(self, session_id: str, call: Call | None) -> float:
        """Return for how long another call than this one has held the session; 0 if none is known to."""
        session = self._records[session_id]
        if session.holder in {None, call} or call in session.ended_for:
            return 0.0
        return asyncio.get_running_loop().time() - session.held_since_s

    def knows_end(self, session_id: str, call: Call | None) -> None:
        """Note that the owner by `call` has finished the session, or was told that it has ended."""
        if call is not None:
            self._records[session_id].ended_for.add(call)

    @contextmanager
    def running(self, owner: Ownership) -> Iterator[None]:
        """Note that an owner runs its session, and when it leaves it."""
        session = self._records[owner.session_id]
        if owner.epoch >= session.latest:
            self.left_at.pop(owner.session_id, None)
        try:
            yield
        finally:
            if owner.epoch >= session.latest:
                self.left_at[owner.session_id] = asyncio.get_running_loop().time()

    def is_succeeded(self, session_id: str, client: str) -> bool:
        """Return True if another client owned the session last and waited for it, or its loss was excused."""
        session = self._records[session_id]
        return client in session.excused or session.claimant not in {None, client}

    def committed(self, owner: Ownership, log: Sequence[int], meta: bytes) -> None:
        self.note(f"commit {owner.session_id} epoch {owner.epoch} to {len(log)}")
        self._may_write(owner)
        self._is_true(owner.session_id, log, meta)

    def finished(self, owner: Ownership, log: Sequence[int], meta: bytes, call: Call | None) -> None:
        self.note(f"finish {owner.session_id} epoch {owner.epoch} at {len(log)}")
        self._may_write(owner)
        self._is_true(owner.session_id, log, meta)
        session = self._records[owner.session_id]
        self.knows_end(owner.session_id, call)
        self.finished_at[owner.session_id] = asyncio.get_running_loop().time()
        if not is_over(session.spec, log):
            self.violate(f"{owner.session_id} was finished at {len(log)}, before its end")

    def _may_write(self, owner: Ownership) -> None:
        self._has_one_owner(owner)
        session = self._records[owner.session_id]
        if owner.epoch < session.latest:
            self.violate(f"{owner.session_id}: epoch {owner.epoch} wrote after a later claim")
        session.latest = max(session.latest, owner.epoch)

    def _has_one_owner(self, owner: Ownership) -> None:
        epochs = self._records[owner.session_id].epochs
        if epochs.setdefault(owner.epoch, owner.nonce) != owner.nonce:
            self.violate(f"{owner.session_id}: two owners in epoch {owner.epoch}")

    def _is_true(self, session_id: str, log: Sequence[int], meta: bytes) -> None:
        """Check that the log is a prefix of the one true answer; checked tokens are not computed again."""
        session = self._records[session_id]
        same = common_prefix_len(session.log, log)
        if same < len(session.log):
            if not self.roll_backs:
                self.violate(f"{session_id}: the log has lost or changed what it held")
            self._cut(session, max(same, len(session.spec.prompt)))
            session.meta_bytes = 0
        if len(log) == len(session.log):
            self.met["commit or claim of what is there"] += 1
        else:
            self.grew_at[session_id] = asyncio.get_running_loop().time()
            self._extend(session, log, meta)
        session.meta_bytes = len(meta)

    def _cut(self, session: _SessionRecord, length: int) -> None:
        """Shorten a log to `length` tokens. Those that come again do not count twice."""
        self._output[session.principal.name] -= len(session.log) - length
        session.cut(length)

    def replayed(self, gateway: str, turn: int, task: int) -> None:
        """Check that a gateway replays few tokens of stored answers without giving others a turn."""
        before_turn, before_task, count = self._replayed
        count = count + 1 if (before_turn, before_task) == (turn, task) else 1
        self._replayed = turn, task, count
        if count > _MOST_REPLAYED:
            self.violate(f"{gateway} replays more than {_MOST_REPLAYED} tokens before others get a turn")

    def _extend(self, session: _SessionRecord, log: Sequence[int], meta: bytes) -> None:
        spec, prompt_len = session.spec, len(session.spec.prompt)
        records = list(decode_records(meta[session.meta_bytes :]))
        new = records[len(records) - (len(log) - len(session.log)) :]
        for record in new:
            position = len(session.log)
            if position > prompt_len and is_over(spec, session.log):
                self.violate(f"{spec.session_id}: the log goes on after its end at {position}")
            if record.fingerprint is not None:
                self.met["another build"] += bool(session.builds)
                session.changes.add(len(session.builds))
            build = record.fingerprint or (session.builds[-1] if session.builds else "none")
            token = true_next(spec, build, session.log)
            if spec.grammar is not None:
                self.met["by a grammar"] += 1
            if token != log[position]:
                self.violate(
                    f"{spec.session_id}: position {position} is {log[position]}, the truth is {token}"
                )
            session.log.append(token)
            session.builds.append(build)
        if len(session.log) != len(log):
            self.violate(f"{spec.session_id}: {len(log)} tokens in the log, records of {len(session.log)}")
        self._keeps_rate(session.principal, len(new))

    def _keeps_rate(self, principal: Principal, tokens: int) -> None:
        """Check what a principal gets over all gateways.

        A roll-back may fill its bucket again. A clock that is set forward fills it as time does.
        """
        limits = principal.limits
        if limits.tokens_per_s is None:
            return
        self._output[principal.name] += tokens
        specs = [it.spec for it in self._records.values() if it.principal == principal]
        longest = max(spec.max_position - len(spec.prompt) for spec in specs)
        time_s = asyncio.get_running_loop().time() + self._forward_s
        most = (1 + self.roll_backs) * max(limits.burst, longest) + limits.tokens_per_s * time_s
        if self._output[principal.name] > most:
            self.violate(f"{principal.name} got {self._output[principal.name]} tokens, at most {most:.0f}")

    def streamed(self, session_id: str, index: int, tokens: Sequence[int], call: Call | None) -> None:
        """Check output tokens that a gateway sends for a call."""
        session = self._records[session_id]
        end = index + len(tokens)
        self.was_streamed.add(session_id)
        self.note(f"stream {session_id} [{index}, {end})")
        if not session.held(index, tokens):
            self.violate(f"{session_id}: streamed [{index}, {end}), which the log never held")
        deleted_s = self.deleted_at.get(session_id, math.inf)
        is_gone = self.made_at.get(session_id, 0.0) < deleted_s and not self.roll_backs
        if is_gone and call is not None and call.began_s > deleted_s:
            self.violate(f"{session_id}: streamed for a call that came after its deletion")

    def announced(self, session_id: str, index: int, end: int, *, is_new: bool) -> None:
        """Check that a new build was announced before output tokens [index, end) if it computed the first.

        No other of them may be the first of a build.
        """
        session = self._records[session_id]
        changed = [change for change in session.changes if max(index, 1) <= change < end]
        if not session.former and changed != [index] * is_new:
            self.violate(f"{session_id}: another build from {changed}, announced at {index}: {is_new}")

    def named(self, session_id: str, index: int, end: int, build: str) -> None:
        """Check that `build`, which an event names, has computed its output tokens [index, end)."""
        session = self._records[session_id]
        computed = set(session.builds[index:end])
        if not session.former and computed != {build}:
            self.violate(f"{session_id}: an event names {build}, its tokens are of {sorted(computed)}")

    def told(self, session_id: str, text: str) -> None:
        """Check the text of an answer that a gateway tells in one piece."""
        self.met["told an answer in one piece"] += 1
        session = self._records[session_id]
        start = len(session.spec.prompt)
        logs = (session.log, *session.former)
        if not any(text_of(session.spec, 0, log[start:]).startswith(text) for log in logs):
            self.violate(f"{session_id}: told {text!r}, which the log never held")

    def was_logged(self, session_id: str, tokens: Sequence[int]) -> bool:
        """Return True if the log has begun with these output tokens at some time."""
        return self._records[session_id].held(0, tokens)

    def aborting(self, session_id: str) -> None:
        self._records[session_id].aborted = True

    def has_aborted(self, session_id: str) -> None:
        """Note that the store has aborted a live session."""
        self._records[session_id].has_aborted = True
        self.finished_at[session_id] = asyncio.get_running_loop().time()

    def deleted(self, session_id: str) -> None:
        """Note that the store has removed a session for its principal."""
        self.met["deleted"] += 1
        self.note(f"{session_id} is deleted")
        self.deleted_at[session_id] = asyncio.get_running_loop().time()
        session = self._records[session_id]
        session.has_aborted = True
        if session.holder is not None:
            session.ended_for.add(session.holder)
            session.excused.add(session.holder.near.name)

    def was_aborted(self, session_id: str) -> bool:
        return self._records[session_id].aborted

    def has_ended(self, session_id: str, seen: Sequence[int], *, aborted: bool) -> None:
        session = self._records[session_id]
        if aborted:
            if not session.aborted:
                self.violate(f"{session_id} was aborted by nobody")
        elif not is_over(session.spec, [*session.spec.prompt, *seen]):
            self.violate(f"{session_id} ended after {len(seen)} tokens")
