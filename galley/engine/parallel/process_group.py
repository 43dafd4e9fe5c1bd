"""The ranks of one model over torch.distributed: gloo between CPUs, NCCL between CUDA devices.

Sums are gathered and added in rank order. A ring all-reduce splits the tensor into pieces that it adds in
different orders, so from three ranks on a row's bits would depend on the number of rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galley.common.sockets import bind_socket, host_and_port, socket_address
from galley.core.errors import Unavailable
from galley.engine.parallel.ranks import Ranks, Waits

# torch.distributed exports TCPStore, its types do not.
_STORES: Any = dist
# A hanging rank counts as lost after this; the exit of its process is noticed at once.
DEFAULT_TIMEOUT_S = 30.0
# A replica may idle for long: the other ranks wait for the next plan while rank 0 lives.
_IDLE = timedelta(days=3650)
_RANK_ZERO = 0


class RankLost(Unavailable):
    """Another rank has exited or hangs; the state that the ranks share is useless."""


class ProcessGroup(Ranks):
    """The ranks of a model when each rank is its own process. An object is not thread-safe."""

    def __init__(self, rank: int, size: int, device: str, plans: Any) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device(device)
        self._plans = plans
        self._waits: Waits | None = None

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of all parts, of any shape, in the parts' dtype. Raises RankLost.

        Adds in float32 in rank order and rounds once; parts travel in their own dtype.
        """
        parts = self._gather(part)  # [size, *part.shape]
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        return total.to(part.dtype)

    def join_columns(self, part: Tensor) -> Tensor:
        return torch.cat(tuple(self._gather(part)), dim=-1)

    def wait_at_most(self, timeout_s: float) -> None:
        """Set how long an exchange waits for a rank before it counts as lost, in seconds."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  # experimental there

    def send(self, values: Tensor) -> None:
        """Send int32 `values` from rank 0 to all others, which call `receive`. Raises RankLost."""
        with self._rank_lost():
            dist.broadcast(values, _RANK_ZERO, group=self._plans)

    def receive(self, values: Tensor) -> None:
        """Fill `values` with what rank 0 sends, of the same length; wait while it lives. Raises RankLost."""
        self.send(values)  # a broadcast is one call for all ranks

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        """Begin to exchange a number with all ranks; the returned function waits for theirs.

        All ranks must call this. It and the returned function raise RankLost.
        """
        numbers = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        own = torch.tensor([number], dtype=torch.int64)
        with self._rank_lost():
            work: Any = dist.all_gather(numbers, own, async_op=True)

        def gathered() -> Sequence[int]:
            with self._rank_lost():
                work.wait()
            return [int(one) for one in numbers]

        return gathered

    @contextmanager
    def waits(self) -> Iterator[Waits]:
        """Measure how long this rank waits for the others' parts, transfer included; not valid on CUDA."""
        self._waits = waits = Waits()
        try:
            yield waits
        finally:
            self._waits = None

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one notice."""
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
        # As bytes: gloo supports few dtypes, and a gather does no arithmetic.
        parts = torch.empty(self.size, *sent.shape, dtype=sent.dtype, device=sent.device)
        if sent.numel() == 0:
            return parts
        with self._rank_lost():
            dist.all_gather([_bytes(place) for place in parts], _bytes(sent))
        return parts

    @contextmanager
    def _rank_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} lost another rank: {error}") from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Store:
    """Rank 0's store, which listens on `address` only."""

    address: str
    store: Any


def open_store(host: str, size: int, timeout_s: float = DEFAULT_TIMEOUT_S, port: int = 0) -> Store:
    """Open rank 0's store on interface `host`, at `port`, or at a free one if 0. Raises OSError."""
    listener = bind_socket(host, port)
    listener.listen()
    address = socket_address(listener)
    # Left to itself it would listen on every interface. The store owns the descriptor from here on.
    own = {"wait_for_workers": False, "master_listen_fd": listener.detach(), "use_libuv": True}
    return Store(address, _tcp_store(address, size, timedelta(seconds=timeout_s), is_master=True, **own))


def connect_store(address: str, size: int, timeout_s: float) -> Any:
    """Connect a process that is not a rank to rank 0's store. Raises RuntimeError if it is not there."""
    timeout = timedelta(seconds=timeout_s)
    store = _tcp_store(address, size, timeout, is_master=False, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S))
    return store


def join(
    rank: int,
    size: int,
    *,
    device: str,
    meeting: str | Store,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ProcessGroup:
    """Meet the other ranks, and block until all have joined.

    `meeting` is rank 0's open store, or at other ranks its address.

    Raises RankLost if not all join within `timeout_s`, which also bounds each later exchange, until
    `ProcessGroup.wait_at_most` changes it.
    """
    timeout = timedelta(seconds=timeout_s)
    kind = torch.device(device).type
    if kind == "cpu":
        _stay_local(meeting if isinstance(meeting, str) else meeting.address)
    try:
        store = meeting.store if isinstance(meeting, Store) else _tcp_store(meeting, size, timeout)
        dist.init_process_group(
            "cpu:gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        plans = dist.new_group(backend="gloo", timeout=_IDLE)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} did not meet the others: {error}") from error
    return ProcessGroup(rank, size, device, plans)


def _tcp_store(address: str, size: int, timeout: timedelta, **options: Any) -> Any:
    host, port = host_and_port(address)
    return _STORES.TCPStore(host, port, size, timeout=timeout, **options)


def _stay_local(address: str) -> None:
    """Let ranks of one machine listen on the loopback only."""
    if not address or address.rpartition(":")[0] in {"127.0.0.1", "localhost", "[::1]"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
