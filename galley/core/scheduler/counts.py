"""What a replica's scheduler has counted since it began: plain numbers, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounts:
    """`prompt_tokens` came with sessions without KV of their own here; of them, `reused_tokens` were cached.

    `missed` items built on a prefix that is not held. `preempted` items had to stop in their midst, for older
    sessions or for want of blocks. `out_of_blocks` items were preempted, refused or put off as there was no
    block. For `linger_ns` passes were put off, for a draft that was due.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed: int = 0
    preempted: int = 0
    out_of_blocks: int = 0
    linger_ns: int = 0
