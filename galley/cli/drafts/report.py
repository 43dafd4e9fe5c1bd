"""The report of `galley drafts list`: versions, their replicas and sessions, and the decision of the rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from galley.common.printable import one_line
from galley.core.routing.choice import DraftLease
from galley.core.versions.counts import Estimate, VersionCounts
from galley.core.versions.rule import Rule, decide
from galley.core.versions.split import ARMS, Arm, Split
from galley.core.versions.state import MAX_REASON, VersionEvent, VersionState
from galley.top.versions import ALL_STABLE

Z = 1.96
"""Standard errors of the intervals: 95 % of them contain the true value."""


@dataclass(frozen=True, slots=True)
class Row:
    """A version. The stable versions without a name are counted together, under the empty one."""

    version: str
    arm: Arm
    share: float
    replicas: tuple[DraftLease, ...]
    counts: VersionCounts
    decided: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "arm": self.arm,
            "share": self.share,
            "replicas": [_replica(lease) for lease in self.replicas],
            "sessions": self.counts.sessions,
            "output_tokens": self.counts.output_tokens,
            "gain": _estimate(self.counts.gain),
            "speed_up": _estimate(self.counts.speed_up),
            "cost_ms": _estimate(self.counts.cost_ms),
            "decided": self.decided,
        }


def rows(state: VersionState, counts: Mapping[str, VersionCounts], leases: Iterable[DraftLease]) -> list[Row]:
    """Return the versions that are registered, named by the state, or were given sessions."""
    replicas: dict[str, list[DraftLease]] = {}
    for lease in leases:
        replicas.setdefault(lease.version, []).append(lease)
    counted = {name for name, its in counts.items() if its.sessions}
    split = state.split
    named = {split.stable, split.canary, *split.drained, *state.decided} - {""}
    found = [
        Row(
            name,
            split.arm_of(name),
            _share(name, split),
            tuple(sorted(replicas.get(name, ()), key=lambda lease: lease.address)),
            counts.get(name, VersionCounts()),
            state.decided.get(name, ""),
        )
        for name in named | counted | replicas.keys()
    ]
    return sorted(found, key=lambda row: (ARMS.index(row.arm), row.version))


def _share(version: str, split: Split) -> float:
    """Return the share that a version has by its name: several stable versions have theirs together."""
    match split.arm_of(version):
        case "canary":
            return split.share
        case "stable":
            return 1.0 - (split.share if split.canary else 0.0)
        case _:
            return 0.0


def trial(state: VersionState, counts: Mapping[str, VersionCounts]) -> dict[str, Any] | None:
    """Return the trial in force, with what the rule says now; None without one."""
    split = state.split
    if not split.canary:
        return None
    stable, canary = (counts.get(name, VersionCounts()) for name in (split.stable, split.canary))
    decision = decide(split, stable, canary, Rule(state.tokens))
    return {
        "version": split.canary,
        "share": split.share,
        "by": split.by,
        "tokens": state.tokens,
        "since": _iso(state.since_ms),
        "outcome": decision.outcome.value,
        "reason": decision.reason,
    }


def table_of(found: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "arm"):
        table.add_column(heading)
    for heading in ("replicas", "share", "sessions", "tokens", "gain", "speed-up", "draft ms/token"):
        table.add_column(heading, justify="right")
    table.add_column("decided")
    for row in found:
        counts = row.counts
        table.add_row(
            one_line(row.version) or ALL_STABLE,
            row.arm,
            str(len(row.replicas)),
            f"{row.share:.1%}",
            f"{counts.sessions:,}",
            f"{counts.output_tokens:,}",
            _text(counts.gain),
            _text(counts.speed_up),
            _text(counts.cost_ms),
            one_line(row.decided, MAX_REASON),
        )
    return table


def replica_lines(found: Sequence[Row]) -> Iterator[str]:
    for row in found:
        for lease in row.replicas:
            facts = [f"{lease.sessions} sessions", f"queue {lease.queue_depth}"]
            facts += ["takes loads"] if lease.max_load_bytes else []
            facts += ["draining"] if lease.draining else []
            version = one_line(lease.version) or "no weights"
            if lease.weights_digest not in {"", lease.version}:
                version += f" ({one_line(lease.weights_digest)})"
            yield f"{one_line(lease.address)}: {version}, {', '.join(facts)}"


def warnings(found: Sequence[Row]) -> Iterator[str]:
    for row in found:
        digests = sorted({lease.weights_digest for lease in row.replicas} - {""})
        if len(digests) > 1:
            named = ", ".join(map(one_line, digests))
            yield (
                f"warning: replicas of {one_line(row.version)} serve different weights ({named}); give each "
                "draft a version of its own"
            )


def trial_line(found: Mapping[str, Any]) -> str:
    drawn = f"{found['share']:.1%} of the sessions, drawn by {found['by']}, since {found['since']}"
    now = f"{found['outcome'].replace('_', ' ')} ({found['reason']})"
    return f"trial of {one_line(found['version'])}: {drawn}; now: {now}"


def event_json(event: VersionEvent) -> dict[str, Any]:
    return {
        "at": _iso(event.at_ms),
        "kind": event.kind,
        "version": event.version,
        "author": event.author,
        "reason": event.reason,
        "share": event.share,
        "epoch": event.epoch,
    }


def event_line(event: VersionEvent) -> str:
    what = f"{event.kind.replace('_', ' ')} {one_line(event.version)}".rstrip()
    share = f" on {event.share:.1%} of the sessions" if event.kind == "try" else ""
    author = f", by {one_line(event.author)}" if event.author else ""
    reason = f": {one_line(event.reason, MAX_REASON)}" if event.reason else ""
    return f"{_iso(event.at_ms)}  {what}{share}{author}{reason}"


def _replica(lease: DraftLease) -> dict[str, Any]:
    return {
        "address": lease.address,
        "sessions": lease.sessions,
        "queue_depth": lease.queue_depth,
        "draining": lease.draining,
        "max_load_bytes": lease.max_load_bytes,
        "weights_digest": lease.weights_digest,
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    """Return the value with its bounds; None is unknown."""
    if not estimate.sessions:
        return {"value": None, "low": None, "high": None}
    if estimate.sessions < 2:
        return {"value": estimate.value, "low": None, "high": None}
    low, high = estimate.interval(Z)
    return {"value": estimate.value, "low": low, "high": high}


def _text(estimate: Estimate) -> str:
    found = _estimate(estimate)
    if found["value"] is None:
        return "-"
    if found["high"] is None:
        return f"{found['value']:.3f}"
    return f"{found['value']:.3f} ± {found['high'] - found['value']:.3f}"


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
