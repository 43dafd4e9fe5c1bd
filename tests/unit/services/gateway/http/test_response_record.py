"""The record of a response is read without parsing it, also if an earlier version wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from galley.core.errors import LogLost
from services.gateway.http.responses.record import FIELD, Call, Record, Turn, stored_record

PARAMETERS = {"text": 'é},"turns":null}', "tools": [{"parameters": {"x": {}, "turns": [1]}}], "user": None}
TURNS = [
    ["user", '},"turns":[]}'],
    ["assistant", "", [["c", "turns", '{"turns":{}}']], ""],
    ["tool", "x", [], "c"],
]


@pytest.mark.parametrize("turns", [TURNS, [], None])
def test_a_record_is_split_where_its_turns_begin(turns: Any) -> None:
    record = {"parameters": PARAMETERS, "turns": turns}
    stored = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
    read = stored_record({FIELD: stored})
    assert read is not None
    assert json.loads(b"{%b}" % read.parameters) == PARAMETERS
    assert read.stored[FIELD] == stored
    assert (read.turns is None) == (turns is None)


def test_turns_are_read_with_their_calls() -> None:
    assert Record(b"", json.dumps(TURNS).encode()).read_turns() == [
        Turn("user", '},"turns":[]}'),
        Turn("assistant", "", [Call("c", "turns", '{"turns":{}}')]),
        Turn("tool", "x", [], "c"),
    ]


def test_a_session_without_a_record_is_no_response() -> None:
    assert stored_record({}) is None


@pytest.mark.parametrize(
    "stored", [b"", b"{}", b'{"parameters":{"a":1}', b'{"turns":[]}', b'[{},"turns":[]}']
)
def test_a_damaged_record_is_lost(stored: bytes) -> None:
    with pytest.raises(LogLost, match="cannot be read"):
        stored_record({FIELD: stored})


@pytest.mark.parametrize("turns", [b"[", b"1", b"[1]", b'[["user"]]'])
def test_damaged_turns_are_lost(turns: bytes) -> None:
    with pytest.raises(LogLost, match="cannot be read"):
        Record(b"", turns).read_turns()
