"""Propose known answers from a file, with some wrong tokens, for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from weakref import WeakKeyDictionary

from galley.core.noise import SPOIL, words
from galley.core.trees import ROOT
from services.draft.strategies.base import DraftJob, DraftSession, Proposal


class OracleStrategy:
    """Know whole sessions, prompt and answer, from `answers`: one JSON object {"tokens": [...]} a line.

    A token is replaced by a wrong one with probability `spoil`. The noise of (seed, position) decides, so the
    result is the same for every k and repetition. In a tree the candidate of rank r is the right
    one with probability spoil^r (1 - spoil). New lines of the file are read when a session has no match.
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
        seed, width = job.slice.sampling.seed, max(1, job.width)
        candidates = [self._candidates(token, seed, start + i, width) for i, token in enumerate(known)]
        if width > 1:
            return self._tree(job, candidates)
        tokens = [token for (token,) in candidates]
        return Proposal(job, tokens, [(1 - self._spoil) ** (i + 1) for i in range(len(tokens))], done=True)

    def _candidates(self, token: int, seed: int, position: int, width: int) -> list[int]:
        """Return at most `width` candidates for a position, among which `token` has the rank that it drew."""
        word = int(words(seed, position, [0], SPOIL)[0])
        rank = next((rank for rank in range(width) if word >= self._spoil ** (rank + 1) * 2**32), width)
        # Wrong tokens that exist in every vocabulary with this token and one more.
        candidates = [*range(token - 1, max(-1, token - 1 - width), -1)] or [1]
        return [*candidates[:rank], token, *candidates[rank:]][:width] if rank < width else candidates[:width]

    def _tree(self, job: DraftJob, candidates: Sequence[Sequence[int]]) -> Proposal:
        """Propose the likeliest nodes of the tree that has `candidates[d]`, in order of rank, at depth d."""
        proposal = Proposal(job, done=True)
        # The negative survival; the parent, depth and rank of a node, which order nodes as likely.
        waiting = [(-1.0, ROOT, 0, 0)] if candidates else []
        while waiting and len(proposal.tokens) < job.k:
            survival, parent, depth, rank = heappop(waiting)
            if rank + 1 < len(candidates[depth]) and self._spoil > 0.0:
                heappush(waiting, (survival * self._spoil, parent, depth, rank + 1))
            if depth + 1 < len(candidates):
                heappush(waiting, (survival * (1 - self._spoil), len(proposal.tokens), depth + 1, 0))
            proposal.tokens.append(candidates[depth][rank])
            proposal.survival.append(-survival * (1 - self._spoil))
            proposal.parents.append(parent)
        return proposal

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
