"""The cores that a replica computes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from galley.common.host import this_host
from tests.fakes.machines import EIGHT_CPUS, FOUR_CORES, write_machine

BOOT = "proc/sys/kernel/random/boot_id"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of files: four cores of two hardware threads each."""
    files = {BOOT: "a boot\n", "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    write_machine(tmp_path, FOUR_CORES | files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: EIGHT_CPUS)
    return tmp_path


def test_processes_on_the_same_cores_have_the_same_id(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = this_host(1, root=root), this_host(2, "cpu:0", root)
    assert one.id == other.id != ""
    assert (one.threads, other.threads) == (1, 2)
    assert one.cores == 4, "hardware threads of one core count as one"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7})
    bound = this_host(1, root=root)
    assert (bound.cores, bound.id == one.id) == (3, False)


def test_a_limit_is_shared_by_its_control_group_alone(root: Path) -> None:
    free = this_host(1, root=root)
    assert not free.limit_id
    slice_limit = {"sys/fs/cgroup/galley.slice/cpu.max": "200000 100000\n"}
    write_machine(root, slice_limit | {"proc/self/cgroup": "0::/galley.slice/target.service\n"})
    limited = this_host(1, root=root)
    write_machine(root, {"proc/self/cgroup": "0::/galley.slice/draft.service\n"})
    beside = this_host(2, root=root)
    assert (limited.cores, limited.limit_cores) == (4, 2)
    assert limited.limit_id == beside.limit_id != ""
    assert limited.id == free.id, "the machine is the same"
    (root / "sys/fs/cgroup/galley.slice").rename(root / "of the first container")
    write_machine(root, slice_limit)
    assert this_host(1, root=root).limit_id != limited.limit_id
    write_machine(root, {"sys/fs/cgroup/galley.slice/cpu.max": "800000 100000\n"})
    assert not this_host(1, root=root).limit_id, "it allows more than there is"


def test_another_boot_is_another_machine(root: Path) -> None:
    before = this_host(1, root=root)
    write_machine(root, {BOOT: "the next boot\n"})
    assert this_host(1, root=root).id != before.id


def test_what_is_unknown_or_no_cpu_shares_no_cores(root: Path) -> None:
    assert not this_host(1, "cuda:0", root).id
    (root / BOOT).unlink()
    assert not this_host(1, root=root).id
