"""Gauges of a gateway's streams, replicas and breakers, read when metrics are collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.names import MOVE_REASONS
from galley.core.routing.breaker import State
from services.gateway.replicas.drafts import Drafts
from services.gateway.replicas.membership import Members
from services.gateway.replicas.moves_count import Moves
from services.gateway.replicas.targets import Targets
from services.gateway.session.streams import Streams

_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}


def observe_gateway(registry: Registry, streams: Streams, targets: Targets, drafts: Drafts | None) -> None:
    """Register the gauges; `drafts` is None if the gateway is configured without."""
    pools: dict[str, Members[Any]] = {"target": targets}
    moves = [targets.moves]
    if drafts is not None:
        pools["draft"] = drafts
        moves.append(drafts.moves)
    add = registry.observe
    add(catalogue.SESSIONS_OPEN, lambda: [((), streams.held)])
    add(catalogue.REPLICAS, lambda: _replicas(pools))
    add(catalogue.FAILOVERS, lambda: _failovers(moves))
    add(catalogue.BREAKER_STATE, lambda: _breakers(drafts))


def _replicas(pools: dict[str, Members[Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    for pool, members in pools.items():
        up, down = members.up_and_down()
        yield (pool, "up"), up
        yield (pool, "down"), down


def _failovers(all_moves: Sequence[Moves]) -> Iterator[tuple[tuple[str, str], float]]:
    for moves in all_moves:
        for reason in MOVE_REASONS:
            yield (moves.pool, reason), moves.counts[reason]


def _breakers(drafts: Drafts | None) -> Iterator[tuple[tuple[str, str], float]]:
    for address, state in drafts.breakers() if drafts is not None else ():
        yield ("draft", address), _BREAKER[state]
