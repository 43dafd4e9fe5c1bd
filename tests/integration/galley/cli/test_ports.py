"""The ports of a stack: the named ones, or the next free ones, each for one stack of the machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from galley.stack.ports import LOOPBACK, ReservedPorts, free_ports

# Takes a port once it may, and keeps it until its input ends.
STACK = """
import sys
from galley.stack.ports import ReservedPorts
with ReservedPorts() as ports:
    print("waits", flush=True)
    first = int(input())
    print(ports.take_next(first), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    with ReservedPorts() as ports:
        yield ports


def test_the_next_free_port_follows_a_taken_one(ports: ReservedPorts, taken: int) -> None:
    port = ports.take_next(taken)
    assert port > taken
    with socket.create_server((LOOPBACK, port)):
        assert ports.take_next(taken) > port


def test_a_free_port_is_used_itself(ports: ReservedPorts) -> None:
    port = free_ports(1)[0]
    assert ports.take_next(port) == port


def test_no_port_is_left_above_the_last(ports: ReservedPorts) -> None:
    ports.take_next(65535)
    with pytest.raises(OSError, match="no port from 65535 on is free"):
        ports.take_next(65535)


def test_a_taken_port_has_a_reason(ports: ReservedPorts, taken: int) -> None:
    for _ in range(2):  # a port that could not be taken is not reserved
        with pytest.raises(OSError, match="Address already in use"):
            ports.take(taken)


def test_stacks_that_start_at_once_choose_different_ports() -> None:
    [first] = free_ports(1)
    with ExitStack() as running:
        stacks = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", STACK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(4)
        ]
        assert [stack.stdout.readline() for stack in stacks if stack.stdout] == ["waits\n"] * 4
        for stack in stacks:
            assert stack.stdin is not None
            stack.stdin.write(f"{first}\n")
            stack.stdin.flush()
        chosen = [int(stack.stdout.readline()) for stack in stacks if stack.stdout]
    assert len(set(chosen)) == 4
    with ReservedPorts() as ports:
        ports.take(first)  # it is free again
