"""`galley up --tensor-parallel`: one part that runs all replicas, found at the store."""

from __future__ import annotations

import pytest

from galley.stack.parts import stack_parts
from galley.stack.stack import Stack, StackOptions

FACTS = {
    "model": {"line": "/models/tiny"},
    "draft": {"address": "127.0.0.1:2"},
    "valkey": {"address": "/run/valkey.sock"},
}


@pytest.mark.parametrize("replicas", [1, 2])
def test_sharded_replicas_are_one_part_that_registers(replicas: int) -> None:
    options = StackOptions(model="tiny", replicas=replicas, tensor_parallel=3)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    assert [name for name in parts if name.startswith("target")] == ["target"]
    command = " ".join(parts["target"].command(FACTS))
    assert "services.target.ray --port 0 --drain-timeout-s 5" in command
    assert f"--replicas {replicas} --tensor-parallel 3 --redis-url unix:///run/valkey.sock" in command
    assert set(parts["target"].after) == {"model", "valkey"}
    assert "--target" not in parts["gateway"].command(FACTS)


def test_the_address_of_a_store_of_ones_own_is_on_no_command_line() -> None:
    options = StackOptions(redis_url="redis://:secret@store:6379/0", tensor_parallel=2)
    stack = Stack(options)
    parts = {part.name: part for part in stack_parts(options, stack.dirs)}
    stack.forget()
    for name in ("target", "gateway"):
        assert "secret" not in " ".join(parts[name].command(FACTS))


def test_a_replica_has_a_rank() -> None:
    with pytest.raises(ValueError, match="tensor_parallel: must be at least 1"):
        Stack(StackOptions(tensor_parallel=0))
