"""Gauges of a gateway's streams, replicas and breakers, read when metrics are collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.names import MOVE_REASONS
from galley.core.routing.breaker import State
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.membership import ReplicaPool
from services.gateway.replicas.targets import TargetPool
from services.gateway.session.streams import Streams

_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}


def observe_gateway(
    registry: Registry, streams: Streams, targets: TargetPool, drafts: DraftPool | None
) -> None:
    pools: list[ReplicaPool[Any]] = [targets] if drafts is None else [targets, drafts]
    add = registry.observe
    add(catalogue.SESSIONS_OPEN, lambda: [((), streams.held)])
    add(catalogue.REPLICAS, lambda: _replicas(pools))
    add(catalogue.FAILOVERS, lambda: _failovers(pools))
    add(catalogue.BREAKER_STATE, lambda: _breakers(drafts))


def _replicas(pools: Sequence[ReplicaPool[Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    for pool in pools:
        up, down = pool.up_and_down()
        yield (pool.role, "up"), up
        yield (pool.role, "down"), down


def _failovers(pools: Sequence[ReplicaPool[Any]]) -> Iterator[tuple[tuple[str, str], float]]:
    for pool in pools:
        for reason in MOVE_REASONS:
            yield (pool.role, reason), pool.move_counts[reason]


def _breakers(drafts: DraftPool | None) -> Iterator[tuple[tuple[str, str], float]]:
    for address, state in drafts.breakers() if drafts is not None else ():
        yield ("draft", address), _BREAKER[state]
