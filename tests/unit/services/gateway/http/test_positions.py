"""The places of answers, which the ids of events name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from galley.core.answer.answer import Chunk
from galley.core.content import prefix_hash
from services.gateway.http.api.choices import Choice
from services.gateway.http.api.positions import Position

OUTPUT = [5, 9, 2, 33, 17, 60, 71]
SEEN = 4


def test_a_place_has_the_hash_of_all_tokens_before_it_though_the_log_had_lost_some() -> None:
    """The session computes them again after the response has begun, before it sends its first chunk."""
    answer = SimpleNamespace(output=OUTPUT[:1])
    session: Any = SimpleNamespace(answer=answer)
    choice = Choice(0, session, Position(SEEN, prefix_hash(OUTPUT[:SEEN]), has_begun=True))
    for end in (5, 7):
        answer.output = OUTPUT[:end]
        start = choice.position.index
        choice.advance(Chunk(start, tuple(OUTPUT[start:end]), "", (False,) * (end - start)))
        assert choice.position == Position(end, prefix_hash(OUTPUT[:end]), has_begun=True)
