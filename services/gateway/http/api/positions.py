"""Places in the answers of a request, as the ids of its events name them.

An id has an entry for each choice, separated by commas: `~` before its first event, else the number of output
tokens before this place, with the hash of these tokens after a dot, and `!` once the choice has ended. Where
several events open or close an answer (`responses.stream`), their number so far follows `~` or `!`; where a
token causes several events (`responses.parts`), the number of those sent follows a `+`.
`done` is the id of the last event.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.content import HASH_BYTES, prefix_hash
from galley.core.errors import InvalidField

DONE = "done"
_FIELD = "last-event-id"
_ENTRY = re.compile(
    r"~(?P<opened>[1-9]?)|"
    r"(?P<index>[0-9]{1,9})(?:\.(?P<hash>[A-Za-z0-9_-]{22}))?(?:(?P<ended>!)(?P<closed>[1-9]?)|\+(?P<within>[0-9]{1,2}))?"
)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an answer, before output token `index`; `seen_hash` is that of the tokens before it.

    `step` counts the events that were sent before the answer begins, of its next token, or after its end.
    """

    index: int = 0
    seen_hash: bytes = b""
    has_begun: bool = False
    has_ended: bool = False
    step: int = 0

    def __str__(self) -> str:
        step = str(self.step or "")
        if not self.has_begun:
            return "~" + step
        seen = f".{urlsafe_b64encode(self.seen_hash).decode().rstrip('=')}" if self.index else ""
        within = f"+{step}" if step else ""
        return f"{self.index}{seen}{'!' + step if self.has_ended else within}"


START = Position()


def position_before(index: int, output: Sequence[int]) -> Position:
    """Return the place before output token `index`, without a hash if the output does not reach so far.

    A store can lose the latest tokens, which a target then computes again.
    """
    seen = prefix_hash(output[:index]) if 0 < index <= len(output) else b""
    return Position(index, seen, has_begun=True)


def event_id(positions: Sequence[Position]) -> str:
    return ",".join(map(str, positions))


def parse_event_id(text: str, choices: int) -> list[Position]:
    """Return the place of each choice; an empty text is the start. Raise InvalidField."""
    if not text:
        return [START] * choices
    entries = text.split(",")
    if len(entries) != choices:
        raise InvalidField(_FIELD, f"must have {choices} entries, got {len(entries)}")
    return [_position(entry) for entry in entries]


def _position(entry: str) -> Position:
    matched = _ENTRY.fullmatch(entry)
    if matched is None:
        raise InvalidField(_FIELD, f"must be the id of an event of this session, got {entry[:64]!r}")
    step = int(matched["opened"] or matched["closed"] or matched["within"] or 0)
    if matched["index"] is None:
        return Position(step=step)
    index, text = int(matched["index"]), matched["hash"] or ""
    seen = urlsafe_b64decode(text + "==") if text else b""
    if index and len(seen) != HASH_BYTES:
        raise InvalidField(_FIELD, "must have the hash of the tokens before it")
    return Position(
        index, seen if index else b"", has_begun=True, has_ended=bool(matched["ended"]), step=step
    )
