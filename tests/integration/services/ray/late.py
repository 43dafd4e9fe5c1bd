"""Run two ranks of which one is late; print the outcome as a line of JSON.

First it is late while rank 0 may wait for long, then when rank 0 may not.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
from pathlib import Path

import torch

from galley.common.server.process import die_with_parent
from galley.engine.parallel.process_group import ProcessGroup, RankLost, join
from tests.integration.services.ray.program import file_store

_SHORT_S, _LONG_S = 0.5, 60.0


def main() -> None:
    torch.set_num_threads(1)
    parent = os.getpid()
    over, release = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        if os.fork() == 0:
            die_with_parent(parent)
            os.close(release)
            _be_late(_join(1, meeting), over)
            os._exit(0)
        results = _wait_for_it(_join(0, meeting))
        os.close(release)
        os.wait()
    sys.stdout.write(json.dumps(results) + "\n")


def _join(rank: int, meeting: Path) -> ProcessGroup:
    return join(rank, 2, device="cpu", meeting=file_store(meeting, 2), timeout_s=_LONG_S)


def _be_late(group: ProcessGroup, over: int) -> None:
    select.select([over], [], [], 2 * _SHORT_S)
    group.add(torch.ones(1))
    os.read(over, 1)


def _wait_for_it(group: ProcessGroup) -> dict[str, str]:
    group.wait_at_most(_SHORT_S)
    group.wait_at_most(_LONG_S)
    results = {"long": str(group.add(torch.ones(1)).item())}
    group.wait_at_most(_SHORT_S)
    try:
        group.add(torch.ones(1))
    except RankLost as error:
        results["short"] = str(error)
    return results


if __name__ == "__main__":
    main()
