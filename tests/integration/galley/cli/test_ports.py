"""The ports of a stack: the named ones, or the next free ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from galley.stack.ports import LOOPBACK, free_ports, next_free_port, port_problem


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


def test_the_next_free_port_follows_a_taken_one(taken: int) -> None:
    port = next_free_port(taken)
    assert port > taken
    assert port_problem(port) == ""
    assert next_free_port(taken, reserved={port}) > port


def test_a_free_port_is_used_itself() -> None:
    port = free_ports(1)[0]
    assert next_free_port(port) == port


def test_no_port_is_left_above_the_last() -> None:
    with pytest.raises(OSError, match="no port from 65535 on is free"):
        next_free_port(65535, reserved={65535})


def test_a_taken_port_has_a_reason(taken: int) -> None:
    assert port_problem(taken) == "Address already in use"
