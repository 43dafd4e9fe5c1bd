"""The cores that a replica computes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from galley.common.host import this_host


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    file = tmp_path / "boot_id"
    file.write_text("a boot\n")
    return file


def test_processes_on_the_same_cores_have_the_same_id(boot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = this_host(1, boot_file=boot), this_host(2, "cpu:0", boot)
    assert one.id == other.id != ""
    assert (one.threads, other.threads) == (1, 2)
    assert one.cores == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 7, 9})
    bound = this_host(1, boot_file=boot)
    assert (bound.cores, bound.id == one.id) == (3, False)


def test_another_boot_is_another_machine(boot: Path) -> None:
    before = this_host(1, boot_file=boot)
    boot.write_text("the next boot\n")
    assert this_host(1, boot_file=boot).id != before.id


def test_what_is_unknown_or_no_cpu_shares_no_cores(boot: Path, tmp_path: Path) -> None:
    assert not this_host(1, "cuda:0", boot).id
    assert not this_host(1, boot_file=tmp_path / "missing").id
