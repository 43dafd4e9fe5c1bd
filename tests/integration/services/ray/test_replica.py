"""A replica of two ranks without Ray: it serves and ends as one process.

The ranks are processes of one host, or of two, as a LeaderWorkerSet has them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.ports import free_ports
from services.target.ranks.ranks import run_host
from services.target.settings import TargetSettings
from tests.fakes.collector import Collector
from tests.fakes.spans import parent_of
from tests.fakes.tiny_model import greedy
from tests.fakes.verify_items import generate, slice_of, verify

SIZE = 2
PROMPT, COUNT = [3, 5, 8, 13, 21], 12
# A closed connection is noticed at once; this is for a slow machine.
SOON_S = 30.0
# The exit code of a process that is to be restarted.
LOST = 1


@dataclass(frozen=True)
class Replica:
    process: asyncio.subprocess.Process
    followers: list[int]
    target: rpc.TargetAsyncStub

    async def ended(self, soon_s: float = SOON_S) -> int:
        return await ended(self.process, soon_s)


async def ended(process: asyncio.subprocess.Process, soon_s: float = SOON_S) -> int:
    async with asyncio.timeout(soon_s):
        return await process.wait()


async def start(
    model: Path, *flags: str, environment: Mapping[str, str] | None = None, ready_fd: int | None = None
) -> asyncio.subprocess.Process:
    ready = () if ready_fd is None else ("--ready-fd", str(ready_fd))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.target", "--die-with-parent", "--model", str(model)),
        *("--tensor-parallel", str(SIZE), "--dtype", "float32", "--kv-memory-mb", "8", *ready, *flags),
        pass_fds=() if ready_fd is None else (ready_fd,),
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


@asynccontextmanager
async def running(
    model: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Replica]:
    read_fd, write_fd = os.pipe()
    process = await start(model, *flags, environment=environment, ready_fd=write_fd)
    os.close(write_fd)
    followers: list[int] = []
    try:
        address = await asyncio.to_thread(ready_address, read_fd)
        followers = [child.pid for child in psutil.Process(process.pid).children()]
        async with grpc.aio.insecure_channel(address) as channel:
            yield Replica(process, followers, rpc.TargetStub(channel))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    gone = [psutil.Process(pid) for pid in followers if psutil.pid_exists(pid)]
    _, alive = await asyncio.to_thread(psutil.wait_procs, gone, SOON_S)
    assert not alive, "a follower outlived its replica"


def ready_address(read_fd: int) -> str:
    with os.fdopen(read_fd) as lines:
        for line in lines:
            if (message := json.loads(line))["stage"] == "ready":
                return str(message["address"])
    raise RuntimeError("the replica did not start")


async def serves(target: rpc.TargetAsyncStub, expected: list[int]) -> None:
    """Verify right draft tokens, three at a time."""

    def draft(tokens: list[int]) -> list[int]:
        done = len(tokens) - len(PROMPT)
        return expected[done : done + 3]

    tokens, accepted = await generate(target, PROMPT, COUNT, draft)
    assert tokens == expected
    assert max(accepted) > 0


async def test_two_ranks_serve_as_one_process_and_end_together(tiny: Path) -> None:
    expected = greedy(tiny, PROMPT, COUNT)
    async with running(tiny) as replica:
        info = await replica.target.GetTargetInfo(pb.GetTargetInfoRequest())
        assert info.ranks == SIZE
        assert info.deterministic

        await serves(replica.target, expected)
        os.kill(replica.followers[0], signal.SIGKILL)
        # The replica ends once it notices; an earlier request gets a status.
        with suppress(grpc.aio.AioRpcError):
            (answer,) = await verify(replica.target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="new")))
            assert answer.WhichOneof("outcome") == "status", "a step without a rank was answered"
        assert await replica.ended() == LOST


async def test_two_hosts_serve_send_spans_and_end_with_their_leader(tiny: Path, tmp_path: Path) -> None:
    hosts = ("--hosts", "2", "--ranks-address", f"127.0.0.1:{free_ports(1)[0]}")
    async with Collector(tmp_path) as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            # Spans are sent at the end only.
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
        }
        # It starts before its leader.
        other = await start(tiny, *hosts, "--host-index", "1", environment=environment)
        try:
            async with running(tiny, *hosts, environment=environment) as leader:
                assert not leader.followers, "one rank a host"
                tokens, _ = await generate(leader.target, PROMPT, COUNT, lambda _: [])
                assert tokens == greedy(tiny, PROMPT, COUNT)

                # Stopped together, as the pods of a group are: the leader still serves.
                other.send_signal(signal.SIGTERM)
                traced = slice_of(PROMPT, session_id="new", traceparent=parent_of(0xABC))
                (answer,) = await verify(leader.target, pb.VerifyItem(slice=traced))
                assert answer.WhichOneof("outcome") == "result"
                leader.process.terminate()
                assert await leader.ended() == 0
            assert await ended(other) == 0
        finally:
            if other.returncode is None:
                other.kill()
                await other.wait()
        check_spans({span.name: span for span in collector.spans}, answer)


def check_spans(span_of: Mapping[str, Span], answer: pb.VerifyAnswer) -> None:
    item, batch, rank = (
        span_of[name] for name in ("galley.v1.Target/Verify", "verify batch", "rank forward")
    )
    assert answer.result.batch_span == batch.trace_id + batch.span_id
    assert [(link.trace_id, link.span_id) for link in batch.links] == [(item.trace_id, item.span_id)]
    assert (rank.trace_id, rank.parent_span_id) == (batch.trace_id, batch.span_id)
    attributes = {entry.key: entry.value for span in (batch, rank) for entry in span.attributes}
    computed_ns = [value.int_value for value in attributes["galley.batch.rank_forward_ns"].array_value.values]
    assert len(computed_ns) == SIZE
    assert 0 < computed_ns[0] < attributes["galley.batch.forward_ns"].int_value
    # Rank 0 reports for the follower what the follower's own span says.
    waited_ns = attributes["galley.rank.waited_ns"].int_value
    assert waited_ns > 0
    assert computed_ns[1] == rank.end_time_unix_nano - rank.start_time_unix_nano - waited_ns


async def test_a_restarted_host_is_refused_and_ends_the_idle_leader(tiny: Path) -> None:
    hosts = ("--hosts", "2", "--ranks-address", f"127.0.0.1:{free_ports(1)[0]}")
    other = again = await start(tiny, *hosts, "--host-index", "1")
    try:
        async with running(tiny, *hosts) as leader:
            other.kill()
            await other.wait()
            again = await start(tiny, *hosts, "--host-index", "1")
            # No step is run: the leader sees the second start.
            assert await leader.ended() == LOST
            assert await ended(again) == LOST
    finally:
        for host in (other, again):
            if host.returncode is None:
                host.kill()
                await host.wait()


def test_a_host_ends_if_its_leader_does_not_come(tiny: Path) -> None:
    settings = TargetSettings(
        model=str(tiny),
        tensor_parallel=SIZE,
        hosts=2,
        host_index=1,
        ranks_address=f"127.0.0.1:{free_ports(1)[0]}",
        ranks_timeout_s=0.1,
    )
    with pytest.raises(SystemExit) as end:
        run_host(settings)
    assert end.value.code == LOST
