"""A rank other than 0 as a process, without Ray: `python -m tests.ray.follower TOLD`; exits 1 on a loss."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from services.common.logs import get_logger, start_logging
from services.common.process import die_with_parent
from services.core.errors import GalleyError
from services.target.rank import RankSpec, run_follower

_LOG = get_logger(__name__)


def start_follower(spec: RankSpec, rank: int, address: str) -> subprocess.Popen[bytes]:
    """One that ends with this process."""
    told = json.dumps({"spec": asdict(spec), "rank": rank, "address": address})
    return subprocess.Popen([sys.executable, "-m", "tests.ray.follower", told])


def main() -> None:
    told = json.loads(sys.argv[1])
    die_with_parent()
    start_logging("galley-target-rank", "info", "json")
    try:
        run_follower(RankSpec(**told["spec"]), told["rank"], told["address"])
    except GalleyError as error:
        _LOG.error("this rank ends", rank=told["rank"], problem=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
