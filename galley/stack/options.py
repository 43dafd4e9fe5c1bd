"""What a stack is asked to be: its options, where it writes, and the environment of its parts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from galley.stack.part import PartSpec

SMALL_HOST_CORES = 4


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start. None leaves a choice to the part that it concerns."""

    model: str = ""
    # None: the one trained for this target, if it comes with the installation. "none": none.
    draft_model: str | None = None
    # The draft serves all that it can; the first of these is its default, else hybrid where it has a model.
    strategies: tuple[str, ...] = ()
    k: int | None = None
    dtype: str | None = None
    # None: an embedded Valkey.
    redis_url: str | None = None
    gateways: int = 1
    # Of the target.
    replicas: int = 1
    # Processes that share each replica's model; if several, a Ray of the stack's own places and heals them.
    tensor_parallel: int = 1
    drafts: int = 1
    # Whether each service tells metrics, at a port that the system chooses.
    metrics: bool = False
    # Of the first gateway; 0 lets the system choose.
    port: int = 0
    # A part that takes the traces of the others; None: they go where the environment says, if anywhere.
    viewer: PartSpec | None = None
    # Further environment and, by part name ("target", "draft", "gateway", "valkey"), further arguments.
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    # None: 1 on a host of at most SMALL_HOST_CORES cores, where a second one waits for busy neighbours.
    threads: int | None = None
    # None: in a temporary directory, which goes with the stack.
    log_dir: Path | None = None
    data_dir: Path | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class StackDirs:
    """Where the stack keeps what it writes; `run` is private to the user and short enough for a socket."""

    run: Path
    data: Path
    logs: Path


# Which parts to run.
PartTable: TypeAlias = "Callable[[StackOptions, StackDirs], Sequence[PartSpec]]"


def host_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(options: StackOptions) -> int | None:
    """Threads a service; None leaves the choice to torch."""
    if options.threads is not None:
        return options.threads
    return 1 if host_cores() <= SMALL_HOST_CORES else None


def registers(options: StackOptions) -> bool:
    """Do gateways find the targets at the store? One process alone is told to them."""
    return options.replicas > 1 or options.tensor_parallel > 1


def drafts_register(options: StackOptions) -> bool:
    """The same of the drafts."""
    return options.drafts > 1


def environment_of(options: StackOptions) -> dict[str, str]:
    """What every part of the stack finds in its environment."""
    # Unbuffered: the last words of a part that is killed are in its log.
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    threads = threads_of(options)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    # All gateways of a stack make the same session id of an idempotency key.
    if "GALLEY_GATEWAY_ID_SECRET_FILE" not in env:
        env.setdefault("GALLEY_GATEWAY_ID_SECRET", secrets.token_hex(32))
    for role in ("GATEWAY", "TARGET", "DRAFT"):  # which store it is, is for the stack to say
        env.pop(f"GALLEY_{role}_REDIS_URL_FILE", None)
    if options.redis_url:
        env["GALLEY_GATEWAY_REDIS_URL"] = options.redis_url
        if registers(options):
            env["GALLEY_TARGET_REDIS_URL"] = options.redis_url
        if drafts_register(options):
            env["GALLEY_DRAFT_REDIS_URL"] = options.redis_url
    return {**env, **options.env}
