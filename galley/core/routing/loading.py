"""The draft replicas into which other weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from galley.core.routing.choice import DraftLease
from galley.core.versions.split import Split


def replicas_for_load(leases: Iterable[DraftLease], split: Split, version: str) -> list[DraftLease]:
    """Return the replicas that may take the weights of `version`, in the order of their addresses.

    These accept loads, and serve neither `version` nor a version that gets sessions. If there are none, the
    last replica of the stable versions is returned, unless it is the only one of them.
    """
    serving = sorted((lease for lease in leases if not lease.draining), key=lambda lease: lease.address)
    taking = [lease for lease in serving if lease.max_load_bytes and lease.version not in {"", version}]
    spare = [lease for lease in taking if not _gets_sessions(lease.version, split)]
    if spare:
        return spare
    stable = [lease for lease in serving if _is_stable(lease.version, split)]
    last = [lease for lease in taking if lease in stable][-1:]
    return last if len(stable) > 1 else []


def serving_others(
    leases: Iterable[DraftLease], version: str, digest: str, addresses: Collection[str] = ()
) -> DraftLease | None:
    """Return a replica that serves other weights than those of `digest` as `version`; None: none is known.

    Those at `addresses` are left out.
    """
    return next(
        (
            lease
            for lease in leases
            if lease.version == version
            and lease.weights_digest not in {"", digest}
            and lease.address not in addresses
        ),
        None,
    )


def is_in_use(leases: Iterable[DraftLease], split: Split, version: str) -> bool:
    """Return True if a replica that takes the version gets sessions by it, as others do already."""
    if split.stable or version == split.canary:
        return _gets_sessions(version, split)
    return version not in split.drained and any(lease.version == version for lease in leases)


def _gets_sessions(version: str, split: Split) -> bool:
    return version == split.canary or _is_stable(version, split)


def _is_stable(version: str, split: Split) -> bool:
    if split.stable:
        return version == split.stable
    return version != split.canary and version not in split.drained
