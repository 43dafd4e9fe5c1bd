"""Learn from the traffic, in cycles: read the spool, train, compare, offer the better draft as a canary.

A cycle holds the token ids in memory only: the drafts and the record are all that it leaves. A cycle that is
stopped leaves nothing, and begins anew. It can be replayed while its sessions are still in the spool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from galley.common.draft_loading import draft_version
from galley.common.logs import get_logger
from galley.common.registry.spool import READ_AT_ONCE, LearningSpool, SpooledSession
from galley.common.server.process import run_unless
from galley.core.errors import GalleyError, InvalidField
from galley.distill.follow.canaries import Canaries
from galley.distill.follow.comparison import FEWEST_SESSIONS, Comparison, Measured
from galley.distill.follow.cycle import Learner, Trained
from galley.distill.follow.inputs import Chosen, Inputs, choose, usable
from galley.distill.follow.journal import Journal
from galley.distill.follow.options import FollowOptions
from galley.distill.training.training import Progress

_READ_PARTS, _HELD_OUT_PARTS = 2, 5
"""A cycle reads up to twice the tokens that it trains on, prompts included, and a fifth to measure on."""
_LEAST_HELD_OUT = 20_000
_MOST_PRINCIPALS = 64
_READ_MARGIN, _LEAST_READ = 2, 4096
"""Some of what is read is left out. Each principal has its part of twice what is needed, or this much."""
_LOG_EVERY_STEPS = 50

_log = get_logger(__name__)


class Stopped(Exception):
    """The training ends here, as it was told."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The version that a cycle made, and the one that its replay made: the same, if all is as it was."""

    cycle: int
    recorded: str
    version: str


