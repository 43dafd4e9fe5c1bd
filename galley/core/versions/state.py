"""The state of a deployment's versions of drafts, and its changes: trials, promotions, roll-backs, drains.

Each change is a function of the state, which returns the new one and the event that the history keeps. The
state in Redis changes by compare-and-set of its `epoch`, so that of several callers one wins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from galley.core.versions.rule import DEFAULT_TRIAL_TOKENS
from galley.core.versions.split import MAX_SHARE, Split, SplitBy

NOT_TRIED = "loaded, not tried"
"""Reason to drain a version before its weights are loaded, so that it gets no sessions at once."""
MAX_DECIDED = 64
"""Versions whose decisions are kept, the latest ones; `forget_earliest` keeps some that are older."""

MAX_REASON = 300
"""Most characters of a reason that a person gives."""

EventKind: TypeAlias = Literal["try", "promote", "roll_back", "drain", "restore"]

_VERSION = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class VersionState:
    """The versions that get sessions, and what was decided.

    The canary may be promoted after `tokens` output tokens. `epoch` counts the changes. `trial` is the epoch
    at which `author` began the latest trial, and the counts with it, and `since_ms` the time. `digest` is
    that of the weights on trial, if it was known. `decided` has the reason for each version that was
    promoted, rolled back or drained, the latest last.
    """

    split: Split = field(default_factory=Split)
    tokens: int = DEFAULT_TRIAL_TOKENS
    since_ms: int = 0
    epoch: int = 0
    trial: int = 0
    author: str = ""
    digest: str = ""
    decided: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """A change of the state; `author` is a person's name, "rule" or the like. `restore` names no version.

    By its `nonce` a gateway knows its own change from the same one by another gateway.
    """

    kind: EventKind
    version: str
    author: str = ""
    reason: str = ""
    share: float = 0.0
    at_ms: int = 0
    epoch: int = 0
    nonce: str = ""


Change: TypeAlias = tuple[VersionState, VersionEvent]


def check_version(name: str) -> str:
    """Return `name`. Raise ValueError unless it can name a version of a draft."""
    if not _VERSION.fullmatch(name):
        raise ValueError(f"must be 1 to 64 letters, digits and . _ -, got {name!r}")
    return name


def check_share(share: float) -> float:
    """Return `share`. Raise ValueError unless a canary can have it."""
    if not 0 < share <= MAX_SHARE:
        raise ValueError(f"share: must be > 0 and <= {MAX_SHARE}, got {share}")
    return share


def try_version(  # noqa: PLR0913
    state: VersionState,
    version: str,
    share: float,
    *,
    by: SplitBy = "session",
    tokens: int = DEFAULT_TRIAL_TOKENS,
    author: str = "",
    reason: str = "",
    digest: str = "",
) -> Change:
    """Give a share of the sessions to a version, with new counts. Raise ValueError if that cannot be."""
    check_version(version)
    check_share(share)
    if tokens < 1:
        raise ValueError(f"tokens: must be >= 1, got {tokens}")
    split = state.split
    if version == split.stable:
        raise ValueError(f"version: must be another than the stable one, got {version}")
    if split.canary not in {"", version}:
        raise ValueError(f"version: {split.canary} is on trial; promote or drain it first")
    split = replace(split, canary=version, share=share, by=by, drained=split.drained - {version})
    decided = {name: why for name, why in state.decided.items() if name != version}
    after = replace(_next(state), split=split, tokens=tokens, decided=decided)
    after = replace(after, trial=after.epoch, author=author, digest=digest)
    return after, VersionEvent("try", version, author, reason, share)


def replace_trial(state: VersionState, version: str, share: float, *, author: str = "") -> Change:
    """Begin a trial in place of the one in force, whose version gets no more sessions. Raise ValueError."""
    before = state.split.canary
    ended, _ = drain(state, before, reason=f"replaced by {version}")
    reason = f"in place of {before}"
    return try_version(replace(ended, epoch=state.epoch), version, share, author=author, reason=reason)


def promote(state: VersionState, version: str, *, author: str = "", reason: str = "") -> Change:
    """Make a version the stable one, and end the trial in force."""
    check_version(version)
    before = state.split
    ended = before.canary if before.canary != version else ""
    split = Split(stable=version, drained=before.drained - {version} | ({ended} if ended else set()))
    state = _decide(state, ended, f"replaced by {version}") if ended else state
    after = _decide(replace(_next(state), split=split), version, reason or "promoted")
    return after, VersionEvent("promote", version, author, reason)


def drain(state: VersionState, version: str, *, author: str = "", reason: str = "") -> Change:
    """Give no more sessions to a version; its trial ends, or it is no longer the stable one."""
    return _end(state, VersionEvent("drain", check_version(version), author, reason))


def roll_back(state: VersionState, *, author: str = "", reason: str = "") -> Change:
    """End the trial in force, and give no more sessions to its version. Raise ValueError without one."""
    if not state.split.canary:
        raise ValueError("no version is on trial")
    return _end(state, VersionEvent("roll_back", state.split.canary, author, reason))


def restore(state: VersionState, *, author: str) -> Change:
    """Give this state to a store that has none."""
    return state, VersionEvent("restore", "", author, "the store had lost the state")


def forget_earliest(state: VersionState, registered: Collection[str]) -> VersionState:
    """Forget the earliest decisions beyond `MAX_DECIDED`, but no drain of a version that is `registered`.

    Without a registered version no drain is forgotten: the registry may have lost its replicas.
    """
    drained = state.split.drained
    kept = drained.intersection(registered) if registered else drained
    gone = set(list(state.decided)[:-MAX_DECIDED]) - kept
    decided = {name: why for name, why in state.decided.items() if name not in gone}
    return replace(state, decided=decided, split=replace(state.split, drained=drained - gone))


def _end(state: VersionState, event: VersionEvent) -> Change:
    split, version = state.split, event.version
    split = replace(split, drained=split.drained | {version})
    if version == split.canary:
        split = replace(split, canary="", share=0.0)
    if version == split.stable:
        split = replace(split, stable="")
    return _decide(replace(_next(state), split=split), version, event.reason or event.kind), event


def _next(state: VersionState) -> VersionState:
    return replace(state, epoch=state.epoch + 1)


def _decide(state: VersionState, version: str, reason: str) -> VersionState:
    """Note a decision as the latest."""
    decided = {name: why for name, why in state.decided.items() if name != version} | {version: reason}
    return replace(state, decided=decided)
