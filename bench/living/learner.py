"""Run `galley distill --follow` beside the traffic, in the idle time of one core."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from galley.common.models.files import shipped_draft

_STOP_S = 60.0


class LearnerEnded(Exception):
    """The training ended by itself; the text is the end of its log."""


def shipped() -> Path:
    draft = shipped_draft("")
    if draft is None:
        raise SystemExit("the default model's draft is not installed")
    return Path(draft)


def add_options(
    parser: argparse.ArgumentParser, cycle_tokens: int, new_tokens: int, trial_tokens: int
) -> None:
    """Add the options that `following` reads."""
    parser.add_argument(
        "--cycle-tokens", type=int, default=cycle_tokens, help="answer tokens a cycle trains on"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=new_tokens, help="new tokens that a cycle waits for"
    )
    parser.add_argument("--trial-tokens", type=int, default=trial_tokens, help="tokens of a canary's trial")


@asynccontextmanager
async def following(store_url: str, work: Path, given: argparse.Namespace) -> AsyncIterator[None]:
    """Train until the block ends. Raise LearnerEnded at its end if the training had ended before."""
    command = [
        *(sys.executable, "-P", "-m", "galley.cli", "distill", str(work), "--follow"),
        *("--redis-url", store_url, "--start", str(shipped()), "--every", "5"),
        *("--cycle-tokens", str(given.cycle_tokens), "--new-tokens", str(given.new_tokens)),
        *("--share", "0.5", "--trial-tokens", str(given.trial_tokens)),
    ]
    log = work.with_name("learning.log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, start_new_session=True
        )
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    has_ended = False
    try:
        yield
        has_ended = process.returncode is not None
    finally:
        await _stop(process)
    if has_ended:
        raise LearnerEnded(log.read_text(errors="replace")[-4000:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
