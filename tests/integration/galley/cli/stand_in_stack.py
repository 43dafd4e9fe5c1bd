"""Stacks of stand-ins and a real Valkey, for tests of the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from galley.stack.part import Facts, OnStatus, PartSpec
from galley.stack.parts import stack_parts
from galley.stack.stack import Stack, StackDirs, StackOptions, ignore_status

STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in(name: str, *flags: str, after: tuple[str, ...] = (), pool: str = "") -> PartSpec:
    def command(facts: Facts) -> list[str]:
        received = [f"--say={part} at {facts[part]['address']}" for part in after]
        return [sys.executable, str(STAND_IN), *flags, *received]

    return PartSpec(name, command, after=after, pool=pool)


def once(name: str, code: str) -> PartSpec:
    return PartSpec(name, lambda _: [sys.executable, "-c", code], exits=True)


def valkey(options: StackOptions, dirs: StackDirs) -> PartSpec:
    return next(part for part in stack_parts(options, dirs) if part.name == "valkey")


def stack_of(
    *specs: PartSpec,
    on_status: OnStatus = ignore_status,
    options: StackOptions | None = None,
    with_valkey: bool = False,
) -> Stack:
    def parts(options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        return [valkey(options, dirs), *specs] if with_valkey else specs

    return Stack(options or StackOptions(stop_grace_s=10), on_status, parts)
