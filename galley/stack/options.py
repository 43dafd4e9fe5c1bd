"""The options of a stack, its directories, and the environment of its parts."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from galley.stack.part import PartSpec

_LOCK = "stack.lock"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The options of a stack. None means the default of the service, unless a comment says otherwise."""

    model: str = ""
    # None: the draft that Galley brings for this target, if there is one. "none": no draft model.
    draft_model: str | None = None
    # Of requests that name none; empty: hybrid with a draft model, else ngram.
    strategy: str = ""
    k: int | None = None
    dtype: str | None = None
    # None: an embedded Valkey.
    redis_url: str | None = None
    # Of the stack in `redis_url`.
    pool: str | None = None
    gateways: int = 1
    replicas: int = 1
    # Ranks a target replica; several of Galley's engine run on a Ray of the stack's own.
    tensor_parallel: int = 1
    engine: str = "paged"
    # With the engine vllm: a JSON object of arguments of vLLM's engine, and the interpreter that has vLLM.
    vllm_args: str = ""
    target_python: str = sys.executable
    drafts: int = 1
    # Largest draft that the drafts accept in place of their own while they run; 0: none.
    max_load_mib: int = 0
    # Serve the metrics of each service, at a port that the system chooses.
    metrics: bool = False
    # The port of the first gateway; 0: any free one.
    port: int = 0
    # The port of the first gateway's HTTP API; 0: any free one, -1: none at any gateway.
    http_port: int = -1
    # A part that receives the traces of the others; None: the OTEL_* environment decides.
    viewer: PartSpec | None = None
    # Further environment and, by part name ("target", "draft", "gateway", "valkey"), further arguments.
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    # Of each target and draft replica; None for drafts: as many as a target has.
    threads: int = 1
    draft_threads: int | None = None
    # None: in the temporary directory, removed with the stack unless a part failed.
    log_dir: Path | None = None
    log_format: str | None = None
    data_dir: Path | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    # Before the second start in a row of a part that ended; doubled before each further one.
    restart_pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class StackDirs:
    """The directories that the stack writes; `run` is the user's own, its path short enough for sockets."""

    run: Path
    data: Path
    logs: Path


def check_private(directory: Path) -> None:
    """Raise ValueError if the directory exists and others could read what is in it, or replace it."""
    if not directory.exists():
        return
    found = directory.stat()
    if found.st_uid != os.getuid():
        raise ValueError(f"{directory}: must be your own directory, as it holds prompts and answers")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{directory}: must be closed to other users, as it holds prompts and answers, got mode "
            f"{mode:04o}; run chmod go-rwx"
        )


def lock(directory: Path) -> int:
    """Return a descriptor that keeps other stacks out of the directory while it is open.

    Raise ValueError if another stack has it.
    """
    held = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ValueError(f"{directory}: must not be in use by another stack; stop that one first") from None
    except OSError:
        os.close(held)
        raise
    return held


PartTable: TypeAlias = "Callable[[StackOptions, StackDirs], Sequence[PartSpec]]"


def has_registered_targets(options: StackOptions) -> bool:
    """Return True if the gateways find the targets in the store; otherwise they are given the address."""
    return options.replicas > 1 or runs_on_ray(options)


def runs_on_ray(options: StackOptions) -> bool:
    """Return True if Ray runs the targets, all as one part; vLLM starts its ranks itself."""
    return options.tensor_parallel > 1 and options.engine == "paged"


def has_registered_drafts(options: StackOptions) -> bool:
    """Return True if the gateways find the drafts in the store, as `galley drafts load` does."""
    return options.drafts > 1 or options.max_load_mib > 0


def environment_of(options: StackOptions) -> dict[str, str]:
    # Unbuffered, so that the log of a part that is killed is complete.
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(options.threads)}
    # All gateways of a stack derive the same session id from an idempotency key.
    if "GALLEY_GATEWAY_ID_SECRET_FILE" not in env:
        env.setdefault("GALLEY_GATEWAY_ID_SECRET", secrets.token_hex(32))
    for role in ("GATEWAY", "TARGET", "DRAFT"):  # the stack itself decides which store is used
        env.pop(f"GALLEY_{role}_REDIS_URL_FILE", None)
        if options.pool is not None:
            env[f"GALLEY_{role}_POOL"] = options.pool
        elif not options.redis_url:  # whose only pool is the default one, for `galley top` too
            env.pop(f"GALLEY_{role}_POOL", None)
    if options.redis_url:
        env["GALLEY_GATEWAY_REDIS_URL"] = options.redis_url
        if has_registered_targets(options):
            env["GALLEY_TARGET_REDIS_URL"] = options.redis_url
        if has_registered_drafts(options):
            env["GALLEY_DRAFT_REDIS_URL"] = options.redis_url
    return {**env, **options.env}
