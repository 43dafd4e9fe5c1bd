"""Prove that attacks crash, hang and leak nothing, and disturb no other client: `make prove-attacks`.

It is the long form of tests/attack. All services run in one process, over a real Valkey. Another client
streams throughout, and must receive the tokens that it gets without attacks. The attacks are fuzzed messages
on every RPC of every port; bytes that are no HTTP/2, floods of frames, rapid resets, header and gzip bombs;
several rounds of 10,000 idle streams, and of 10,000 idle connections. Memory is read after each part, after a
garbage collection. Writes bench/results/attacks.json; exits 1 if it finds a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.harness import BENCH, commit, machine, result_path, write_record
from galley.trace.read.otlp_file import Lines, spans_in
from tests.attack import floods
from tests.attack.campaign import Campaign
from tests.attack.stack import HEALTH, MIB, SERVICES, Attacked, ProcessState, attacked, undisturbed, warmed_up
from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running

_PARTS = 10
_ROUNDS = 3
_MODEL_INFO = "/galley.v1.Generation/GetModelInfo"
# Limits of memory growth, in MiB: by all fuzzed messages after the first tenth of them (a draft keeps up to
# 8 MB of recent answers of each kind of session; the fuzzer has four kinds, and makes up others); by each
# repeated attack after its first round; and at any time.
_MOST_KEPT, _MOST_MORE, _MOST_EVER = 64, 64, 900


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if it finds no fault."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_attacks", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="fuzzed messages")
    parser.add_argument("--streams", type=int, default=10_000, help="idle streams, and idle connections")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    with running(VALKEY) as store, tempfile.TemporaryDirectory() as tokenizer:
        tokenizer_files.write(Path(tokenizer))
        with attacked(store.url, Path(tokenizer)) as stack:
            proof = Proof(stack)
            asyncio.run(proof.run(given.messages, given.streams, given.seed))
            proof.end()
    record = {
        "name": "attacks",
        "commit": commit(),
        "machine": machine(),
        "seed": given.seed,
        **proof.record,
        "faults": proof.faults,
        "held": not proof.faults,
    }
    path = result_path("attacks", given.results)
    write_record(path, record)
    print({name: value for name, value in record.items() if name not in {"machine", "ends", "items"}})
    print(f"record: {path}")
    return 1 if proof.faults else 0


class Proof:
    """The parts of the proof; `faults` lists what was found, `record` what was done and measured."""

    def __init__(self, stack: Attacked) -> None:
        self.faults: list[str] = []
        self.record: dict[str, Any] = {}
        self._stack = stack
        self._initial: ProcessState

    async def run(self, messages: int, streams: int, seed: int) -> None:
        """Run all parts but the end, while another client streams."""
        await warmed_up(self._stack)
        self._initial = await self._stack.state()
        self._stack.forget_peak()
        async with undisturbed(self._stack) as bystander:
            await self._fuzz(messages, seed)
            await self._repeat("nonsense", self._nonsense)
            await self._repeat("floods", self._floods)
            await self._repeat("idle streams", lambda: self._idle_streams(streams))
            await self._repeat("idle connections", lambda: self._idle_connections(streams))
        self.record["bystander"] = {
            "answers": bystander.answers,
            "longest_pause_s": round(bystander.longest_pause_s, 3),
        }
        left = await self._stack.settled(self._initial)
        self.record["left"] = {"tasks": left.task_count - self._initial.task_count, "items": left.items}
        self.record["log_bytes"] = left.logged
        self.faults += left.errors
        peak = (self._stack.peak_rss() - self._initial.rss) // MIB
        self.record["peak_mib"] = peak
        self._expect(peak < _MOST_EVER, f"peak memory grew by {peak} MiB, of at most {_MOST_EVER}")

    def end(self) -> None:
        """Stop the process. No task may be left, and its trace file must be readable."""
        self.record["spans"] = sum(len(list(spans_in(line.document()))) for line in Lines(self._stack.traces))
        outcome = self._stack.stop()
        self._expect(outcome == {"tasks": 0, "errors": []}, f"it ended with {outcome}")

    async def _fuzz(self, messages: int, seed: int) -> None:
        campaign = Campaign(self._stack.addresses, seed)
        began_s, memory = time.monotonic(), []
        for _ in range(_PARTS):
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
            self._expect(end in {"8", "13", "reset", "closed"}, f"a header bomb ({name}) ends {end}")
        await floods.endless_headers(gateway, 16_384)
        bomb = floods.gzip_bomb(60 * MIB)
        for status, message in await floods.gzip_bombs(gateway, _MODEL_INFO, bomb, 50):
            self._expect(status == "3", f"a gzip bomb ends {status} ({message})")

    async def _idle_streams(self, count: int) -> None:
        async with AsyncExitStack() as opened:
            before = await self._stack.state()
            wires = await floods.idle_streams(self._stack, opened, before.calls, count - 200)
            there = (await self._stack.after_calls(before.calls + count)).calls
            self._expect(there >= count, f"only {there} streams were open")
            self._expect(not any(one.received.ended for one in wires), "a connection of idle streams was cut")

    async def _idle_connections(self, count: int) -> None:
        """Open idle connections; the server closes those beyond its limit at once."""
        async with AsyncExitStack() as opened:
            self.record["connections_opened"] = await floods.idle_connections(self._stack, opened, count)
            self.record["connections_held"] = (await self._stack.state()).connections

    async def _repeat(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run `part` _ROUNDS times; memory must not grow by _MOST_MORE after the first round."""
        memory = []
        began_s = time.monotonic()
        for _ in range(_ROUNDS):
            await part()
            memory.append(await self._mib())
        self.record[name] = {"rounds": _ROUNDS, "mib_after_each": memory}
        self._expect(memory[-1] - memory[0] < _MOST_MORE, f"{name}: memory grows: {memory} MiB")
        print(f"{name}: {time.monotonic() - began_s:.0f} s, {memory} MiB more than at first", flush=True)

    async def _mib(self) -> int:
        """Return the growth of memory since the start, once all tasks but the bystander's have ended."""
        now = await self._stack.settled_but_one(self._initial)
        return (now.rss - self._initial.rss) // MIB

    def _expect(self, holds: bool, fault: str) -> None:  # reads as a sentence
        if not holds:
            self.faults.append(fault)


if __name__ == "__main__":
    sys.exit(main())
