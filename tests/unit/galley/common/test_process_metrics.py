"""Metrics of the process agree with what the system tells of it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from galley.common.metrics import catalogue
from galley.common.metrics.labels import DRAFT
from galley.common.metrics.registry import Registry
from tests.fakes.readings import number

MIB = 2**20


def test_they_agree_with_the_system() -> None:
    registry, process = Registry(DRAFT), psutil.Process()
    before = process.cpu_times()
    assert before.user + before.system <= number(registry, catalogue.PROCESS_CPU) + 0.02
    memory = process.memory_info()
    assert number(registry, catalogue.PROCESS_RESIDENT) == pytest.approx(memory.rss, abs=16 * MIB)
    assert number(registry, catalogue.PROCESS_VIRTUAL) == pytest.approx(memory.vms, abs=64 * MIB)
    assert number(registry, catalogue.PROCESS_START) == pytest.approx(process.create_time(), abs=1)
    assert number(registry, catalogue.PROCESS_MAX_FDS) == process.rlimit(psutil.RLIMIT_NOFILE)[0]


def test_open_descriptors_are_counted_without_a_list_of_them(tmp_path: Path) -> None:
    registry = Registry(DRAFT)
    before = number(registry, catalogue.PROCESS_OPEN_FDS)
    opened = [os.open(tmp_path, os.O_RDONLY) for _ in range(7)]
    try:
        assert number(registry, catalogue.PROCESS_OPEN_FDS) == before + 7
    finally:
        for fd in opened:
            os.close(fd)


def test_names_are_those_of_prometheus() -> None:
    assert {metric.series[0] for metric in catalogue.METRICS if metric.name.startswith("process.")} == {
        "process_cpu_seconds_total",
        "process_start_time_seconds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    }
