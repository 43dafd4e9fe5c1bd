"""The record of a response that its session stores, so that any gateway can describe and continue it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from galley.core.errors import LogLost

FIELD = "response"
"""Field of a stored session: the record of its response."""


class Turn(NamedTuple):
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """`parameters` are the parts of the request that a response repeats.

    `turns` is the conversation without instructions, for responses that continue it; None if the response is
    not to be kept.
    """

    parameters: Mapping[str, Any]
    turns: Sequence[Turn] | None

    @property
    def stored(self) -> dict[str, bytes]:
        return {FIELD: json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()}


def stored_record(fields: Mapping[str, bytes]) -> Record | None:
    """Return the record of a stored session; None if it is no response. Raise LogLost."""
    if FIELD not in fields:
        return None
    try:
        read = json.loads(fields[FIELD])
        turns = read["turns"]
        return Record(read["parameters"], None if turns is None else [Turn(*turn) for turn in turns])
    except (ValueError, KeyError, TypeError) as error:
        raise LogLost("the stored session cannot be read") from error
