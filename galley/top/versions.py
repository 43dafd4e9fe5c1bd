"""Compute what a frame shows of the versions of drafts, and of audits. None stands for unknown. Pure.

The gain of a version is the share of the output tokens of its sessions that drafts proposed. Gateways count
it while a version is on trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from galley.common.metrics import catalogue
from galley.common.metrics.labels import DRAFT_VERSION, GATEWAY, NO_VERSION
from galley.core.audit import Verdict
from galley.core.versions.split import ARMS, Arm, Split
from galley.top.fleet import Reading, Registered
from galley.top.series import Samples, added, by, ratio, total

ALL_STABLE = "(all stable)"
"""Name of the row that counts all versions that are stable because no split names one."""


@dataclass(frozen=True, slots=True)
class DraftVersion:
    """One version over all gateways. `replicas` are the registered ones.

    Sessions and gain count since the gateways started.
    """

    name: str
    arm: Arm | None
    share: float | None
    replicas: int | None
    sessions: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class Audits:
    """Audits since the gateways started. `incidents` are tokens and sessions that must not differ, and do."""

    compared: float
    differing: float
    incidents: float


def versions_of(readings: Iterable[Reading], registered: Registered) -> list[DraftVersion]:
    """Return the versions, by arm; none if there is one at most, and no split."""
    readings = list(readings)
    now = added(one.now for one in readings if one.pool == GATEWAY)
    sessions = by(now, catalogue.DRAFT_VERSION_SESSIONS, DRAFT_VERSION.prometheus)
    shares = _shares(readings, registered.split)
    leased = [lease.version for lease in registered.drafts if lease.version]
    counted = {name for name, count in sessions.items() if count}
    if len(set(leased)) < 2 and not shares and not counted:
        return []
    split = registered.split
    found = [
        DraftVersion(
            ALL_STABLE if name == NO_VERSION else name,
            None if split is None else split.arm_of("" if name == NO_VERSION else name),
            shares.get(name),
            None if split is None or name == NO_VERSION else leased.count(name),
            sessions.get(name, 0.0),
            _gain(now, name),
        )
        for name in {*leased, *shares, *counted}
    ]
    return sorted(found, key=lambda row: (ARMS.index(row.arm) if row.arm else 0, row.name))


def audits_of(readings: Iterable[Reading]) -> Audits | None:
    """Return the audits of all gateways; None if no gateway counts them."""
    now = added(one.now for one in readings if one.pool == GATEWAY)
    compared = total(now, catalogue.AUDIT_TOKENS)
    if compared is None:
        return None
    damaged = total(now, catalogue.AUDIT_SESSIONS, verdict=Verdict.DAMAGED.value) or 0.0
    broken = total(now, catalogue.AUDIT_TOKENS, result="differs", build="deterministic") or 0.0
    return Audits(compared, total(now, catalogue.AUDIT_TOKENS, result="differs") or 0.0, broken + damaged)


def _shares(readings: Iterable[Reading], split: Split | None) -> dict[str, float]:
    """Return the shares by version: as the store has them, or else as gateways export them."""
    if split is None:
        shares: dict[str, float] = {}
        for one in readings:
            for name, share in by(one.now, catalogue.DRAFT_VERSION_SHARE, DRAFT_VERSION.prometheus).items():
                shares[name] = max(share, shares.get(name, 0.0))
        return shares
    if not split.canary and not split.stable:
        return {}
    canary = {split.canary: split.share} if split.canary else {}
    return canary | {split.stable or NO_VERSION: 1.0 - sum(canary.values())}


def _gain(now: Samples, name: str) -> float | None:
    labels = {DRAFT_VERSION.prometheus: name}
    return ratio(
        total(now, catalogue.DRAFT_VERSION_ACCEPTED_TOKENS, **labels),
        total(now, catalogue.DRAFT_VERSION_OUTPUT_TOKENS, **labels),
    )
