"""Token by token, what a lookup or a model says, whichever has been right more often of late.

Where a lookup is nearly sure, the model is not asked: a copied passage costs no step. Elsewhere the model
takes a step, and the likelier of both is guessed (`opinions.py`); a token that both say is surer than either
alone. So a draft copies while there is something to copy, and goes on by itself at once where there is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from galley.core.content import common_prefix_len
from galley.core.lru import LruCache
from services.draft.strategies.base import DraftJob, DraftSession, Guess
from services.draft.strategies.drafted import Drafted
from services.draft.strategies.lookups import Following, Kind, Lookups, kind_of
from services.draft.strategies.matches import PRIOR, class_of
from services.draft.strategies.opinions import Opined, Opinions, Said
from services.draft.strategies.steps import ModelSteps, SteppedGuess, rules_of

_WORKLOADS = 256
# A token that survives more seldom is not worth a step.
_LEAST_SURVIVAL = 0.03


@dataclass(slots=True)
class _Session:
    """What is known of a session at the last look: `known` are its tokens and its guesses.

    `opined` is of its workload; `following` is None while the lookups still follow a long prompt.
    """

    opined: Opined
    following: Following | None = None
    known: list[int] = field(default_factory=list)
    drafted: Drafted[Opinions] = field(default_factory=Drafted)


class HybridStrategy:
    """`steps` are those of the model; what came of both is learnt by tenant and workload."""

    def __init__(self, lookups: Lookups, steps: ModelSteps) -> None:
        self._lookups = lookups
        self._steps = steps
        self._sessions: WeakKeyDictionary[DraftSession, _Session] = WeakKeyDictionary()
        self._opined: LruCache[Kind, Opined] = LruCache(Opined, _WORKLOADS)
        self._overall: LruCache[bytes, Opined] = LruCache(Opined, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        return [self._begin(job) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`; while a long prompt is being fed, its guess gets no token."""
        for drawn in self._steps.advance([guess for guess in guesses if isinstance(guess, SteppedGuess)]):
            said = Opinions(self._found(drawn.guess), Said(drawn.token, drawn.bucket))
            self._add(drawn.guess, said)
            self._copy(drawn.guess)

    def _begin(self, job: DraftJob) -> SteppedGuess:
        guess, tokens = self._steps.open(job), job.session.tokens
        session = self._look_at(job)
        for verdict in session.drafted.compare(job.session, common_prefix_len(session.known, tokens)):
            session.opined.saw(verdict.evidence, verdict.confirmed)
        session.known = list(tokens)
        session.following = self._lookups.follow(job)
        guess.limit = job.k  # a lookup knows no window
        guess.settle()
        for token, said in session.drafted.ready(len(tokens), guess.limit, rules_of(job.slice)):
            guess.add(token, session.opined.choose(said)[1])
            session.known.append(token)
        self._copy(guess)
        self._steps.cut_back(guess)
        return guess

    def _look_at(self, job: DraftJob) -> _Session:
        overall = self._overall.get(job.slice.key[0])
        opined = self._opined.get(kind_of(job), overall.narrowed)
        session = self._sessions.setdefault(job.session, _Session(opined))
        session.opined = opined
        return session

    def _found(self, guess: SteppedGuess) -> Said | None:
        """What the lookup says of the next token."""
        session = guess.job.session
        following = self._sessions[session].following
        if following is None:
            return None
        match = following.find([*session.tokens[session.confirmed :], *guess.tokens], 1)
        if not match.found.tokens:
            return None
        by = class_of(match) + (0 if guess.job.slice.sampling.greedy else len(PRIOR))
        return Said(match.found.tokens[0], by)

    def _copy(self, guess: SteppedGuess) -> None:
        """Go on with what the lookup is sure of; done where the model cannot go on after it."""
        opined = self._sessions[guess.job.session].opined
        while not guess.done:
            found = self._found(guess)
            if found is None or not opined.sure(found):
                guess.done = len(guess.tokens) >= guess.reach
                return
            self._add(guess, Opinions(found, None))

    def _add(self, guess: SteppedGuess, said: Opinions) -> None:
        session = self._sessions[guess.job.session]
        token, chance = session.opined.choose(said)
        session.drafted.append(token, said)
        session.known.append(token)
        guess.add(token, chance)
        guess.done = guess.done or guess.survival[-1] < _LEAST_SURVIVAL
