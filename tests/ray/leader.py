"""A sharded replica without Ray, for tests: `python -m tests.ray.leader MODEL SIZE`.

Starts its followers itself and says {"address", "followers"}; ends in order on SIGTERM, and with 7 on a loss.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

from services.common.process import die_with_parent
from services.engine.process_group import Store, open_store
from services.target.leader import Leader, spec_of
from services.target.rank import RankSpec
from services.target.settings import TargetSettings
from tests.ray.follower import start_follower

LOST = 7


def start(settings: TargetSettings, size: int) -> tuple[RankSpec, Store, list[subprocess.Popen[bytes]]]:
    spec, store = spec_of(settings, size), open_store("127.0.0.1", size)
    return spec, store, [start_follower(spec, rank, store.address) for rank in range(1, size)]


async def main() -> None:
    settings = TargetSettings(model=sys.argv[1], dtype="float32", kv_memory_mb=8)
    spec, store, followers = start(settings, int(sys.argv[2]))
    stopped, lost = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def lose() -> None:
        lost.set()
        loop.call_soon_threadsafe(stopped.set)

    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    leader = Leader(settings, spec, "", lose)
    address = await leader.serve(store)
    told = {"address": address, "followers": [process.pid for process in followers]}
    print(json.dumps(told), flush=True)  # noqa: T201
    await stopped.wait()
    await leader.stop()
    codes = [process.wait(10) for process in followers]
    os._exit(LOST if lost.is_set() else max(codes))


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())
