"""Prove that attacks crash, hang and leak nothing, and delay no other client: `make prove-attacks`.

It is the long form of tests/attack. Each service runs in a process of its own, over a real Valkey. A second
principal, in a process of its own, streams and calls throughout, and must receive what it receives without
attacks; p99 of its waits under each attack may exceed the quiet value by 100 ms. The attackers share one
core at the lowest priority, so that their own work delays nobody. The attacks are fuzzed messages on every
RPC of every port; bytes that are no HTTP/2, floods of frames, rapid resets, header and gzip bombs; storms
of calls; damaged logs; keys in a FIFO and on a mount that hangs; no file descriptors; several rounds of
10,000 idle streams, and of 10,000 idle connections; and, over HTTP, 20,000 requests with changed bytes,
malformed requests, header bombs, bodies made to harm, slow requests, unread responses, storms and idle
connections. `--protocol` chooses the protocol of the second principal. A full store is left to tests: there
every stream pauses. Memory is read after each part, after a garbage collection. Prints goals, writes
bench/results/attacks.json, or attacks-http.json for `--protocol http`; exits 1 if it finds a fault or misses
a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.harness import BENCH, Goal, goal_lines, result_path, write_record
from galley.trace.read.otlp_file import Lines, spans_in
from tests.attack import floods, storms
from tests.attack.bystander import GRPC, PROTOCOLS, BystanderProcess, bystander_process
from tests.attack.campaign import Campaign
from tests.attack.http.campaign import http_parts
from tests.attack.stack import (
    HEALTH,
    METERED_BURST,
    MIB,
    SERVICES,
    Attacked,
    ProcessState,
    attacked,
    warmed_up,
)
from tests.fakes import tokenizer_files
from tests.fakes.grammar_bombs import BOMBS, small_schema
from tests.fakes.mounts import NEEDED, hanging, may_mount
from tests.fakes.redis_servers import VALKEY, running

_PARTS = 10
_MODEL_INFO = "/galley.v1.Generation/GetModelInfo"
# Limits of memory growth, in MiB: by all fuzzed messages after the first tenth of them (a draft keeps up to
# 8 MB of recent answers of each kind of session; the fuzzer has four kinds, and makes up others); by each
# repeated attack after its first round; and at any time.
_MOST_KEPT, _MOST_MORE, _MOST_EVER = 64, 64, 900
_QUIET_S, _FILES_S = 15, 5
_BYSTANDER_TASKS = 60
_MOST_ADDED_MS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if it finds no fault."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_attacks", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="fuzzed messages")
    parser.add_argument("--streams", type=int, default=10_000, help="idle streams, and idle connections")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each attack but the fuzzed messages")
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, default="grpc", help="protocol of the second principal"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    with running(VALKEY) as store, tempfile.TemporaryDirectory() as tokenizer:
        tokenizer_files.write(Path(tokenizer))
        with attacked(store.url, Path(tokenizer)) as stack:
            with bystander_process(given.protocol, stack.address(given.protocol)) as bystander:
                proof = Proof(stack, bystander, given.rounds)
                asyncio.run(proof.run(given.messages, given.streams, given.seed))
            proof.end()
    goals = proof.goals(given.messages)
    held = not proof.faults and all(goal.met for goal in goals)
    record = {
        "seed": given.seed,
        "protocol": given.protocol,
        "attackers": _step_aside.__doc__,
        **proof.record,
        "goals": goals,
        "faults": proof.faults,
        "held": held,
    }
    path = result_path("attacks" if given.protocol == GRPC else f"attacks-{given.protocol}", given.results)
    write_record(path, record)
    for line in (*goal_lines(goals), *(f"fault: {fault}" for fault in proof.faults), f"record: {path}"):
        print(line)
    return 0 if held else 1


def _step_aside() -> None:
    """Run the attackers on one core at the lowest priority; the services and the bystander have both."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(19)


