"""Run as a process of its own: a stack with a real Valkey, whose pids it prints before it waits for ever."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.cli.stand_in_stack import stack_of, stand_in


async def main() -> None:
    stack = stack_of(stand_in("target"), stand_in("gateway", after=("target", "valkey")), with_valkey=True)
    async with stack:
        told = {"pids": [stack.pid(part) for part in stack.parts], "run": str(stack.dirs.run)}
        sys.stdout.write(f"{json.dumps(told)}\n")
        sys.stdout.flush()
        await stack.run(asyncio.Event().wait())


if __name__ == "__main__":
    asyncio.run(main())