class Follower:
    def __init__(
        self,
        options: FollowOptions,
        learner: Learner,
        journal: Journal,
        spool: LearningSpool,
        canaries: Canaries,
    ) -> None:
        self._options = options
        self._learner = learner
        self._journal = journal
        self._spool = spool
        self._canaries = canaries
        self._start_digest = draft_version(options.start)
        self._start_version = options.start_version or self._start_digest
        self._corpus_sha256 = [sha256(path.read_bytes()).hexdigest() for path in options.corpus]
        self._waits_for = ""
        self._turns = 0

    async def run(self, stop: asyncio.Event, cycles: int = 0) -> None:
        """Begin cycles until `stop` is set; with `cycles`, this many, also if they have nothing to do."""
        count = 0
        while not stop.is_set():
            try:
                await self._begin(stop)
            except Stopped:
                _log.info("cycle stopped")
                return
            except (GalleyError, OSError) as error:  # the store is away, or the disk is full
                _log.warning("cycle failed", error=str(error))
            count += 1
            if count == cycles:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.every_s):
                    await stop.wait()

    async def replay(self, number: int, stop: asyncio.Event) -> Replayed:
        """Repeat the training of a cycle from the sessions that it read, and offer nothing.

        Raise InvalidField if its sessions or its first draft are gone, and Stopped once `stop` is set.
        """
        cycle = self._journal.cycle(number)
        self._refuse_other_options(cycle)
        folder = self._folder_of(cycle["present"])
        if folder is None:
            raise InvalidField("replay", f"the draft {cycle['present']} is not kept any more")
        inputs = await self._inputs_of(cycle)
        trained = await self._train(stop, folder, inputs, cycle["seed"])
        with TemporaryDirectory() as scratch:
            await asyncio.to_thread(self._learner.write, trained.draft, Path(scratch))
            return Replayed(number, cycle["version"], draft_version(Path(scratch)))

    # ------------------------------------------------------------------------------------ a cycle --

    async def _begin(self, stop: asyncio.Event) -> None:
        """Run a cycle, unless there is a reason to wait."""
        await self._canaries.give_up()
        split = (await self._canaries.state()).split
        present = split.stable or self._start_version
        folder = self._folder_of(present)
        if folder is None:
            self._wait(f"the stable version {present} was not trained here")
            return
        await run_unless(stop, self._canaries.restore(folder, present, self._folder_of, self._is_ours))
        if stop.is_set():
            raise Stopped
        if problem := await self._canaries.problem(self._is_ours):
            self._wait(problem)
            return
        inputs = await self._inputs()
        new, held_out = self._new_tokens(inputs), inputs.held_out_sessions
        if held_out < FEWEST_SESSIONS or new < self._options.new_tokens:
            self._wait(
                "there is too little that the last cycle has not read",
                new_tokens=new,
                fewest_new_tokens=self._options.new_tokens,
                held_out_sessions=round(held_out, 1),
                fewest_held_out_sessions=FEWEST_SESSIONS,
            )
            return
        self._waits_for = ""
        number = self._journal.next_cycle
        seed = self._options.seed + number
        _log.info("cycle began", cycle=number, present=present, sessions=len(inputs.train))
        trained = await self._train(stop, folder, inputs, seed)
        version = await asyncio.to_thread(self._written, trained)
        refusal = trained.comparison.problem() or await run_unless(stop, self._offer(trained, version))
        if refusal is None:
            raise Stopped
        decision = "not offered" if refusal else "offered"
        reason = refusal or str(trained.comparison.all)
        self._journal.append(
            {
                "cycle": number,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "decision": decision,
                "reason": reason,
                "present": self._start_digest if self._is_start(present) else present,
                "version": version,
                "seed": seed,
                "start": self._start_digest,
                "options": self._options.of_training(),
                "corpus_sha256": self._corpus_sha256,
                "inputs": self._described(inputs),
                "answer_tokens_seen": trained.seen,
                "training_s": round(trained.train_s, 1),
                "acceptance": _figures(trained.comparison),
            }
        )
        self._journal.prune({present, version})
        _log.info("cycle ended", cycle=number, version=version, decision=decision, reason=reason)

    def _wait(self, reason: str, **facts: float) -> None:
        if reason != self._waits_for:
            _log.info("cycle waits", reason=reason, **facts)
        self._waits_for = reason

    async def _offer(self, trained: Trained, version: str) -> str:
        folder = self._journal.folder_of(version)
        if folder is None:
            return f"the draft {version} is gone"
        return await self._canaries.offer(folder, version, str(trained.comparison.all), self._is_ours)

    async def _train(self, stop: asyncio.Event, folder: Path, inputs: Inputs, seed: int) -> Trained:
        def report(now: Progress) -> None:
            if stop.is_set():
                raise Stopped
            if now.step % _LOG_EVERY_STEPS == 0:
                _log.info("training", answer_tokens_seen=now.seen, loss=round(now.loss, 3))

        def train() -> Trained:
            return self._learner.train(self._learner.read(folder), inputs, seed, report)

        return await asyncio.to_thread(train)

    def _written(self, trained: Trained) -> str:
        """Store a draft; return its version."""
        unfinished = self._journal.unfinished
        self._learner.write(trained.draft, unfinished)
        version = draft_version(unfinished)
        self._journal.keep(unfinished, version)
        return version

    def _is_ours(self, version: str) -> bool:
        """Return True for the draft in --start, and for one that was trained here."""
        return self._is_start(version) or self._journal.has_made(version)

    def _folder_of(self, version: str) -> Path | None:
        return self._options.start if self._is_start(version) else self._journal.folder_of(version)

    def _is_start(self, version: str) -> bool:
        return version in {self._start_version, self._start_digest}

    # ------------------------------------------------------------------------------------- inputs --

    async def _inputs(self) -> Inputs:
        """Return what a cycle would read now. Principals go by their pseudonyms from here on."""
        tokens = self._options.cycle_tokens
        train, held_out = tokens * _READ_PARTS, max(_LEAST_HELD_OUT, tokens // _HELD_OUT_PARTS)
        principals = self._turn(await self._spool.principals())
        most = max(_LEAST_READ, _READ_MARGIN * (train + held_out) // max(1, len(principals)))
        spooled = {
            self._journal.pseudonym(principal): await self._newest(principal, most)
            for principal in principals
        }
        return await asyncio.to_thread(choose, spooled, self._learner.target.vocab, train, held_out)

    def _turn(self, principals: Sequence[str]) -> Sequence[str]:
        """Return the principals whose turn it is; with many of them, others each time."""
        first = self._turns * _MOST_PRINCIPALS
        self._turns += 1
        count = min(len(principals), _MOST_PRINCIPALS)
        return [principals[(first + place) % len(principals)] for place in range(count)]

    async def _newest(self, principal: str, most_tokens: int) -> Sequence[SpooledSession]:
        """Return the newest sessions of a principal, of `most_tokens` together or a few more."""
        sessions: dict[str, SpooledSession] = {}
        first = read = 0
        while read < most_tokens:
            ids = await self._spool.sessions(principal, first, READ_AT_ONCE)
            if not ids:
                break
            for session in await self._spool.read(principal, ids):
                # Those that come meanwhile move others to later places.
                sessions.setdefault(session.session_id, session)
                read += len(session.tokens)
            first += len(ids)
        return list(sessions.values())

    async def _inputs_of(self, cycle: dict[str, Any]) -> Inputs:
        """Return what a recorded cycle read. Raise InvalidField if some of it is gone."""
        marks = cycle["inputs"]["train"], cycle["inputs"]["held_out"]
        recorded = {mark for part in marks for mark in part}
        held: dict[str, Chosen] = {}
        for principal in await self._spool.principals():
            first = 0
            while ids := await self._spool.sessions(principal, first):
                first += len(ids)
                read = [one for one in ids if self._journal.mark(one) in recorded]
                for session in await self._spool.read(principal, read):
                    chosen = usable(self._journal.pseudonym(principal), session)
                    held[self._journal.mark(session.session_id)] = chosen
        gone = len(recorded) - len(held)
        if gone:
            raise InvalidField(
                "replay",
                f"{gone} of {len(recorded)} sessions are gone: they expire after a day, or were deleted",
            )
        train, held_out = ([held[mark] for mark in part] for part in marks)
        if self._journal.digest([*train, *held_out]) != cycle["inputs"]["digest"]:
            raise InvalidField("replay", "the sessions are not those that the cycle read")
        return Inputs(train, held_out)

    def _new_tokens(self, inputs: Inputs) -> int:
        cycles = self._journal.cycles
        read = set(cycles[-1]["inputs"]["train"]) if cycles else set()
        new = [one for one in inputs.train if self._journal.mark(one.session.session_id) not in read]
        return sum(one.answer_len for one in new)

    def _described(self, inputs: Inputs) -> dict[str, Any]:
        def marks(part: Sequence[Chosen]) -> list[str]:
            return [self._journal.mark(one.session.session_id) for one in part]

        return {
            "digest": self._journal.digest([*inputs.train, *inputs.held_out]),
            "principals": {name: asdict(counts) for name, counts in inputs.counts.items()},
            "train": marks(inputs.train),
            "held_out": marks(inputs.held_out),
        }

    def _refuse_other_options(self, cycle: dict[str, Any]) -> None:
        now = self._options.of_training()
        for name, value in cycle["options"].items():
            if now[name] != value:
                raise InvalidField(name, f"must be {value}, as in the cycle, got {now[name]}")
        if self._start_digest != cycle.get("start", self._start_digest):
            raise InvalidField("start", f"must be the draft {cycle['start']}, as in the cycle")
        if self._corpus_sha256 != cycle["corpus_sha256"]:
            raise InvalidField("corpus", "must be the files that the cycle read")


def _figures(comparison: Comparison) -> dict[str, Any]:
    parts = {"all": comparison.all, **comparison.parts}
    return {name: _measured(part) for name, part in parts.items()}


def _measured(part: Measured) -> dict[str, Any]:
    error = part.difference.error
    return {
        "sessions": round(part.difference.sessions, 1),
        "present": round(part.present, 4),
        "new": round(part.new, 4),
        "difference": round(part.difference.value, 4),
        "error": round(error, 4) if error < 1 else None,
    }
