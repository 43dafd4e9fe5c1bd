"""Run as a process of its own: a stack with a real Valkey, whose pids it prints; then it waits.

Arguments are flags of its gateway, a stand-in.
"""

from __future__ import annotations

import asyncio
import json
import sys

from galley.cli.flags import Output
from galley.cli.up import run_stack, shown_stack
from galley.stack.options import StackOptions
from tests.integration.galley.cli.stand_in_stack import stand_in, valkey


async def keep_up() -> None:
    console = Output(stderr=True)

    gateway = stand_in("gateway", *sys.argv[1:], after=("target", "valkey"))
    specs = [stand_in("target", pool="target"), gateway]
    async with shown_stack(
        StackOptions(stop_grace_s=1), console, lambda options, dirs: [valkey(options, dirs), *specs]
    ) as stack:
        pids = {part: stack.pid(part) for part in stack.parts}
        fields = {"pids": [*pids.values()], "target": pids["target"], "run": str(stack.dirs.run)}
        sys.stdout.write(f"{json.dumps(fields)}\n")
        sys.stdout.flush()
        await stack.run(asyncio.Event().wait(), console.print)


if __name__ == "__main__":
    run_stack(keep_up())
