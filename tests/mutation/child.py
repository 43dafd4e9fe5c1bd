"""One run of pytest in a forked process: with a mutant in place of its module, or recording calls."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout")
_OPTIONS = ("-q", "--color=no", "--tb=line", "-p", "no:cacheprovider", *(f"-p{name}" for name in _PLUGINS))
_OURS = ("galley", "services", "tests", "bench")
_MOST_BYTES = 4 << 30


def run_mutant(root: Path, path: str, source: str, tests: Sequence[str], test_limit_s: float) -> int:
    """Run `tests` with `source` in place of the module at `path`; return pytest's exit status."""
    _prepare(root)
    # A mutant that does not end may also fill the memory.
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    loader = _Loader(root, path, source)
    sys.meta_path.insert(0, _Finder(loader))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    # At its limit a test ends the process: hypothesis would catch an exception and repeat the test.
    options = (*_OPTIONS, "-x", f"--timeout={test_limit_s:.0f}", "--timeout-method=thread")
    status = pytest.main([*options, *files], plugins=[_Selection(tests)])
    if not loader.has_loaded:
        raise RuntimeError(f"{path}: must be imported by the tests")
    return status


def run_recorded(root: Path, paths: Sequence[str], file: str, left_out: str, to: Path) -> int:
    """Run the tests of `file`; write which modules of `paths` it imports, and what each test calls there.

    Tests whose names match `left_out` are not run.
    """
    _prepare(root)
    recorder = _Recorder({str(root / path): path for path in paths}, left_out)
    status = pytest.main([*_OPTIONS, file], plugins=[recorder])
    imported = [path for path in paths if _module(path) in sys.modules]
    to.write_text(json.dumps({"imported": imported, "tests": recorder.tests}))
    return status


def _prepare(root: Path) -> None:
    """Import what is in the tree anew: the parent may have imported a part of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take a second, and the tests need none
    os.chdir(root)
    sys.path.insert(0, str(root))


def _module(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Loader(SourceFileLoader):
    """Load the given source, and nothing that was compiled before."""

    def __init__(self, root: Path, path: str, source: str) -> None:
        super().__init__(_module(path), str(root / path))
        self.has_loaded = False
        self._source = source

    def get_code(self, _: str) -> CodeType:
        self.has_loaded = True
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        return spec_from_file_location(fullname, self._loader.path, loader=self._loader)


class _Selection:
    """Keep the given tests, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}

    def pytest_sessionstart(self) -> None:
        """Let hypothesis report the first failure as it is. Tests take these settings when imported."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutant", settings.default, phases=phases, database=None)
        settings.load_profile("mutant")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])


class _Recorder:
    """Note the functions that each test calls. A profiler sees each call, also of coroutines and threads."""

    def __init__(self, paths: dict[str, str], left_out: str) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self._paths = paths
        self._left_out = re.compile(left_out)
        self._codes: set[CodeType] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not self._left_out.search(item.nodeid)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._codes.clear()
        began_s = time.perf_counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            called = {
                f"{path} {_scope(code)}"
                for code in self._codes
                if (path := self._paths.get(code.co_filename))
            }
            self.tests[item.nodeid] = (round(time.perf_counter() - began_s, 3), sorted(called))

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)


def _scope(code: CodeType) -> str:
    """Return the name of the function, and for lambdas and comprehensions, of that around them."""
    name = code.co_qualname
    while name.endswith(">"):
        name = name.rpartition(".<locals>.")[0]
    return name
