"""The cores that a process may use, on machines made of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from galley.common.cores import usable_cores
from tests.fakes.machines import EIGHT_CPUS, FOUR_CORES, write_machine

V2 = {"proc/self/cgroup": "0::/system/galley.service\n"}
V1 = {"proc/self/cgroup": "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"}
SYSTEM, OWN = "sys/fs/cgroup/system", "sys/fs/cgroup/system/galley.service"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        (V2, 8),
        (V2 | {f"{OWN}/cpu.max": "max 100000\n"}, 8),
        (V2 | {f"{OWN}/cpu.max": "300000 100000\n"}, 3),
        (V2 | {f"{OWN}/cpu.max": "250000 100000\n"}, 2),
        (V2 | {f"{OWN}/cpu.max": "50000 100000\n"}, 1),
        (V2 | {f"{OWN}/cpu.max": "9900000 100000\n"}, 8),
        (V2 | {f"{OWN}/cpu.max": "600000 100000\n", f"{SYSTEM}/cpu.max": "400000 100000\n"}, 4),
        # A container that sees its own group as the root of all.
        (V2 | {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (V2 | {f"{OWN}/cpu.max": "unreadable\n"}, 8),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "50000\n",
            },
            3,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_the_limits_of_all_groups_count(
    files: Mapping[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_machine(tmp_path, files)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: EIGHT_CPUS)
    assert usable_cores(tmp_path) == cores


def test_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_machine(tmp_path, FOUR_CORES)
    for affinity, cores in ((EIGHT_CPUS, 4), ({0, 4}, 1), ({1, 2, 3}, 3)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, own=affinity: own)
        assert usable_cores(tmp_path) == cores


def test_a_system_without_affinity_has_all_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert usable_cores(tmp_path) == 5
