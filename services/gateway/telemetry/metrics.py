"""What a gateway counts, put together; what others count anyhow is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.answer.answer import SessionSpec
from galley.core.names import MOVE_REASONS
from galley.core.routing.breaker import State
from galley.core.session.ports import Clock
from services.gateway.replicas.drafts import Drafts
from services.gateway.replicas.membership import Members
from services.gateway.replicas.moves_count import Moves
from services.gateway.replicas.targets import Targets
from services.gateway.session.streams import Streams
from services.gateway.telemetry.call_metrics import Calls, CountingCallMeter
from services.gateway.telemetry.meter import CallMeter, GatewayMeter
from services.gateway.telemetry.session_metrics import CountingStreamMeter, Sessions

_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}


class CountingGatewayMeter(GatewayMeter):
    """Counts in a registry; `watch` once, when all of the gateway is there."""

    def __init__(self, registry: Registry, clock: Clock, model: str) -> None:
        self._registry = registry
        self._calls = Calls(registry, clock, model)
        self._sessions = Sessions(registry, model)
        self._refused = registry.count(catalogue.ADMISSION_REFUSED)

    def watch(self, streams: Streams, targets: Targets, drafts: Drafts | None) -> None:
        """Read from these what they know; `drafts` is None where there are none by choice."""
        pools: dict[str, Members[Any]] = {"target": targets}
        moves = [targets.moves]
        if drafts is not None:
            pools["draft"] = drafts
            moves.append(drafts.moves)
        add = self._registry.observe
        add(catalogue.SESSIONS_OPEN, lambda: [((), streams.held)])
        add(catalogue.REPLICAS, lambda: _replicas(pools))
        add(catalogue.FAILOVERS, lambda: _failovers(moves))
        add(catalogue.BREAKER_STATE, lambda: _breakers(drafts))

    @contextmanager
    def call(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        operation: str,
        model: str | None,
    ) -> Iterator[CallMeter]:
        """See `GatewayMeter`."""
        meter = CountingCallMeter(self._calls, context, operation=operation, model=model)
        try:
            yield meter
        except BaseException as error:
            meter.end(error)
            raise
        meter.end(None)

    def stream(self, spec: SessionSpec) -> CountingStreamMeter:
        """See `GatewayMeter`."""
        return CountingStreamMeter(self._sessions, spec.workload)

    def refused(self, reason: str) -> None:
        """See `GatewayMeter`."""
        self._refused.at(reason).value += 1

    def retried(self) -> None:
        """See `GatewayMeter`."""
        self._sessions.retries.value += 1


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
