"""Commands of the node, run to their end."""

from __future__ import annotations

import asyncio

TIMED_OUT = -1
_PATIENCE_S = 30.0


class CommandFailed(Exception):
    """A command that the node needs did not do what it was asked."""


async def output_of(*command: str, timeout_s: float = _PATIENCE_S, stdin: str = "") -> tuple[int, str]:
    """Exit status (TIMED_OUT where it was killed for that) and output, errors included."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate(stdin.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return TIMED_OUT, f"no end after {timeout_s:g} s"
    return process.returncode or 0, said.decode(errors="replace")


async def run(*command: str, stdin: str = "") -> str:
    """The output of a command that must end well; raises CommandFailed."""
    status, said = await output_of(*command, stdin=stdin)
    if status != 0:
        raise CommandFailed(f"{' '.join(command)}: {status}: {said.strip()[:2000]}")
    return said
