"""Runs of pytest with a mutant, in a forked process, or recording calls.

A mutant inside of a function gets into a process that has collected all tests: only the function's code is
replaced there. Any other mutant needs its module imported anew, and the tests after it, which takes seconds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutation.operators import Mutant

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout")
_OPTIONS = ("-q", "--color=no", "--tb=line", "-p", "no:cacheprovider", *(f"-p{name}" for name in _PLUGINS))
_OURS = ("galley", "services", "tests", "bench")
_MOST_BYTES = 4 << 30


def run_mutant(root: Path, mutant: Mutant, limits_s: Mapping[str, float]) -> int:
    """Run tests, each up to its limit, with the mutant in place of its module; return pytest's status."""
    _prepare(root)
    _limit_memory()
    loader = _Loader(root, mutant.path, mutant.source((root / mutant.path).read_text()))
    sys.meta_path.insert(0, _Finder(loader))
    files = list(dict.fromkeys(test.partition("::")[0] for test in limits_s))
    status = pytest.main([*_OPTIONS, "-x", *files], plugins=[_Selection(limits_s)])
    if not loader.has_loaded:
        raise RuntimeError(f"{mutant.path}: must be imported by the tests")
    return status


class Collected:
    """All tests, collected in this process, and the functions that they may call."""

    def __init__(self, root: Path, session: pytest.Session) -> None:
        self._root = root
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for found in gc.get_objects():
            if type(found) is FunctionType:  # isinstance would ask proxies for their class
                self._functions.setdefault(_place(found.__code__), []).append(found)
        gc.freeze()  # or each forked process would copy all that it collects

    def run(self, code: CodeType | None, limits_s: Mapping[str, float]) -> int:
        """Run tests, each up to its limit, with `code` in place of the function's; return 1 if one fails."""
        _limit_memory()
        if code is not None:
            for function in self._functions[_place(code)]:
                function.__code__ = code
        items = _limited((self._items[test] for test in limits_s), limits_s)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                break
        status = min(1, self._session.testsfailed)
        self._session.config.hook.pytest_sessionfinish(session=self._session, exitstatus=status)
        return status

    def code(self, mutant: Mutant) -> CodeType | None:
        """Return the changed code of the function, or None if a change of its code is not all it takes."""
        path, name = self._root / mutant.path, mutant.scope.partition(".<locals>")[0]
        for code in _codes(compile(mutant.source(path.read_text()), str(path), "exec", dont_inherit=True)):
            known = self._functions.get(_place(code), ()) if code.co_qualname == name else ()
            if any(code != function.__code__ for function in known):
                is_free = all(code.co_freevars == function.__code__.co_freevars for function in known)
                return code if is_free else None
        return None


def collect(root: Path, files: Sequence[str], use: Callable[[Collected], None]) -> int:
    """Collect the tests of `files`, then call `use`; return pytest's exit status."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return pytest.main([*_OPTIONS, "-s", *files], plugins=[_Loop(root, use)])


def run_recorded(root: Path, paths: Sequence[str], file: str, left_out: str, to: Path) -> int:
    """Run the tests of `file`; write which modules of `paths` it imports, and what each test calls there.

    Tests whose names match `left_out` are not run.
    """
    _prepare(root)
    recorder = _Recorder({str(root / path): path for path in paths}, left_out)
    status = pytest.main([*_OPTIONS, file], plugins=[recorder])
    imported = [path for path in paths if _module(path) in sys.modules]
    result = {"imported": imported, "called_at_import": recorder.at_import, "tests": recorder.tests}
    to.write_text(json.dumps(result))
    return status


def _limited(items: Iterable[pytest.Item], limits_s: Mapping[str, float]) -> list[pytest.Item]:
    """Return the items. At its limit a test ends the process: hypothesis would repeat one that raises."""
    limited = list(items)
    for item in limited:
        item.add_marker(pytest.mark.timeout(limits_s[item.nodeid], method="thread"), append=False)
    return limited


def _limit_memory() -> None:
    """Limit what a mutant that does not end can fill."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _prepare(root: Path) -> None:
    """Import what is in the tree anew: the parent may have imported a part of it."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in _OURS or (file and Path(file).parent == root):
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


class _FirstFailure:
    def pytest_sessionstart(self) -> None:
        """Let hypothesis report the first failure as it is. Tests take these settings when imported."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutant", settings.default, phases=phases, database=None)
        settings.load_profile("mutant")


class _Loop(_FirstFailure):
    def __init__(self, root: Path, use: Callable[[Collected], None]) -> None:
        self._root = root
        self._use = use

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._use(Collected(self._root, session))
        return True


class _Selection(_FirstFailure):
    """Keep the given tests, in their order."""

    def __init__(self, limits_s: Mapping[str, float]) -> None:
        self._limits_s = limits_s

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = _limited((found[test] for test in self._limits_s), self._limits_s)


class _Recorder:
    """Note the functions that each test calls. A profiler sees each call, also of coroutines and threads."""

    def __init__(self, paths: dict[str, str], left_out: str) -> None:
        self.at_import: list[str] = []
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self._paths = paths
        self._left_out = re.compile(left_out)
        self._codes: set[CodeType] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not self._left_out.search(item.nodeid)]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        with self._recording(self.at_import):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        called: list[str] = []
        began_s = time.perf_counter()
        with self._recording(called):
            result = yield
        self.tests[item.nodeid] = (round(time.perf_counter() - began_s, 3), called)
        return result

    @contextmanager
    def _recording(self, called: list[str]) -> Iterator[None]:
        self._codes.clear()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            places = ((self._paths.get(code.co_filename), _scope(code)) for code in self._codes)
            called += sorted({f"{path} {scope}" for path, scope in places if path})

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)


def _scope(code: CodeType) -> str:
    """Return the name of the function, and for lambdas and comprehensions, of that around them."""
    name = code.co_qualname
    while name.endswith(">"):
        name = name.rpartition(".<locals>.")[0]
    return name
