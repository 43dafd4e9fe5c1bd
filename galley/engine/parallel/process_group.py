"""The ranks of one model over torch.distributed: gloo between CPUs, NCCL between CUDA devices.

Sums are gathered and added in rank order: a ring's all-reduce cuts the tensor into pieces that it adds in
different orders, so that from three ranks on a row's bits depend on how many rows there are.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galley.core.errors import Unavailable
from galley.engine.parallel.ranks import Waits

# torch.distributed has them without saying so in its types.
_STORES: Any = dist
# A rank that is stuck is given up after this; the end of its process is noticed at once.
DEFAULT_TIMEOUT_S = 30.0
# A replica may idle for long: a follower waits for the next plan as long as the leader lives.
_IDLE = timedelta(days=3650)
_LEADER = 0


class RankLost(Unavailable):
    """Another rank has ended or is stuck; what this process shares with it is worthless."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks find one another: `address` (host:port) of rank 0's store, or `file` on one machine."""

    address: str = ""
    file: str = ""


class ProcessGroup:
    """A `Ranks` of real processes. One per process; not safe for two threads at once."""

    def __init__(self, rank: int, size: int, device: str, plans: Any) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device(device)
        self._plans = plans
        self._waits: Waits | None = None

    def add(self, part: Tensor) -> Tensor:
        """The sum of all parts, of any shape, in the parts' dtype. Raises RankLost.

        Added in float32 in rank order and rounded once; parts travel in their own dtype.
        """
        parts = self._gather(part)  # [size, *part.shape]
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        return total.to(part.dtype)

    def join_columns(self, part: Tensor) -> Tensor:
        """[rows, n / size] of each rank to [rows, n], in rank order. Raises RankLost."""
        return torch.cat(tuple(self._gather(part)), dim=-1)

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on give a rank up that does not take part in an exchange within this time."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  # experimental there

    def send(self, values: Tensor) -> None:
        """Rank 0: give int32 `values` to all others, which `receive`. Raises RankLost."""
        self._broadcast(values)

    def receive(self, values: Tensor) -> None:
        """Wait, for as long as rank 0 lives, for what it sends, of the same length. Raises RankLost."""
        self._broadcast(values)

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        """Begin to tell all ranks a number of this one; all make the call. What it gives waits for theirs.

        Both raise RankLost.
        """
        numbers = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        own = torch.tensor([number], dtype=torch.int64)
        try:
            work: Any = dist.all_gather(numbers, own, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

        def gathered() -> Sequence[int]:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error
            return [int(one) for one in numbers]

        return gathered

    @contextmanager
    def waits(self) -> Iterator[Waits]:
        """Within, count what this rank waits for the others' parts, their way here included.

        On CUDA that stays out of sight: the host only orders the exchange.
        """
        self._waits = waits = Waits()
        try:
            yield waits
        finally:
            self._waits = None

    def close(self) -> None:
        """Leave the others; they notice if they still wait for this one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, part: Tensor) -> Tensor:
        if self._waits is None:
            return self._exchange(part)
        began_ns = time.perf_counter_ns()
        parts = self._exchange(part)
        self._waits.ns += time.perf_counter_ns() - began_ns
        return parts

    def _exchange(self, part: Tensor) -> Tensor:
        sent = part.contiguous()
        # As bytes: gloo knows few dtypes, and a gather adds nothing.
        parts = torch.empty(self.size, *sent.shape, dtype=sent.dtype, device=sent.device)
        if sent.numel() == 0:
            return parts
        try:
            dist.all_gather([_bytes(place) for place in parts], _bytes(sent))
        except RuntimeError as error:
            raise self._lost(error) from error
        return parts

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(f"rank {self.rank} lost another rank: {error}")

    def _broadcast(self, values: Tensor) -> None:
        try:
            dist.broadcast(values, _LEADER, group=self._plans)
        except RuntimeError as error:
            raise self._lost(error) from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Store:
    """Rank 0's store, which listens on `address` alone, and only there."""

    address: str
    _store: Any

    @property
    def store(self) -> Any:
        """For `join`."""
        return self._store


def open_store(host: str, size: int, timeout_s: float = DEFAULT_TIMEOUT_S, port: int = 0) -> Store:
    """The store of rank 0, on the interface `host`, at `port` or, with 0, at a free one. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # What a predecessor left in TIME_WAIT does not hold up its successor.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    port = listener.getsockname()[1]
    store = _STORES.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Left to itself it would listen on every interface. The store owns the descriptor from here on.
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return Store(f"{host}:{port}", store)


def connect_store(address: str, size: int, timeout_s: float) -> Any:
    """The store of rank 0 at `address`, for who is no rank. Raises RuntimeError if it is not there."""
    host, _, port = address.rpartition(":")
    store = _STORES.TCPStore(
        host,
        int(port),
        size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S))
    return store


def join(
    rank: int,
    size: int,
    *,
    device: str,
    meeting: Meeting | None = None,
    store: Store | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ProcessGroup:
    """Meet the other ranks, by `store` (rank 0's own) or `meeting`; blocks until all are there.

    Raises RankLost if not all come within `timeout_s`, or one does not take part in a pass within it (until
    `ProcessGroup.wait_at_most` says otherwise).
    """
    timeout = timedelta(seconds=timeout_s)
    kind = torch.device(device).type
    if kind == "cpu":
        _stay_local(meeting, store)
    try:
        dist.init_process_group(
            "cpu:gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            store=_store(rank, size, meeting, store, timeout),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        plans = dist.new_group(backend="gloo", timeout=_IDLE)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} did not meet the others: {error}") from error
    return ProcessGroup(rank, size, device, plans)


def _store(rank: int, size: int, meeting: Meeting | None, store: Store | None, timeout: timedelta) -> Any:
    if store is not None:
        return store.store
    if meeting is None:
        raise ValueError("a rank needs a store or a place to meet")
    if meeting.file:
        return _STORES.FileStore(str(Path(meeting.file)), size)
    host, _, port = meeting.address.rpartition(":")
    return _STORES.TCPStore(host, int(port), size, is_master=rank == _LEADER, timeout=timeout)


def _stay_local(meeting: Meeting | None, store: Store | None) -> None:
    """Ranks of one machine listen on the loopback alone."""
    address = store.address if store else meeting.address if meeting else ""
    if not address or address.rpartition(":")[0] in {"127.0.0.1", "localhost", "::1"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
