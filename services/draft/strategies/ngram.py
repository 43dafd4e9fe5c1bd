"""Prompt lookup: what followed the last tokens before, in the session or in recent answers of its kind.

Answers are looked up in by sessions of their own tenant and workload alone. A match is trusted as far as
matches of its length have been right there.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from services.core.calibration import Calibration
from services.core.hindsight import Hindsight
from services.core.last_used import LastUsed
from services.core.lookup import AnswerLookup, RecentAnswers, SessionLookup
from services.draft.strategies.base import Guess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.core.lookup import Found
    from services.draft.strategies.base import DraftJob, DraftSession

# Of sessions: the tenant's salt and the workload.
Kind: TypeAlias = tuple[bytes, str]

# Kinds whose answers and chances are kept: 8 MB each at most.
_MOST_KINDS = 32
# From which length on a match is of which class.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# Before anything is measured, a match of n tokens goes on with chance n / (n + this): in the session's own
# tokens, and in recent answers.
_OWN_DOUBT = 2
_ANSWERS_DOUBT = 4
_STRENGTH = 10.0
# A token that survives more seldom is not worth its bytes.
_LEAST_SURVIVAL = 0.02
# Tokens of a session that one step follows, some milliseconds: a long prompt must not hold up the others.
_MOST_AT_ONCE = 1024
# Of the tokens known already, how many are compared again beside those that the slice brings.
_TAIL = 32


class _Followed:
    """One session's own tokens, and its proposals that wait for their verdict."""

    def __init__(self) -> None:
        self.lookup = SessionLookup()
        self.hindsight = Hindsight()


class _KindOfSession:
    """What sessions of one kind share: their answers, and what matches have been worth."""

    def __init__(self, overall: tuple[Calibration, Calibration] | None = None) -> None:
        overall = overall or _overall()
        self.answers = RecentAnswers()
        # Kept here, so that nobody else keeps the answers of a kind that is dropped.
        self.lookups: WeakKeyDictionary[DraftSession, AnswerLookup] = WeakKeyDictionary()
        self.own_chances = _chances(_OWN_DOUBT, overall[0])
        self.answer_chances = _chances(_ANSWERS_DOUBT, overall[1])

    def lookup_of(self, session: DraftSession) -> AnswerLookup:
        lookup = self.lookups.get(session)
        if lookup is None:
            lookup = self.lookups[session] = AnswerLookup(self.answers)
        return lookup


class NgramStrategy:
    """A guess is done when it begins, but where many tokens are new: those are followed a piece a step."""

    def __init__(self) -> None:
        self._sessions: WeakKeyDictionary[DraftSession, _Followed] = WeakKeyDictionary()
        self._kinds: LastUsed[Kind, _KindOfSession] = LastUsed(_KindOfSession, _MOST_KINDS)
        self._overall: LastUsed[bytes, tuple[Calibration, Calibration]] = LastUsed(_overall, _MOST_KINDS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        guesses = [Guess(job) for job in jobs]
        self.advance(guesses)
        return guesses

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`."""
        for guess in guesses:
            self._advance(guess)

    def _advance(self, guess: Guess) -> None:
        job = guess.job
        overall = self._overall.of(job.slice.key[0])
        kind = self._kinds.of((job.slice.key[0], job.workload), lambda: _KindOfSession(overall))
        confirmed = job.session.tokens[: job.session.confirmed]
        ahead = job.session.tokens[job.session.confirmed :]
        followed = self._follow(job, kind, confirmed)
        guess.done = len(followed.lookup) == len(confirmed)
        if not guess.done:
            return
        found, chances = _look_up(followed, kind.lookup_of(job.session), kind, ahead, job.k)
        tokens = _up_to_a_stop(found.tokens, job.slice.stop_token_ids)
        guess.survival = _survival(chances, found.matched, len(tokens))
        guess.tokens = list(tokens[: len(guess.survival)])
        if guess.tokens:
            saw = partial(_saw, chances, found.matched)
            followed.hindsight.expect(len(confirmed), ahead, tuple(guess.tokens), saw)

    def _follow(self, job: DraftJob, kind: _KindOfSession, confirmed: list[int]) -> _Followed:
        """The session nearer to its confirmed tokens; begun anew if they are not those that it had."""
        followed = self._sessions.get(job.session)
        # What stands before the slice its hash has vouched for.
        if followed is None or not followed.lookup.agrees(
            confirmed, max(0, min(job.slice.start, len(followed.lookup) - _TAIL))
        ):
            followed = self._sessions[job.session] = _Followed()
            kind.lookups.pop(job.session, None)
        followed.hindsight.confirm(confirmed)
        at = len(followed.lookup)
        followed.lookup.follow(confirmed[at : at + _MOST_AT_ONCE])
        kind.lookup_of(job.session).follow(confirmed, job.slice.prompt_len)
        return followed


def _look_up(
    followed: _Followed, answers: AnswerLookup, kind: _KindOfSession, ahead: list[int], k: int
) -> tuple[Found, Calibration]:
    """What followed the longer match, and the chances of such matches."""
    own = followed.lookup.find(ahead, k)
    answer = answers.find(ahead, k)
    if answer.matched > own.matched:
        return answer, kind.answer_chances
    return own, kind.own_chances


def _survival(chances: Calibration, matched: int, count: int) -> list[float]:
    """Of at most `count` tokens after such a match, which grows with each that comes true."""
    survival: list[float] = []
    surviving = 1.0
    for i in range(count):
        surviving *= chances.chance(_class_of(matched + i))
        if surviving < _LEAST_SURVIVAL:
            break
        survival.append(surviving)
    return survival


def _saw(chances: Calibration, matched: int, i: int, accepted: bool) -> None:
    chances.saw(_class_of(matched + i), accepted)


def _overall() -> tuple[Calibration, Calibration]:
    """Of a tenant, whatever the workload: of matches in the session itself, and in answers."""
    return _chances(_OWN_DOUBT), _chances(_ANSWERS_DOUBT)


def _chances(doubt: int, overall: Calibration | None = None) -> Calibration:
    return Calibration(len(_LENGTHS), [n / (n + doubt) for n in _LENGTHS], _STRENGTH, overall)


def _class_of(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1


def _up_to_a_stop(tokens: tuple[int, ...], stop_token_ids: frozenset[int]) -> tuple[int, ...]:
    if stop_token_ids.isdisjoint(tokens):
        return tokens
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in stop_token_ids)]
