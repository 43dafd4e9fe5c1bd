"""Which tests call which functions, recorded for each file of tests and kept while the code is the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.mutation.child import run_recorded
from tests.mutation.operators import Mutant
from tests.mutation.processes import Job, run_all

_LONGEST_S = 1200.0
_SHARED = ("tests/fakes", "tests/simulation")


@dataclass(frozen=True)
class Tree:
    """The code that is mutated and its tests, with paths below `root`. `left_out` matches names of tests."""

    root: Path
    mutated: Sequence[str]
    tests: Sequence[str]
    left_out: str

    @property
    def kept(self) -> Path:
        return self.root / "build" / "mutation"

    def modules(self) -> list[str]:
        return sorted(self._files(self.mutated, "*.py"))

    def test_files(self) -> list[str]:
        return sorted(self._files(self.tests, "test_*.py"))

    def _files(self, parts: Sequence[str], pattern: str) -> Iterator[str]:
        for part in parts:
            if part.endswith(".py"):
                yield part
            else:
                for path in (self.root / part).rglob(pattern):
                    yield path.relative_to(self.root).as_posix()

    def digest(self, paths: Iterable[str]) -> str:
        """Return a digest of these files, of what the tests share, and of the tests that are left out."""
        return digest(self.left_out, self._shared, *((self.root / path).read_text() for path in paths))

    @cached_property
    def _shared(self) -> str:
        return digest(*((self.root / path).read_text() for path in sorted(self._files(_SHARED, "*.py"))))


@dataclass(frozen=True, slots=True)
class _Test:
    name: str
    seconds: float
    imported: frozenset[str]
    called_at_import: frozenset[str]
    called: frozenset[str]


class Coverage:
    """The tests of each mutant, the fastest first."""

    def __init__(self, tests: Sequence[_Test]) -> None:
        self._tests = sorted(tests, key=lambda test: test.seconds)
        self._seconds = {test.name: test.seconds for test in tests}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that call the function, or for what runs at import, that import the module."""
        called = [test.name for test in self._tests if _scope(mutant) in test.called]
        return (called if mutant.in_function else []) or [
            test.name for test in self._tests if mutant.path in test.imported
        ]

    def is_called_by_tests_alone(self, mutant: Mutant) -> bool:
        scope = _scope(mutant)
        return any(scope in test.called for test in self._tests) and not any(
            scope in test.called_at_import for test in self._tests
        )

    def seconds(self, test: str) -> float:
        return self._seconds[test]


def _scope(mutant: Mutant) -> str:
    return f"{mutant.path} {mutant.scope}"


def record(tree: Tree, workers: int) -> Coverage:
    """Return the coverage of the tests, which must pass.

    What is kept of a file of tests holds while the file and the modules that it imports are the same.
    """
    directory = tree.kept / "calls"
    directory.mkdir(parents=True, exist_ok=True)
    modules = tree.modules()
    kept = {file: directory / f"{digest(file)}.json" for file in tree.test_files()}
    jobs = (
        Job(file, partial(run_recorded, tree.root, modules, file, tree.left_out, _part(path)), _LONGEST_S)
        for file, path in kept.items()
        if not path.exists() or _is_stale(tree, file, json.loads(path.read_text()))
    )
    for ended in run_all(jobs, workers, tree.kept):
        if ended.status:
            raise SystemExit(f"{ended.subject}: must pass unchanged, got\n{ended.output[-2000:]}")
        path = kept[ended.subject]
        recorded = json.loads(_part(path).read_text())
        known = tree.digest([*recorded["imported"], ended.subject])
        path.write_text(json.dumps({"digest": known, **recorded}))
        _part(path).unlink()
    return Coverage([test for path in kept.values() for test in _read(path)])


def _is_stale(tree: Tree, file: str, recorded: Mapping[str, Any]) -> bool:
    imported = [path for path in recorded["imported"] if (tree.root / path).exists()]
    return bool(recorded["digest"] != tree.digest([*imported, file]))


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _read(path: Path) -> Iterator[_Test]:
    recorded = json.loads(path.read_text())
    imported, at_import = frozenset(recorded["imported"]), frozenset(recorded["called_at_import"])
    for name, (seconds, called) in recorded["tests"].items():
        yield _Test(name, seconds, imported, at_import, frozenset(called))


def digest(*texts: str) -> str:
    return blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
