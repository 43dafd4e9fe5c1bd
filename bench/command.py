"""Make the parsers and consoles of all benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from bench.harness import RESULTS

_FILE_WIDTH = 150


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m <program>`, with the folder of the record and `--quick`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="show that everything runs: no record, no goals")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    return parser


def console(file_width: int = _FILE_WIDTH) -> Console:
    """Return a console that does not wrap tables of `file_width` characters in a file."""
    made = Console()
    if not made.is_terminal:
        made.width = file_width
    return made
