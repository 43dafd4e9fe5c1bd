"""The record of a response that its session stores, so that any gateway can describe and continue it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from galley.core.errors import LogLost
from services.gateway.http.transport.encoding import to_unicode
from services.gateway.session.streams import PRIVATE_FIELD

FIELD = "response"
"""Field of a stored session: the record of its response."""


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class Turn(NamedTuple):
    """A turn of a conversation: a text, calls that the model made, or with a `call_id` the result of one."""

    role: str
    text: str
    calls: Sequence[Call] = ()
    call_id: str = ""

    @property
    def stored(self) -> Sequence[Any]:
        return (
            self if self.calls or self.call_id else self[:2]
        )  # gateways of earlier versions know two fields


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
        turns = None if self.turns is None else [turn.stored for turn in self.turns]
        fields = {"parameters": self.parameters, "turns": turns}
        private = {PRIVATE_FIELD: b"1"} if turns is None else {}
        return {FIELD: to_unicode(fields).encode(), **private}


def stored_record(fields: Mapping[str, bytes]) -> Record | None:
    """Return the record of a stored session; None if it is no response. Raise LogLost."""
    if FIELD not in fields:
        return None
    try:
        read = json.loads(fields[FIELD])
        turns = read["turns"]
        return Record(read["parameters"], None if turns is None else list(map(_turn, turns)))
    except (ValueError, KeyError, TypeError) as error:
        raise LogLost("the stored session cannot be read") from error


def _turn(stored: Sequence[Any]) -> Turn:
    turn = Turn(*stored)
    return turn._replace(calls=[Call(*call) for call in turn.calls])
