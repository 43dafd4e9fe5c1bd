"""The record of a response that its session stores, so that any gateway can describe and continue it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from galley.core.errors import LogLost
from services.gateway.session.streams import PRIVATE_FIELD

FIELD = "response"
"""Field of a stored session: the record of its response, an object of `parameters` and `turns`."""
_START, _BETWEEN, _END = b'{"parameters":{', b'},"turns":', b"}"
_NO_TURNS = b"null"
_UNREADABLE = "the stored session cannot be read"


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


@dataclass(slots=True)
class Record:
    """The record as JSON: it may be large, and most calls only pass it on. Empty until it was written.

    `parameters` are the members of an object, the parts of the request that a response repeats. `turns` are
    the conversation without instructions, for responses that continue it; None if the response is not to be
    kept.
    """

    parameters: bytes = b""
    turns: bytes | None = None

    @property
    def stored(self) -> dict[str, bytes]:
        record = b"".join([_START, self.parameters, _BETWEEN, self.turns or _NO_TURNS, _END])
        return {FIELD: record, **({PRIVATE_FIELD: b"1"} if self.turns is None else {})}

    def read_turns(self) -> list[Turn]:
        """Return the turns; none if the response is not to be kept. Raise LogLost."""
        try:
            return [*map(_turn, json.loads(self.turns or b"[]"))]
        except (ValueError, TypeError) as error:
            raise LogLost(_UNREADABLE) from error


def stored_record(fields: Mapping[str, bytes]) -> Record | None:
    """Return the record of a stored session; None if it is no response. Raise LogLost.

    The name `turns` of the last member has no like behind it: turns are lists of texts.
    """
    if FIELD not in fields:
        return None
    head, name, turns = fields[FIELD].rpartition(_BETWEEN)
    if not (name and head.startswith(_START) and turns.endswith(_END)):
        raise LogLost(_UNREADABLE)
    turns = turns.removesuffix(_END)
    return Record(head.removeprefix(_START), None if turns == _NO_TURNS else turns)


def _turn(stored: Sequence[Any]) -> Turn:
    turn = Turn(*stored)
    return turn._replace(calls=[Call(*call) for call in turn.calls]) if turn.calls else turn
