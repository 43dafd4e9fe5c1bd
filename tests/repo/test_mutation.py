"""The mutation run finds what tests do not notice, shown on a module that is tested in part."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.operators import mutants_of
from tests.mutation.processes import BROKEN, Job, run_all
from tests.mutation.run import ROOT

_MODULE = """
LIMIT = 3


def sizes():
    return [5]


SIZES = sizes()


def is_full(count):
    return count >= LIMIT


def wait_for(event):
    while not event.is_set():
        event.wait(0.1)
    return event
"""
_TESTS = """
import threading

import toy


def test_sizes():
    assert toy.sizes()
    assert toy.SIZES == [5]


def test_three_is_full():
    assert toy.is_full(3)
    assert not toy.is_full(2)


def test_waiting_ends():
    event = threading.Event()
    event.set()
    toy.wait_for(event)
"""
_WAITS_LESS = "toy.py wait_for: event.wait(0.1) -> pass"
_RETURNS_NOTHING = "toy.py wait_for: return event -> return None"
_EXPLAINED = f"""
[[survivor]]
key = "{_WAITS_LESS}"
why = "It only waits less."
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Return a tree with a module and its tests."""
    (tmp_path / "toy.py").write_text(_MODULE)
    (tmp_path / "test_toy.py").write_text(_TESTS)
    (tmp_path / "survivors.toml").write_text("survivor = []")
    return tmp_path


def mutate(tree: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Return exit status, output and record of a run."""
    where = ("--root", tree, "--explained", tree / "survivors.toml", "--record", tree / "record.json")
    what = ("--mutated", "toy.py", "--tests", "test_toy.py", "--limit-s", "1")
    command: list[str | Path] = [sys.executable, "-m", "tests.mutation.run", *where, *what, *options]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)
    record = tree / "record.json"
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(record.read_text()) if record.exists() else {},
    )


def test_what_no_test_notices_is_reported_until_it_is_tested_or_explained(toy: Path) -> None:
    status, output, record = mutate(toy)
    assert "killed: toy.py -: 3 -> 4" in output, output
    assert "killed: toy.py sizes: 5 -> 6" in output, "what runs at import is imported anew"
    assert "killed: toy.py is_full: count >= LIMIT -> count > LIMIT" in output
    assert "killed: toy.py wait_for: not event.is_set() -> event.is_set()" in output  # does not end
    assert {_WAITS_LESS, _RETURNS_NOTHING} < set(record["unexplained"])
    assert record["mutants"] == sum(record["packages"]["."][outcome] for outcome in ("killed", "survived"))
    assert status == 1

    (toy / "survivors.toml").write_text(_EXPLAINED)
    status, output, record = mutate(toy, "--only", _WAITS_LESS)
    assert "survived" not in output, "outcomes are kept while module and tests are the same"
    assert (record["explained"], record["unexplained"], status) == ([_WAITS_LESS], [], 0)

    (toy / "test_toy.py").write_text(_TESTS.replace("toy.wait_for(event)", "assert toy.wait_for(event)"))
    status, output, record = mutate(toy, "--only", _RETURNS_NOTHING)
    assert f"1/1 killed: {_RETURNS_NOTHING}" in output
    assert status == 0


def test_tests_that_fail_without_a_mutant_end_the_run(toy: Path) -> None:
    (toy / "test_toy.py").write_text(_TESTS + "    assert False\n")
    status, output, record = mutate(toy)
    assert "test_toy.py: must pass unchanged" in output
    assert (status, record) == (1, {})


def test_a_process_that_hangs_ends_at_its_limit(tmp_path: Path) -> None:
    ended = {ended.subject: ended for ended in run_all(jobs(), 2, tmp_path)}
    assert ended["hangs"].status is None
    assert ended["raises"].status == BROKEN
    assert "ZeroDivisionError" in ended["raises"].output
    assert ended["ends"].status == 3
    assert not list(tmp_path.iterdir())


def hang() -> int:
    while True:
        signal.pause()


def jobs() -> Iterator[Job[str]]:
    yield Job("hangs", hang, limit_s=0.2)
    yield Job("raises", lambda: 1 // 0, limit_s=100)
    yield Job("ends", lambda: 3, limit_s=100)


@pytest.mark.parametrize(
    ("code", "mutants"),
    [
        ("x = a < b", {"a < b -> a <= b"}),
        ("x = a and b", {"a and b -> a or b"}),
        ("x = a + 20", {"a + 20 -> a - 20", "20 -> 40"}),
        ("x = 'a' + b", set()),
        ("x = not a", {"not a -> a"}),
        ("x = 1 if a else b", {"1 -> 2", "a -> not a"}),
        ("x: Literal[1] = True", {"True -> False"}),
        ("x += 1", {"x += 1 -> pass", "x += 1 -> x -= 1", "1 -> 2"}),
        ("x.y = a", {"x.y = a -> pass"}),
        ("f(a)", {"f(a) -> pass"}),
        ("_log.info('started', count=1)", set()),
        ("raise f", {"raise f -> pass"}),
        ("def f(a: int = 1) -> int:\n    return a", {"1 -> 2", "return a -> return None"}),
        ("def f():\n    return False", {"False -> True"}),
        ("@cached(1)\ndef f(): ...", set()),
        ("class P(Protocol[T]):\n    x = 1", set()),
        ("if TYPE_CHECKING:\n    x = 1", set()),
    ],
)
def test_mutants_of(code: str, mutants: set[str], tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(code)
    found = mutants_of(tmp_path, "toy.py")
    assert {mutant.key.partition(": ")[2] for mutant in found} == mutants
    for mutant in found:
        compile(mutant.source(code), "toy.py", "exec")


def test_a_mutant_changes_its_place_alone(tmp_path: Path) -> None:
    code = "# é\nx = (\n    'é' < a,\n    b <\n        c,\n)\n"
    (tmp_path / "toy.py").write_text(code)
    first, second = (mutant.source(code) for mutant in mutants_of(tmp_path, "toy.py"))
    assert first == code.replace("'é' < a", "('é' <= a)")
    assert second == code.replace("b <\n        c", "(b <= c)")


def test_equal_mutants_of_a_function_have_keys_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("def f():\n    g(a)\n    g(a)\n")
    assert [mutant.key for mutant in mutants_of(tmp_path, "toy.py")] == [
        "toy.py f: g(a) -> pass",
        "toy.py f: g(a) -> pass #1",
    ]
