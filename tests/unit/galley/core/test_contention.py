"""How much of a draft's time is lost to a target on the same cores."""

from __future__ import annotations

import pytest

from galley.core.cost.contention import contention
from galley.pb.galley.v1 import galley_pb2 as pb


def host(threads: int, cores: int = 2, name: str = "here") -> pb.Host:
    return pb.Host(id=name, cores=cores, threads=threads)


@pytest.mark.parametrize(
    ("draft", "target", "lost"),
    [
        (host(1), host(1), 0.25),
        (host(1), host(2), 0.75),
        (host(2), host(2), 1.0),
        (host(1, 8), host(2, 8), 0.0),
        (host(1, 8), host(8, 8), 0.375),
        (host(2), host(2, name="elsewhere"), 0.0),
        (pb.Host(), pb.Host(), 0.0),
        (pb.Host(), host(2), 0.0),
        (host(1, 0), host(1, 0), 0.0),
    ],
)
def test_threads_beyond_the_cores_disturb_each_other(draft: pb.Host, target: pb.Host, lost: float) -> None:
    assert contention([draft], [target]) == lost


def test_of_several_drafts_the_mean_counts() -> None:
    assert contention([host(2), host(1, name="elsewhere")], [host(2), host(2)]) == 0.5
    assert contention([], [host(1)]) == 0.0
    assert contention([host(1)], []) == 0.0


def test_all_threads_on_the_same_cores_disturb_each_other() -> None:
    """Two targets of one thread take as much as one of two, and a target elsewhere changes nothing."""
    assert contention([host(1)], [host(1), host(1)]) == contention([host(1)], [host(2)]) == 0.75
    assert contention([host(1)], [host(2), host(8, name="elsewhere")]) == 0.75
    assert contention([host(1, 4), host(1, 4)], [host(2, 4)]) == 0.25


def test_a_limit_of_a_control_group_counts_for_those_within_it() -> None:
    draft, target = host(1, 64), host(2, 64)
    assert contention([draft], [target]) == 0.0
    for limited in (draft, target):
        limited.limit_id, limited.limit_cores = "a container", 2.0
    assert contention([draft], [target]) == 0.75
    target.limit_id = "another container"
    assert contention([draft], [target]) == 0.0
