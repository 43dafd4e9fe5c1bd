"""Propose known answers from a file, with some wrong tokens, for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from galley.core.noise import SPOIL, words
from services.draft.strategies.base import DraftJob, DraftSession, Proposal


class OracleStrategy:
    """Know whole sessions, prompt and answer, from `answers`: one JSON object {"tokens": [...]} a line.

    A token is replaced by a wrong one with probability `spoil`. The noise of (seed, position) decides, so the
    result is the same for every k and repetition. New lines of the file are read when a session has no match.
    """

    def __init__(self, answers: Path, spoil: float) -> None:
        self._file = answers
        self._spoil = spoil
        self._read_bytes = 0
        self._answers: list[list[int]] = []
        self._matched: WeakKeyDictionary[DraftSession, list[int]] = WeakKeyDictionary()

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [self._begin(job) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None: ...

    def _begin(self, job: DraftJob) -> Proposal:
        # Taken by position, so that wrong draft tokens ahead of the target change nothing.
        start = len(job.session.tokens)
        known = (self._answer_to(job.session) or [])[start : start + job.k]
        seed = job.slice.sampling.seed
        tokens = [self._spoiled(token, seed, start + i) for i, token in enumerate(known)]
        return Proposal(job, tokens, [(1 - self._spoil) ** (i + 1) for i in range(len(tokens))], done=True)

    def _spoiled(self, token: int, seed: int, position: int) -> int:
        word = int(words(seed, position, [0], SPOIL)[0])
        if word >= self._spoil * 2**32:
            return token
        # A wrong token that exists in every vocabulary of at least two.
        return token - 1 if token else 1

    def _answer_to(self, session: DraftSession) -> list[int] | None:
        confirmed = session.tokens[: session.confirmed]
        answer = self._matched.get(session)
        if answer is not None and _has_prefix(answer, confirmed):
            return answer
        answer = self._search(confirmed)
        if answer is None and self._read_on():
            answer = self._search(confirmed)
        if answer is not None:
            self._matched[session] = answer
        return answer

    def _search(self, tokens: list[int]) -> list[int] | None:
        # The latest line wins.
        return next((answer for answer in reversed(self._answers) if _has_prefix(answer, tokens)), None)

    def _read_on(self) -> bool:
        """Read the complete lines that were added; return True if there were any."""
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            added = file.read()
        added = added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(added)
        self._answers += [json.loads(line)["tokens"] for line in added.splitlines() if line.strip()]
        return bool(added)


def _has_prefix(answer: list[int], tokens: list[int]) -> bool:
    return answer[: len(tokens)] == tokens
