"""The rounds of an answer as the HTTP API describes them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from galley.core.session import events as ev
from services.gateway.http.api.rounds import Rounds

CHAIN = ev.RoundEnded(ev.Verified(1, 3, (7, 8), 1, 3, 8, "build"), 0, 9, 3, 1, 2, 0, 0, 9, 0, ev.Timing())


def test_a_tree_is_described_by_rank() -> None:
    tree = ev.VerifiedTree(depth=2, verified_by_rank=(2, 1), accepted_by_rank=(0, 1))
    chain, with_tree = Rounds(deque([CHAIN, replace(CHAIN, tree=tree)]), prompt_len=3).take(1)
    assert "ranks" not in chain
    assert with_tree["ranks"] == [(0, 2), (1, 1)]
