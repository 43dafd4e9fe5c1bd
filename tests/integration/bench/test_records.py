"""Test the record of a benchmark: what it says beside its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.harness import write_record
from bench.quiet import Usage


def test_a_record_names_itself_its_commit_and_how_quiet_the_machine_was(tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.json"
    write_record(path, {"figures": [1, 2]})
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["name"], record["figures"]) == ("speed", [1, 2])
    assert record["commit"]
    assert 0.0 <= record["machine"]["others_share"] <= 1.0


def test_a_record_keeps_the_commit_that_it_names(tmp_path: Path) -> None:
    write_record(tmp_path / "old.json", {"commit": "abc"})
    assert json.loads((tmp_path / "old.json").read_text(encoding="utf-8"))["commit"] == "abc"


def test_the_work_of_processes_that_ended_is_ours() -> None:
    before = Usage.now()
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert Usage.now().own_s - before.own_s >= 0.3
