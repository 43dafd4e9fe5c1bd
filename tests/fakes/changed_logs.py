"""Changes of a stored session that no gateway makes: flipped, torn, foreign and missing data."""

from __future__ import annotations

from redis.asyncio import Redis

from tests.fakes.world import PROMPT_TOKENS

_THIRD_TOKEN = 4 * len(PROMPT_TOKENS) + 8
CHANGES: dict[str, tuple[str, str, tuple[int | bytes, ...]]] = {
    "a prompt token is flipped": ("SETRANGE", ":log", (0, b"\x01")),
    "an output token is flipped": ("SETRANGE", ":log", (_THIRD_TOKEN, b"\x01")),
    "the log is torn": ("APPEND", ":log", (b"\x00",)),
    "the log grows": ("APPEND", ":log", (b"\x01\x00\x00\x00",)),
    "the log is cut": ("SET", ":log", (b"\x01\x00\x00\x00",)),
    "the log is gone": ("DEL", ":log", ()),
    "a record is flipped": ("SETRANGE", ":meta", (0, b"\xff")),
    "the records are gone": ("DEL", ":meta", ()),
    "the session is gone": ("DEL", "", ()),
}
"""By name: the command, the end of the key that it changes, and its values, for a session of PROMPT."""
REPAIRED = {"the session is gone"}
"""What the owner repairs while it streams; it cannot tell who made the others."""


async def change(store: Redis, session_id: str, name: str) -> None:
    command, part, values = CHANGES[name]
    [key] = [key async for key in store.scan_iter(f"galley:sessions:*{{{session_id}}}{part}")]
    await store.execute_command(command, key, *values)  # type: ignore[no-untyped-call]  # is untyped
