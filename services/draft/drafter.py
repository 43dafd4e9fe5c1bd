"""The draft's step: bring each session's tokens up to date, let each strategy propose for its own jobs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from services.common.sessions import SessionTable
from services.common.status import log_internal
from services.core.content import Miss, look_up, prefix_hash
from services.core.errors import Broken, GalleyError
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.common.slices import Slice
    from services.core.content import SessionKey


@dataclass(frozen=True, slots=True)
class ProposeJob:
    """A validated item: at most `k` tokens by the strategy of this name, which is offered."""

    slice: Slice
    k: int
    strategy: str


@dataclass(frozen=True, slots=True)
class Proposed:
    """Guesses for positions [position, position + len), after a prefix of this hash."""

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    kv_len: int


# An error is the outcome of its own job alone.
ProposeOutcome: TypeAlias = "Proposed | Miss | GalleyError"


class Drafter:
    """Sessions' tokens and the strategies that guess how they go on; used by one thread at a time."""

    def __init__(self, strategies: Mapping[str, Strategy], *, max_sessions: int, max_tokens: int) -> None:
        self._strategies = strategies
        self._sessions: SessionTable[DraftSession] = SessionTable(
            DraftSession, max_sessions=max_sessions, max_tokens=max_tokens
        )

    def step(self, jobs: Sequence[ProposeJob]) -> list[ProposeOutcome]:
        """Propose for the jobs, all of different sessions; the outcome of each, in order."""
        busy = frozenset(job.slice.key for job in jobs)
        opened = [self._open(job, busy) for job in jobs]
        outcomes: list[ProposeOutcome | None] = [None if isinstance(o, DraftJob) else o for o in opened]
        for name, indexes in _by_strategy(jobs).items():
            mine = [(i, job) for i in indexes if isinstance(job := opened[i], DraftJob)]
            for (i, job), proposal in zip(mine, self._propose(name, [job for _, job in mine]), strict=True):
                outcomes[i] = _conclude(job, proposal)
        return [outcome or Broken("no outcome") for outcome in outcomes]

    def _open(self, job: ProposeJob, busy: frozenset[SessionKey]) -> DraftJob | Miss | GalleyError:
        """The session with the item's tokens, or why there is none."""
        asked = job.slice
        session = self._sessions.peek(asked.key)
        found = look_up(session.tokens if session else (), asked.start, asked.tokens, asked.prefix_hash)
        if isinstance(found, Miss):
            return found
        # The target takes no draft token for the last position: its own stands there.
        k = min(job.k, asked.max_position - asked.position - 1)
        try:
            session = self._sessions.admit(asked.key, asked.position + k, busy)
        except GalleyError as overloaded:
            return overloaded
        session.tokens[asked.start :] = asked.tokens
        return DraftJob(asked, session, k)

    def _propose(self, strategy: str, jobs: list[DraftJob]) -> list[Proposal]:
        """What fails as a whole fails for the jobs of this strategy alone."""
        try:
            return self._strategies[strategy].propose(jobs) if jobs else []
        except Exception as error:  # noqa: BLE001  # a strategy is a plug-in: whatever it does stays here
            log_internal(error, strategy=strategy)
            return [error if isinstance(error, GalleyError) else Broken(f"{strategy} failed") for _ in jobs]


def _by_strategy(jobs: Sequence[ProposeJob]) -> dict[str, list[int]]:
    indexes: dict[str, list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        indexes[job.strategy].append(i)
    return indexes


def _conclude(job: DraftJob, proposal: Proposal) -> Proposed | GalleyError:
    if isinstance(proposal, GalleyError):
        return proposal
    tokens = job.session.tokens
    return Proposed(len(tokens), prefix_hash(tokens), tuple(proposal[: job.k]), len(tokens))
