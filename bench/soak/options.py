"""The command line of `make soak`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import command
from bench.harness import MIN_PAIRS
from galley.common.models.files import DEFAULT_MODEL

_LEAST_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """The options of a soak of `pairs` blocks with and without misreaders. `streams` 0: as many as hold."""

    minutes: float = 30.0
    warm_up_s: float = 180.0
    probe_s: float = 45.0
    before_s: float = 60.0
    overload_s: float = 60.0
    after_s: float = 90.0
    fold: int = 20
    streams: int = 0
    misreaders: int = 2
    known: int = 48
    pairs: int = MIN_PAIRS
    every_s: float = 3.0
    client_timeout_s: float = 10.0
    ttl_s: float = 30.0
    threads: int = 1
    dtype: str = "bfloat16"
    model: str = DEFAULT_MODEL
    seed: int = 20261121
    quick: bool = False

    @property
    def block_s(self) -> float:
        """Return the seconds of one block of the soak."""
        return 60 * self.minutes / (2 * self.pairs)


_QUICK = {
    "minutes": 0.5,
    "warm_up_s": 5.0,
    "probe_s": 5.0,
    "before_s": 10.0,
    "overload_s": 10.0,
    "after_s": 20.0,
    "known": 6,
    "pairs": 1,
    "every_s": 1.0,
    "client_timeout_s": 2.0,
    "ttl_s": 10.0,
}


def parse_options(argv: Sequence[str], description: str | None) -> tuple[SoakOptions, Path | None]:
    """Return the options and the folder of the record (None: no record); exit 2 for a wrong value."""
    default = SoakOptions()
    parser = command.parser_of("bench.soak", description)
    add = parser.add_argument
    add("--minutes", type=float, default=default.minutes, help=f"of the soak; at least {_LEAST_MINUTES:g}")
    add("--warm-up-s", type=float, default=default.warm_up_s, help="load before the soak, in seconds")
    add("--streams", type=int, default=default.streams, help="0, the default: the most that hold")
    add("--misreaders", type=int, default=default.misreaders, help="slow readers, and as many never-readers")
    add("--fold", type=int, default=default.fold, help="clients of the overload, as a multiple")
    add("--threads", type=int, default=default.threads, help="of each service (default: %(default)s)")
    add("--dtype", default=default.dtype)
    add("--model", default=default.model, help="hub id or directory (default: %(default)s)")
    add("--seed", type=int, default=default.seed)
    given = vars(parser.parse_args(argv))
    root: Path | None = given.pop("results")
    options = SoakOptions(**given)
    if options.quick:
        return dataclasses.replace(options, **_QUICK), None  # type: ignore[arg-type]  # floats and integers
    if options.minutes < _LEAST_MINUTES:
        parser.error(
            f"--minutes: must be at least {_LEAST_MINUTES:g}, or use --quick; got {options.minutes:g}"
        )
    if min(options.misreaders, options.fold) < 1 or options.streams < 0:
        parser.error("--misreaders, --fold: must be at least 1; --streams: must be at least 0")
    return options, root
