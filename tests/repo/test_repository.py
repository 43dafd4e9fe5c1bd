"""Checks of the repository itself: walls, generated files, pins, the words of the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_import_contracts() -> None:
    done = run(str(BIN / "lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout


def test_generated_files_are_what_would_be_generated() -> None:
    subprocess.run([ROOT / "scripts" / "get_helm.sh"], env={**os.environ, "VENV": sys.prefix}, check=True)
    done = run("scripts/check_generated.sh", VENV=sys.prefix)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pins_are_exact() -> None:
    first, *pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert first.startswith("# ")
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==([0-9]+!)?[0-9][0-9a-z.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins
    names = [pin.split("==")[0].lower() for pin in pins]
    assert names == sorted(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("prompt", ['it\'s "quoted"', "$HOME $(echo no) `echo no`", "a\nb # c", "%s \\n", ""])
def test_demo_prompt_is_passed_unchanged(prompt: str, tmp_path: Path) -> None:
    """`make demo PROMPT=...` with a stand-in for galley that shows what it is given."""
    galley = tmp_path / "bin" / "galley"
    galley.parent.mkdir()
    galley.write_text('#!/bin/sh\nprintf \'%s<%s>\' "$*" "$GALLEY_DEMO_PROMPT"\n')
    galley.chmod(0o755)
    done = run("make", "--silent", "demo", "--old-file=setup-run", f"VENV={tmp_path}", f"PROMPT={prompt}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (f"demo<{prompt}>")


def test_help_lists_every_public_target() -> None:
    listed = set(re.findall(r"\x1b\[1m([a-z-]+)", run("make").stdout))
    assert {"setup", "demo", "test", "lint", "proto", "manifests", "check-generated"} <= listed
    assert {"helm-lint", "bench-loops", "prove-noise", "prove-tokens", "clean"} <= listed


def test_nothing_committed_names_a_machine() -> None:
    done = run("git", "grep", "-nIE", r"/home/[a-z]|/Users/[a-z]|/root/", "--", ".", ":!tests/repo")
    assert done.returncode == 1, done.stdout + done.stderr
