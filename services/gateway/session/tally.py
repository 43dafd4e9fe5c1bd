"""The counts of one session in a trial of a draft's version."""

from __future__ import annotations

from collections.abc import Callable

from galley.core.names import LOCAL_SOURCES, LOOKUP
from galley.core.session.events import RoundEnded
from galley.core.session.round import SpeculationStats, plain_ns
from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.split import group_of
from services.gateway.replicas.draft_session import DraftSession

_OWN_SOURCES = (*LOCAL_SOURCES, LOOKUP)


class SessionTally:
    """Count the rounds of a session, whatever draft serves it; a session without a round counts for nothing.

    Tokens that the session drafted itself do not count as accepted ones: no draft proposed them. Rounds that
    read the prompt have no time, as in the live speed-up.
    """

    def __init__(
        self, draft: DraftSession, tenant_salt: bytes, report: Callable[[VersionCounts], None]
    ) -> None:
        self._draft = draft
        self._group = group_of(tenant_salt)
        self._report = report
        self._output = self._accepted = 0
        self._round_ns = self._plain_ns = self._draft_ns = 0

    def add(self, done: RoundEnded) -> None:
        self._output += done.confirmed
        for of in done.sources:
            if of.source not in _OWN_SOURCES:
                self._accepted += of.accepted
        self._draft_ns += done.draft.compute_ns
        if not done.reads_prompt:
            self._round_ns += done.ended_ns - done.started_ns
            self._plain_ns += plain_ns(done)

    def stop(self, stats: SpeculationStats) -> None:
        if not self._output:
            return
        counts = session_counts(
            output_tokens=self._output,
            accepted=self._accepted,
            proposals=stats.proposals,
            failures=self._draft.failures,
            round_ns=self._round_ns,
            plain_ns=self._plain_ns,
            draft_compute_ns=self._draft_ns,
        )
        self._report(counts.of_group(self._group))