class Proof:
    """The parts of the proof; `faults` lists what was found, `record` what was done and measured."""

    def __init__(self, stack: Attacked, bystander: BystanderProcess, rounds: int) -> None:
        self.faults: list[str] = []
        self._bystander = bystander
        self._rounds = rounds
        self._waits: dict[str, list[dict[str, float]]] = {}
        self.record: dict[str, Any] = {}
        self._stack = stack
        self._schemas = 0
        self._initial: ProcessState

    async def run(self, messages: int, streams: int, seed: int) -> None:
        """Run all parts but the end."""
        _step_aside()
        await warmed_up(self._stack)
        self._initial = await self._stack.state()
        self._stack.forget_peak()
        async with self._watched("quiet"):
            await asyncio.sleep(_QUIET_S)
        await self._fuzz(messages, seed)
        for name, part in self._parts(streams).items():
            await self._repeat(name, part)
        self.record["bystander"] = self._waits
        left = await self._stack.settled(self._initial, _BYSTANDER_TASKS)
        self.record["log_bytes"] = left.logged
        self.faults += left.errors
        peak = (self._stack.peak_rss() - self._initial.rss) // MIB
        self.record["peak_mib"] = peak
        self._expect(peak < _MOST_EVER, f"peak memory grew by {peak} MiB, of at most {_MOST_EVER}")

    def end(self) -> None:
        """Stop the services. No task may be left, and its trace file must be readable."""
        self.record["spans"] = sum(len(list(spans_in(line.document()))) for line in Lines(self._stack.traces))
        outcome = self._stack.stop()
        self._expect(outcome == {"tasks": 0, "errors": []}, f"it ended with {outcome}")

    async def _fuzz(self, messages: int, seed: int) -> None:
        campaign = Campaign(self._stack.addresses, seed)
        began_s, memory = time.monotonic(), []
        for _ in range(_PARTS):
            async with self._watched("fuzzed messages"):
                await campaign.run(messages // _PARTS)
            memory.append(await self._mib())
            print(
                f"fuzzed messages: {campaign.outcome.messages}, {memory[-1]} MiB more than at first",
                flush=True,
            )
        outcome = campaign.outcome
        self.record |= {
            "messages": outcome.messages,
            "fuzz_s": round(time.monotonic() - began_s, 1),
            "ends": dict(sorted(outcome.ends.items())),
            "items": dict(sorted(outcome.items.items())),
            "mib_after_each_tenth": memory,
        }
        self.faults += outcome.faults
        self._expect(outcome.messages >= messages, f"only {outcome.messages} messages")
        self._expect(memory[-1] - memory[0] < _MOST_KEPT, f"memory grows: {memory} MiB")

    def _parts(self, streams: int) -> dict[str, Callable[[], Awaitable[None]]]:
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "nonsense": self._nonsense,
            "floods": self._floods,
            "bad credentials": self._bad_credentials,
            "replays": self._replays,
            "crafted stops": self._crafted_stops,
            "grammars": self._grammars,
            "texts": self._texts,
            "cancels and resumes": self._cancels_and_resumes,
            "changed logs": self._changed_logs,
            "keys in a FIFO": self._keys_in_a_fifo,
            "no file descriptors": self._no_file_descriptors,
            "idle streams": lambda: self._idle_streams(streams),
            "idle connections": lambda: self._idle_connections(streams),
            **http_parts(self._stack.http, self._expect, connections=streams),
        }
        if may_mount():
            parts["keys on a mount that hangs"] = self._keys_on_a_mount_that_hangs
        else:
            print(f"keys on a mount that hangs: not tried, {NEEDED}", flush=True)
        return parts

    async def _nonsense(self) -> None:
        for service in (*SERVICES, HEALTH):
            await floods.nonsense(self._stack.addresses[service])

    async def _floods(self) -> None:
        gateway = self._stack.gateway
        for name in floods.FLOODS:
            await floods.flood_of(gateway, name, 100_000)
        await floods.rapid_resets(gateway, 20, 5_000)
        for name in floods.HEADER_BOMBS:
            end = await floods.header_bomb(gateway, name)
            self._expect(end == floods.end_of_bomb(name), f"a header bomb ({name}) ends {end}")
        await floods.endless_headers(gateway, 16_384)
        bomb = floods.gzip_bomb(60 * MIB)
        for status, message in await floods.gzip_bombs(gateway, _MODEL_INFO, bomb, 50):
            self._expect(status == "3", f"a gzip bomb ends {status} ({message})")

    async def _bad_credentials(self) -> None:
        ends = await storms.bad_credentials(self._stack.gateway, rounds=100)
        self._expect(ends.keys() == {"UNAUTHENTICATED"}, f"bad credentials end {ends}")

    async def _replays(self) -> None:
        ends = await storms.replays(self._stack.gateway, tokens=900, at_once=8, rounds=10)
        self._expect(ends["OK"] > 0, f"replays end {ends}")

    async def _crafted_stops(self) -> None:
        ends = await storms.crafted_stops(self._stack.gateway, tokens=400, at_once=8, rounds=5)
        self._expect(ends.keys() == {"OK"}, f"requests with crafted stops end {ends}")

    async def _grammars(self) -> None:
        """Send grammars made to take long, and 1,000 schemas that no request had before."""
        self._schemas += 1000
        small = [small_schema(number) for number in range(self._schemas - 1000, self._schemas)]
        for specs in (list(BOMBS.values()) * 3, small):
            ends = await storms.grammars(self._stack.gateway, specs, at_once=8)
            self._expect(ends.keys() <= {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, f"grammars: {ends}")

    async def _texts(self) -> None:
        for name in storms.TEXTS:
            ends = await storms.tokenizer_bomb(self._stack.gateway, name, 50)
            self._expect(ends.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, f"{name}: {ends}")

    async def _cancels_and_resumes(self) -> None:
        for at_once in (40, 4):
            ends = await storms.resumes(self._stack.gateway, at_once, rounds=10)
            self._expect("INTERNAL" not in ends, f"resumes end {ends}")
        await storms.cancels(self._stack.gateway, sessions=100, tokens=METERED_BURST // 2)

    async def _changed_logs(self) -> None:
        ends = await storms.changed_logs(self._stack.gateway, self._stack.store, tokens=400)
        self._expect(ends.keys() <= storms.ENDS_OF_CHANGED_LOGS, f"streams of changed logs end {ends}")

    async def _keys_in_a_fifo(self) -> None:
        with self._stack.keys_replaced_by_fifo():
            await self._stack.expect_error("files not reloaded")
            await asyncio.sleep(_FILES_S)

    async def _keys_on_a_mount_that_hangs(self) -> None:
        with hanging(self._stack.keys.parent):
            await asyncio.sleep(_FILES_S)
        await self._stack.forget_errors("files not reloaded")

    async def _no_file_descriptors(self) -> None:
        """Take all file descriptors again and again: the server closes connections that only wait."""
        until_s = time.monotonic() + _FILES_S
        async with AsyncExitStack() as opened:
            with self._stack.out_of_files(spare=4) as is_exhausted:
                while time.monotonic() < until_s:
                    await floods.connections_until(is_exhausted, self._stack, opened)
                    await asyncio.sleep(0.1)

    async def _idle_streams(self, count: int) -> None:
        async with AsyncExitStack() as opened:
            before = await self._stack.state()
            wires = await floods.idle_streams(self._stack, opened, before, count - 200)
            self._expect(not any(one.received.ended for one in wires), "a connection of idle streams was cut")

    async def _idle_connections(self, count: int) -> None:
        """Open idle connections; the server closes those beyond its limit at once."""
        async with AsyncExitStack() as opened:
            self.record["connections_opened"] = await floods.idle_connections(self._stack, opened, count)

    async def _repeat(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run `part` in several rounds; memory must not grow by _MOST_MORE after the first round."""
        memory = []
        began_s = time.monotonic()
        for _ in range(self._rounds):
            async with self._watched(name):
                await part()
            memory.append(await self._mib())
        self.record[name] = {"rounds": self._rounds, "mib_after_each": memory}
        self._expect(memory[-1] - memory[0] < _MOST_MORE, f"{name}: memory grows: {memory} MiB")
        print(f"{name}: {time.monotonic() - began_s:.0f} s, {memory} MiB more than at first", flush=True)

    @asynccontextmanager
    async def _watched(self, name: str) -> AsyncIterator[None]:
        """Note the bystander's waits meanwhile; those of reading the state are not the attack's."""
        await self._bystander.report()
        yield
        self._waits.setdefault(name, []).append(await self._bystander.report())

    def goals(self, messages: int) -> list[Goal]:
        """Return a goal for the number of messages, and one for each attack, of its worst round."""
        sent = self.record["messages"]
        enough = Goal("fuzz", "fuzzed messages", f"{sent:,}", f">= {messages:,}", sent >= messages)
        return [enough, *(self._goal(name) for name in self._waits if name != "quiet")]

    def _goal(self, name: str) -> Goal:
        what = "p99 of another caller's waits above the quiet value, for a chunk and for a call"
        [quiet] = self._waits["quiet"]
        kinds = ("chunk_p99_ms", "call_p99_ms")
        added = [max(waits[kind] for waits in self._waits[name]) - quiet[kind] for kind in kinds]
        measured = " and ".join(f"{ms:+.0f} ms" for ms in added)
        return Goal(name, what, measured, f"<= {_MOST_ADDED_MS} ms", max(added) <= _MOST_ADDED_MS)

    async def _mib(self) -> int:
        """Return the growth of memory since the start, once all tasks but the bystander's have ended."""
        now = await self._stack.settled(self._initial, _BYSTANDER_TASKS)
        return (now.rss - self._initial.rss) // MIB

    def _expect(self, holds: bool, fault: str) -> None:  # reads as a sentence
        if not holds:
            self.faults.append(fault)


if __name__ == "__main__":
    sys.exit(main())
