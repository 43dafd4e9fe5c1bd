"""Which errors the faults in force allow the product's client to raise, and which it should have survived."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import grpc

from galley.client.errors import GalleyRpcError
from tests.simulation import schedule as settings
from tests.simulation.ledger import BLOCK_TOKENS
from tests.simulation.schedule import Fault
from tests.simulation.schedules.limits import grown_s
from tests.simulation.system.replicas import BLOCKS

if TYPE_CHECKING:
    from tests.simulation.client import SimClient
    from tests.simulation.world import World

LEAVE_OWNERS = frozenset(
    {"stall", "jump", "engine-fails", "draft-fails", "repeat", "abort", "leave", "wrong-resume", "stranger"}
)
"""Faults that cut off neither a stream from its gateway nor an owner from the store."""
_HARMLESS = frozenset({"draft-fails", "jump", "repeat", "wrong-resume", "abort", "delete", "stranger"})
"""Faults that no stream may end for: a jump if it is shorter than what a gateway waits for a response."""
_RETRIED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_DEADLINE_S = 0.1
"""Time by which a gateway may call a deadline passed too early: it knows it from a message."""
_ROUNDING_S = 1e-6
"""Time by which rounding may put an error that a fault causes before that fault."""


class Verdicts:
    def __init__(self, world: World) -> None:
        self._world = world

    def raised(self, client: SimClient, error: GalleyRpcError) -> None:
        """Violate a rule unless the faults allow the client to raise `error`."""
        self._world.ledger.met[f"raised {error.code.name}"] += 1
        match error.code:
            case grpc.StatusCode.NOT_FOUND:
                self._forgotten(client)
            case grpc.StatusCode.DATA_LOSS:
                self.data_lost(client, str(error))
            case grpc.StatusCode.FAILED_PRECONDITION:
                session_id, ledger = client.spec.session_id, self._world.ledger
                succeeded = ledger.is_succeeded(session_id, client.process.name)
                if not succeeded and session_id not in ledger.damaged:
                    self._wrong(client, error, "is fenced without a living successor")
            case grpc.StatusCode.DEADLINE_EXCEEDED if not isinstance(error.__cause__, GalleyRpcError):
                self._deadline_passed(client, error)
            case code if code in _RETRIED or code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._gave_up(client, error)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                pass  # `CheckedAdmission` judges it
            case _:
                self._wrong(client, error, "raises what no fault explains")

    def stranger_failed(self, name: str, error: GalleyRpcError) -> None:
        """Violate a rule unless the session of another principal looks as if there was none."""
        self._world.ledger.met[f"stranger: {error.code.name}"] += 1
        busy = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if error.code is grpc.StatusCode.NOT_FOUND or busy:
            return
        if error.code not in _RETRIED or not self._is_troubled():
            self._world.ledger.violate(f"{name} does not get NOT_FOUND: {error}")

    def drained(self, name: str) -> None:
        """Violate a rule if a gateway has streams when its drain ends, and nothing else is in the way."""
        world = self._world
        schedule = world.schedule
        rounds_s = schedule.timing.drain_s - 10 * schedule.pass_s
        alone = all(fault.kind in _HARMLESS or fault.where == (name,) for fault in schedule.faults)
        alone = alone and not self.may_fill_targets()  # a session that waits for blocks moves later
        open_streams = sum(len(it.streams._running) for it in world.gateways if it.address == name)
        if alone and rounds_s > 0.5 and all(it.pause_s == 0.0 for it in schedule.sessions):
            world.ledger.met["drained in time"] += 1
            if open_streams:
                world.ledger.violate(
                    f"{name} is killed with {open_streams} open streams, as its drain has ended"
                )

    def abort_failed(self, client: SimClient, error: GalleyRpcError) -> None:
        lost = error.code is grpc.StatusCode.NOT_FOUND
        troubled = self._is_troubled() or client.planned.breaks_off
        may_pass = error.code in _RETRIED or error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if not lost and not (may_pass and troubled):
            self._wrong(client, error, "cannot abort")

    def data_lost(self, client: SimClient, what: str) -> None:
        """Violate a rule unless the log was damaged, or the lost part was computed by another build."""
        mixed = len(set(self._world.schedule.builds)) > 1
        session_id, ledger = client.spec.session_id, self._world.ledger
        lost = session_id in ledger.lost or session_id in ledger.forgotten
        explained = lost and (mixed or ledger.was_aborted(session_id))
        if not explained and session_id not in ledger.damaged:
            ledger.violate(f"{client.process.name}: {what}")

    def may_fill_targets(self) -> bool:
        """Return True if all sessions together need more blocks than a target has: it may refuse some."""
        needed = sum(-(-it.spec.max_position // BLOCK_TOKENS) for it in self._world.schedule.sessions)
        return needed > BLOCKS

    def _forgotten(self, client: SimClient) -> None:
        """Check the loss of a session: one that its owner renews, or has just renewed, must not expire.

        One that somebody has made again since the client asked for the rest may have been gone before. One
        that has ended is kept for a time of its own, also while its owner waits for its client.
        """
        world, timing = self._world, self._world.schedule.timing
        session_id = client.spec.session_id
        if client.resumes and world.ledger.made_at[session_id] > client.opened_s:
            return
        if _now_s() - world.ledger.finished_at.get(session_id, math.inf) > 0.9 * settings.FINISHED_TTL_S:
            return
        left_s = world.ledger.left_at.get(session_id, math.inf)
        if _now_s() - left_s < 0.9 * (timing.ttl_s - timing.renew_s) and world.has_only(LEAVE_OWNERS):
            world.ledger.violate(f"{client.process.name}: its session has expired")

    def _deadline_passed(self, client: SimClient, error: GalleyRpcError) -> None:
        within_s, jumped = client.planned.within_s, self._world.has_any({"jump"})
        if within_s is None or (_now_s() < client.opened_s + within_s - _DEADLINE_S and not jumped):
            self._wrong(client, error, "has time left")

    def _gave_up(self, client: SimClient, error: GalleyRpcError) -> None:
        """Check that the client has retried for as long as it should, and that there was a reason."""
        retries, within_s = client.planned.retries, client.planned.within_s
        patience_s, started = retries.patience_s, client.stream is not None and client.stream.session_id
        if not started:
            patience_s = min(patience_s, retries.start_patience_s)
        due_s = client.heard_s + patience_s
        if within_s is not None:
            due_s = min(due_s, client.opened_s + within_s)
        if _now_s() < due_s - max(retries.first_pause_s, retries.longest_pause_s):
            self._wrong(client, error, f"gives up {due_s - _now_s():.3f} s before its time")
        too_full = self.may_fill_targets() and "KV memory is full" in str(error)
        if not self._is_troubled() and not too_full:
            self._wrong(client, error, "gives up although all faults have ended")

    def _is_troubled(self) -> bool:
        """Return True if a fault is in force, or ended so recently that its effects may last."""
        world = self._world
        since_s = _now_s() - world.ready_s
        return any(
            fault.at_s - _ROUNDING_S <= since_s <= self._ends_s(fault) for fault in world.schedule.faults
        )

    def _ends_s(self, fault: Fault) -> float:
        schedule = self._world.schedule
        timing = schedule.timing
        waits_s = min(timing.store_s, timing.verify_s, timing.target_s)
        if fault.kind in _HARMLESS and not (fault.kind == "jump" and fault.amount >= waits_s):
            return 0.0
        unread_s = schedule.client_s if fault.kind == "stall" else 0.0
        slowest_s = max(it.pause_s * it.spec.max_position for it in schedule.sessions)
        return fault.at_s + fault.for_s + max(unread_s, slowest_s) + timing.settled_s + grown_s(schedule)

    def _wrong(self, client: SimClient, error: GalleyRpcError, what: str) -> None:
        self._world.ledger.violate(f"{client.process.name} {what}: {error}")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
