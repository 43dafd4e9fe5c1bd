"""Checks of the repository itself: pins, the words of the Makefile, what is committed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


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
