"""A service that is told to end while it still imports ends, also as a container's first process."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TOLD = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("grpc", "pydantic"):
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("role", ["gateway", "draft", "target"])
def test_a_signal_to_end_is_heeded_before_libraries_are_imported(role: str) -> None:
    done = subprocess.run([sys.executable, "-c", _TOLD, f"services.{role}"], timeout=60, check=False)
    assert done.returncode == 0
