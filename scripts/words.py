"""Check the rules of language and layout that ruff cannot: `python scripts/words.py [--count] [ROOT]`.

Prints each violation as `path:line: rule: text` and exits 1 if there is any. With `--count` it prints the
number of violations of each rule, and exits 0.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("galley", "services")
WORDED = (*PACKAGES, "bench", "scripts")
GENERATED = "galley/pb/"
OPENERS = {"Of", "What", "How", "Where", "Whether", "Who", "As", "Those", "Its", "Which", "That"}
NAMES = {"told", "asked", "asks", "ask", "said", "wanted", "begun", "shown", "tell", "tells"}
MODULES = NAMES | {"patience", "hindsight", "opinions", "habits", "unless", "last_words", "moves", "owned"}
MODULES |= {"routed", "standing", "drafted", "watching", "early_end"}
MAX_MODULES = 15
MAX_README_WORDS = 900

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a rule is violated."""

    rule: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed module; `path` is relative to the root."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        """Return the dotted name of the module."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(root: Path) -> Iterator[Violation]:
    """Yield every violation below `root`."""
    sources = [
        Source(path.relative_to(root), ast.parse(path.read_text()))
        for top in WORDED
        for path in sorted((root / top).rglob("*.py"))
        if not path.relative_to(root).as_posix().startswith(GENERATED)
        and not any(part.startswith(".") for part in path.relative_to(root).parts)  # exports, environments
    ]
    packages = [source for source in sources if source.path.parts[0] in PACKAGES]
    for source in sources:
        yield from _docstrings(source)
        yield from _names(source)
        if source.path.stem in MODULES:
            yield Violation("module name", source.path.as_posix(), 1, source.path.stem)
    yield from _folders(packages)
    yield from _circles(packages)
    yield from _readme(root / "README.md")


def _docstrings(source: Source) -> Iterator[Violation]:
    for node in ast.walk(source.tree):
        text = ast.get_docstring(node) if isinstance(node, _Documented) else None
        if not text:
            continue
        line = getattr(node, "lineno", 1)
        first = text.split()[0].strip("`,.:")
        if first in OPENERS:
            yield Violation("first word", source.path.as_posix(), line, text.partition("\n")[0])
        elif re.fullmatch(r"See [^.]*\.?", text.strip()):
            yield Violation("only a reference", source.path.as_posix(), line, text)


def _names(source: Source) -> Iterator[Violation]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case _:
                continue
        if name.strip("_").lower() in NAMES:
            yield Violation("name", source.path.as_posix(), getattr(node, "lineno", 1), name)


def _folders(sources: list[Source]) -> Iterator[Violation]:
    modules = Counter(source.path.parent for source in sources if source.path.name != "__init__.py")
    for folder, count in modules.items():
        if count > MAX_MODULES:
            yield Violation("modules a folder", folder.as_posix(), 1, f"{count}, at most {MAX_MODULES}")


def _circles(sources: list[Source]) -> Iterator[Violation]:
    """Find import circles, imports for types included; a search stops at one, so open it and search again."""
    modules = {source.name: source for source in sources}
    graph = {
        name: {each for each in _imports(source) if each in modules} - {name}
        for name, source in modules.items()
    }
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1]
            yield Violation(
                "import circle", modules[circle[0]].path.as_posix(), 1, " > ".join(reversed(circle))
            )
            graph[circle[1]].discard(circle[0])
        else:
            return


def _imports(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from inner
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _readme(path: Path) -> Iterator[Violation]:
    words = len(path.read_text().split())
    if words > MAX_README_WORDS:
        yield Violation("README length", path.name, 1, f"{words} words, at most {MAX_README_WORDS}")


def main() -> int:
    """Return 1 if a rule is violated and violations are listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", action="store_true", help="print the number of violations of each rule, exit 0"
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    given = parser.parse_args()
    found = list(violations(given.root))
    counts = Counter(each.rule for each in found)
    lines = [f"{rule}: {count}" for rule, count in counts.items()] if given.count else map(str, found)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(bool(found) and not given.count)


if __name__ == "__main__":
    sys.exit(main())
