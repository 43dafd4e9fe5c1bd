"""Changes of the state of versions."""

from __future__ import annotations

import pytest

from galley.core.versions.split import Split
from galley.core.versions.state import (
    MAX_DECIDED,
    VersionState,
    check_version,
    drain,
    forget_earliest,
    promote,
    replace_trial,
    roll_back,
    try_version,
)


def _on_trial(stable: str = "") -> VersionState:
    return try_version(VersionState(Split(stable=stable)), "new", 0.1)[0]


def test_a_trial_gives_a_share_to_the_canary() -> None:
    state, event = try_version(
        VersionState(epoch=4), "new", 0.2, by="tenant", tokens=7, author="ann", reason="trained"
    )

    assert state.split == Split(canary="new", share=0.2, by="tenant")
    assert (state.epoch, state.trial, state.tokens) == (5, 5, 7)
    assert (event.kind, event.version, event.author, event.reason, event.share) == (
        "try",
        "new",
        "ann",
        "trained",
        0.2,
    )


def test_a_trial_in_place_of_another_is_one_change() -> None:
    before = _on_trial("old")
    state, event = replace_trial(before, "newer", 0.2, author="ann")

    assert state.split == Split("old", "newer", 0.2, drained=frozenset({"new"}))
    assert state.epoch == state.trial == before.epoch + 1
    assert (state.author, state.decided) == ("ann", {"new": "replaced by newer"})
    assert (event.kind, event.version, event.reason) == ("try", "newer", "in place of new")


def test_a_version_that_was_drained_can_be_tried_again() -> None:
    state, _ = drain(_on_trial(), "new", reason="by hand")
    assert state.split == Split(drained=frozenset({"new"}))
    assert state.decided == {"new": "by hand"}

    again, _ = try_version(state, "new", 0.1)
    assert again.split == Split(canary="new", share=0.1)
    assert not again.decided


@pytest.mark.parametrize("share", [0, -0.1, 0.51, float("nan")])
def test_a_share_is_bounded(share: float) -> None:
    with pytest.raises(ValueError, match=r"share: must be > 0 and <= 0\.5"):
        try_version(VersionState(), "new", share)


def test_trials_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="another than the stable one"):
        try_version(VersionState(Split(stable="new")), "new", 0.1)
    with pytest.raises(ValueError, match="new is on trial"):
        try_version(_on_trial(), "newer", 0.1)
    with pytest.raises(ValueError, match="tokens: must be >= 1"):
        try_version(VersionState(), "new", 0.1, tokens=0)


def test_a_promoted_version_is_the_stable_one() -> None:
    state, event = promote(_on_trial("old"), "new", reason="better")

    assert state.split == Split(stable="new")
    assert state.decided == {"new": "better"}
    assert (state.epoch, state.trial) == (2, 1)
    assert event.kind == "promote"


def test_another_version_that_is_promoted_ends_the_trial() -> None:
    state, _ = promote(_on_trial("old"), "other")

    assert state.split == Split(stable="other", drained=frozenset({"new"}))
    assert state.decided == {"new": "replaced by other", "other": "promoted"}


def test_a_version_rolled_back_gets_no_sessions() -> None:
    state, event = roll_back(_on_trial("old"), reason="worse")

    assert state.split == Split(stable="old", drained=frozenset({"new"}))
    assert state.decided == {"new": "worse"}
    assert (event.kind, event.version, event.reason) == ("roll_back", "new", "worse")
    with pytest.raises(ValueError, match="no version is on trial"):
        roll_back(state)


def test_a_drained_stable_version_leaves_the_sessions_to_any_other() -> None:
    state, _ = drain(VersionState(Split(stable="old")), "old")

    assert state.split == Split(drained=frozenset({"old"}))
    assert promote(state, "old")[0].split == Split(stable="old")


def _drained(number: int) -> VersionState:
    state = VersionState()
    for index in range(number):
        state, _ = drain(state, f"v{index}")
    return state


def test_the_earliest_decisions_are_forgotten() -> None:
    state = forget_earliest(_drained(MAX_DECIDED + 3), {"other"})

    assert list(state.decided) == [f"v{number}" for number in range(3, MAX_DECIDED + 3)]
    assert state.split.drained == state.decided.keys()


def test_a_drained_version_that_is_registered_is_not_forgotten() -> None:
    """It would get sessions again: without a stable version by name, all do that are not drained."""
    state = forget_earliest(_drained(MAX_DECIDED + 3), {"v1", "other"})

    assert list(state.decided) == ["v1", *(f"v{number}" for number in range(3, MAX_DECIDED + 3))]
    assert state.split.arm_of("v1") == "drained"
    assert state.split.arm_of("v0") == "stable"


def test_without_registered_versions_no_drain_is_forgotten() -> None:
    """The registry may have lost them, or drafts may be at addresses that are given to gateways."""
    before, _ = promote(VersionState(), "early")
    for number in range(MAX_DECIDED + 3):
        before, _ = drain(before, f"v{number}")
    state = forget_earliest(before, ())

    assert before.decided.keys() - state.decided.keys() == {"early"}
    assert state.split == before.split


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        check_version(name)
    assert check_version("v1.2_3-x") == "v1.2_3-x"
