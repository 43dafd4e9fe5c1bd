"""Apply each kind of fault to a world, and undo it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.client import Stranger
from tests.simulation.schedule import Fault

if TYPE_CHECKING:
    from tests.simulation.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world

    def plan(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(fault.at_s, self._do, fault)
        if fault.kind == "redis-crash" and fault.amount:
            before_s = max(0.0, fault.at_s - fault.amount)
            loop.call_later(before_s, self._remember, fault)

    def _remember(self, fault: Fault) -> None:
        self._world.snapshots[fault] = self._world.redis.sessions.state()

    def _do(self, fault: Fault) -> None:
        self._world.ledger.note(str(fault))
        self._world.ledger.met[fault.kind] += 1
        getattr(self, "_" + fault.kind.replace("-", "_"))(fault)

    def _later(self, delay_s: float, function: object, *args: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, function, *args)  # type: ignore[arg-type]

    def _kill(self, fault: Fault) -> None:
        self._end_life(fault.where[0], silent=bool(fault.amount))
        self._later(fault.for_s, self._start_life, fault.where[0])

    def _end_life(self, name: str, *, silent: bool) -> None:
        node = self._world.nodes[name]
        node.process.crash()
        self._world.ledger.note(f"{name} is dead")
        self._world.network.die(name, silent=silent)

    def _start_life(self, name: str) -> None:
        node = self._world.nodes[name]
        if not node.process.alive:
            self._world.ledger.note(f"{name} is back")
            node.start()

    def _drain(self, fault: Fault) -> None:
        name = fault.where[0]
        node = self._world.nodes[name]
        if node.process.alive:
            node.process.spawn(node.drain())
            self._later(self._world.schedule.timing.drain_s, self._replace, name, node.process)

    def _replace(self, name: str, process: object) -> None:
        if self._world.nodes[name].process is process:
            self._world.verdicts.drained(name)
            self._end_life(name, silent=False)
            self._start_life(name)

    def _engine_fails(self, fault: Fault) -> None:
        target = self._world.targets[fault.where[0]]
        target.engine.failing = True
        self._later(fault.for_s, setattr, target.engine, "failing", False)

    def _draft_fails(self, fault: Fault) -> None:
        if draft := self._world.drafts.get(fault.where[0]):
            draft.failing.until_s = asyncio.get_running_loop().time() + fault.for_s

    def _jump(self, fault: Fault) -> None:
        gateway = next(it for it in self._world.gateways if it.address == fault.where[0])
        gateway.clock.ahead_ns += round(fault.amount * 1e9)

    def _cut(self, fault: Fault) -> None:
        one, other = fault.where
        self._world.network.cut(one, other, fault.for_s)

    def _deaf(self, fault: Fault) -> None:
        sender, receiver = fault.where
        self._world.network.cut_one_way(sender, receiver, fault.for_s)

    def _freeze(self, fault: Fault) -> None:
        [name] = fault.where
        self._world.network.freeze(name, fault.for_s)
        if name in self._world.nodes:
            process = self._world.nodes[name].process
            process.frozen_until = asyncio.get_running_loop().time() + fault.for_s

    def _slow(self, fault: Fault) -> None:
        [name] = fault.where
        self._world.network.slow(name, fault.amount)
        self._later(fault.for_s, self._world.network.slow, name, 1.0)
        if name in self._world.nodes:
            process = self._world.nodes[name].process
            process.slow = min(fault.amount, 20.0)
            self._later(fault.for_s, setattr, process, "slow", 1.0)

    def _reset(self, fault: Fault) -> None:
        one, other = fault.where
        self._world.network.reset(one, other)

    def _redis_crash(self, fault: Fault) -> None:
        redis = self._world.redis
        if redis.up:
            redis.crash()
            self._later(fault.for_s, redis.come_back, self._world.snapshots.get(fault))

    def _failover(self, fault: Fault) -> None:
        redis = self._world.redis
        if redis.up:
            redis.crash()
            self._later(fault.for_s, partial(redis.fail_over, latest=not fault.amount))

    def _step(self, fault: Fault) -> None:
        [name] = fault.where
        if name in self._world.nodes:
            self._world.nodes[name].process.wall_s += fault.amount
        else:
            self._world.redis.ahead_s += fault.amount
            self._world.ledger.stepped(fault.amount)

    def _damage(self, fault: Fault) -> None:
        client, how = fault.where
        session_id = self._world.planned(client).spec.session_id
        sessions = self._world.redis.sessions
        if sessions.holds(session_id):
            self._world.ledger.damaged.add(session_id)
            sessions.damage(session_id, fault.amount, tear=how == "torn")

    def _stranger(self, fault: Fault) -> None:
        planned = self._world.planned(fault.where[0])
        Stranger(self._world, planned).start()

    def _at_redis(self, fault: Fault) -> None:
        setattr(self._world.redis, fault.kind, fault.amount)
        self._later(fault.for_s, setattr, self._world.redis, fault.kind, 0.0)

    _lossy = _repeat = _at_redis

    def _at_client(self, fault: Fault) -> None:
        client = self._world.clients.get(fault.where[0])
        if client is None:
            return
        match fault.kind:
            case "stall":
                client.stalled_until = asyncio.get_running_loop().time() + fault.for_s
            case "elsewhere":
                client.go_elsewhere()
            case "abort":
                client.abort()
            case "delete":
                client.delete()
            case "leave":
                client.leave()
            case "wrong-resume":
                client.resume_wrongly(int(fault.amount))
            case _:
                self._world.add_client(f"{fault.where[0]}-rival", client.planned)

    _stall = _elsewhere = _abort = _delete = _rival = _leave = _wrong_resume = _at_client
