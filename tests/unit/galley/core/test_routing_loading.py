"""Which draft replicas take other weights."""

from __future__ import annotations

import pytest

from galley.core.routing.choice import DraftLease
from galley.core.routing.loading import replicas_for_load
from galley.core.versions.split import Split


def lease(address: str, version: str, *, max_load: int = 1 << 20, draining: bool = False) -> DraftLease:
    return DraftLease(
        address=address,
        incarnation="i",
        model="m",
        tokenizer_hash="t",
        vocab_size=8,
        version=version,
        max_load_bytes=max_load,
        draining=draining,
    )


def chosen(leases: list[DraftLease], split: Split, version: str = "new") -> list[str]:
    return [each.address for each in replicas_for_load(leases, split, version)]


OLD = [lease("a:1", "old"), lease("b:1", "old"), lease("c:1", "old")]


def test_of_replicas_that_all_serve_the_last_is_taken() -> None:
    for split in (Split(), Split(stable="old")):
        assert chosen(OLD, split) == ["c:1"]
        assert chosen(OLD[::-1], split) == ["c:1"]


def test_the_only_replica_of_the_stable_versions_is_never_taken() -> None:
    assert chosen(OLD[:1], Split()) == []
    assert chosen([*OLD[:1], lease("b:1", "on-trial")], Split(canary="on-trial", share=0.1)) == []
    assert chosen([*OLD[:1], lease("b:1", "old", draining=True)], Split()) == []


def test_replicas_that_get_no_sessions_are_taken_first_and_all_of_them() -> None:
    spare = [lease("d:1", "bad"), lease("e:1", "worse")]
    assert chosen([*OLD, *spare], Split(drained=frozenset({"bad", "worse"}))) == ["d:1", "e:1"]
    assert chosen([*OLD, *spare], Split(stable="bad")) == ["a:1", "b:1", "c:1", "e:1"]


def test_a_version_on_trial_keeps_its_replicas() -> None:
    leases = [*OLD, lease("d:1", "on-trial")]
    assert chosen(leases, Split(canary="on-trial", share=0.1)) == ["c:1"]


def test_replicas_that_have_the_version_need_no_load() -> None:
    """After a promotion the others are loaded with the version that is stable then."""
    assert chosen([*OLD, lease("d:1", "new")], Split(stable="new")) == ["a:1", "b:1", "c:1"]


@pytest.mark.parametrize(
    "other",
    [
        lease("d:1", "bad", max_load=0),
        lease("d:1", "bad", draining=True),
        lease("d:1", ""),
    ],
)
def test_replicas_that_take_no_loads_are_left_out(other: DraftLease) -> None:
    split = Split(drained=frozenset({"bad"}))
    assert chosen([lease("a:1", "old"), other], split) == []
    fixed = [lease("a:1", "old"), lease("b:1", "old", max_load=0)]
    assert chosen(fixed, split) == ["a:1"]
