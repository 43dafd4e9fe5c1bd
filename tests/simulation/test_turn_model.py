"""Compare the simulated turns to audit with the real scripts on a real server: same calls, same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.gateway.audit.records import AuditRecords
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.simulation.system.redis import Turns

_RUNS = 12
_CALLS = 60
_POOL = "pool"
_ADDRESSES = ("one:1", "two:2")
# No sum of these steps comes close to the end of a turn of 150 s, or of the rests of 99 and 495 s.
_STEPS_S = (60, 200)
_COMPUTE_NS = (1_000_000_000, 5_000_000_000)
_SLACK_MS = 4_000


class _Turns(Turns):
    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(lambda: self.now_s)


class _Gateway:
    """The records of a gateway, and its nonce for each address in the model."""

    def __init__(self, server: Server) -> None:
        self.real = AuditRecords(server.url, _POOL, call_timeout_s=20)
        self.nonces = {address: object() for address in _ADDRESSES}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY, "--appendfsync", "no") as server:
        yield server


async def test_random_turns_match_the_scripts(server: Server) -> None:
    begun = set()
    for seed in range(_RUNS):
        await server.command("FLUSHALL")
        rng, model, gateways = random.Random(seed), _Turns(), [_Gateway(server) for _ in range(3)]
        for number in range(_CALLS):
            gateway, address = rng.choice(gateways), rng.choice(_ADDRESSES)
            match rng.choice(["begin", "begin", "begin", "end", "step"]):
                case "begin":
                    waits_ms = await gateway.real.wait_ms(address)
                    assert abs(waits_ms - model.wait_ms(address)) < _SLACK_MS, (seed, number)
                    due_ms = model.begin(address, gateway.nonces[address])
                    wait_ms = await gateway.real.begin_turn(address)
                    assert (wait_ms > 0) == (due_ms > 0), (seed, number)
                    assert abs(wait_ms - due_ms) < _SLACK_MS, (seed, number)
                    begun.add(due_ms == 0)
                case "end":
                    compute_ns = rng.choice(_COMPUTE_NS)
                    model.end(address, gateway.nonces[address], compute_ns)
                    gateway.nonces[address] = object()
                    await gateway.real.end_turn(address, compute_ns)
                case _:
                    step_s = rng.choice(_STEPS_S)
                    model.now_s += step_s
                    await _step(server, 1000 * step_s)
        for gateway in gateways:
            await gateway.real.close()
    assert begun == {True, False}


async def _step(server: Server, step_ms: int) -> None:
    """Shorten all lives, as a step of the server's clock does."""
    async with server.raw() as raw:
        for key in await raw.keys():
            await raw.pexpire(key, await raw.pttl(key) - step_ms)
