"""`galley up`: the stack, kept running until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from galley.cli.errors import fail, fail_part
from galley.cli.flags import not_shown
from galley.stack.endpoint import announce, withdraw
from galley.stack.part import PartFailed
from galley.stack.parts import stack_parts
from galley.stack.progress import StackProgress
from galley.stack.stack import PartTable, Stack, StackOptions
from galley.stack.viewer import Viewer, find_viewer

T = TypeVar("T")
_STOP_GRACE_S = 10.0
# Serve takes its replicas down one after another, and Ray itself after them.
_RAY_STOP_GRACE_S = 30.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Model = Annotated[str, typer.Option(help="Target model: hub id, directory or GGUF. Default: the small one.")]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="The draft's model, or none; its tokenizer must be the target's. "
        "Default: the one that was trained for the default target."
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        help="How to draft where a request says nothing: ngram, model, hybrid, none. "
        "Default: hybrid with a model, else ngram."
    ),
]
DType = Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: what suits this machine.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads a service. Default: 1 on small machines.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="GALLEY_UP_REDIS_URL",
        callback=not_shown,
        help="Your own Redis 7 or Valkey, in place of the embedded one.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Show traces: in Arize Phoenix if it is installed, else by `galley trace`, from a file.",
    ),
]
LogDir = Annotated[Path | None, typer.Option(help="Keep the parts' logs here.", file_okay=False)]


def up(  # noqa: PLR0913  # one parameter a flag
    *,
    model: Model = "",
    draft_model: DraftModel = None,
    strategy: Strategy = "",
    k: Annotated[
        int | None, typer.Option(min=0, help="Draft tokens a round, where a request says none.")
    ] = None,
    dtype: DType = None,
    threads: Threads = None,
    redis_url: RedisUrl = None,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways over one store.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Targets that serve the model.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks that share each target's model; more than one run on Ray.")
    ] = 1,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts that all gateways share.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first gateway; 0 lets the system choose.")
    ] = 0,
    trace: Trace = False,
    log_dir: LogDir = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep the embedded store's data here.", file_okay=False)
    ] = None,
) -> None:
    """Start the stack, print its endpoint, keep it running until Ctrl-C."""
    viewer = _viewer() if trace else None
    options = StackOptions(
        model=model,
        draft_model=draft_model,
        strategies=(strategy,) if strategy else (),
        k=k,
        dtype=dtype,
        threads=threads,
        redis_url=redis_url,
        gateways=gateways,
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        drafts=drafts,
        metrics=True,
        stop_grace_s=_RAY_STOP_GRACE_S if tensor_parallel > 1 else _STOP_GRACE_S,
        port=port,
        viewer=viewer.part if viewer else None,
        log_dir=log_dir,
        data_dir=data_dir,
    )
    run_stack(_keep_up(options, viewer, Console(highlight=False)))


def _viewer() -> Viewer:
    try:
        return find_viewer()
    except OSError as error:
        raise fail(error) from None


async def _keep_up(options: StackOptions, viewer: Viewer | None, console: Console) -> None:
    async with shown_stack(options, console) as stack:
        told = announce(",".join(stack.gateways), stack.services, stack.store_url)
        try:
            for address in stack.gateways:
                console.print(Text.assemble("gateway at ", (address, "bold")))
            for service in stack.services:
                console.print(Text(f"metrics of {service.name} at http://{service.metrics}/metrics", "dim"))
            if viewer is not None:
                console.print(Text(viewer.told), soft_wrap=True)
            console.print(Text("galley generate, chat, resume and top find it; Ctrl-C stops it"))
            await stack.run(_stay(stack, viewer, console))
        finally:
            withdraw(told)


async def _stay(stack: Stack, viewer: Viewer | None, console: Console) -> None:
    """For ever; says so if traces are no longer taken."""
    if viewer is not None:
        await stack.ended(viewer.part.name)
        log = stack.log(viewer.part.name)
        console.print(
            Text(f"{viewer.part.name} has ended, and traces are lost; its log is {log}"), soft_wrap=True
        )
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def shown_stack(
    options: StackOptions, console: Console, parts: PartTable = stack_parts
) -> AsyncIterator[Stack]:
    """A running stack, whose start was shown."""
    progress = StackProgress(console)
    stack = Stack(options, progress.show, parts)
    progress.expect(stack.parts)
    with progress:
        await stack.start()
    async with stack:
        yield stack


def run_stack(work: Coroutine[object, object, T]) -> T | None:
    """Run `work` to its end, or until a signal asks to stop: None. Exits 1 if a part of the stack fails."""
    try:
        return asyncio.run(_until_signal(work))
    except PartFailed as failed:
        raise fail_part(failed) from None
    except (OSError, ValueError) as error:
        raise fail(error) from None


async def _until_signal(work: Coroutine[object, object, T]) -> T | None:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for sig in _STOP_SIGNALS:
        loop.add_signal_handler(sig, task.cancel)
    try:
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()
    finally:
        for sig in _STOP_SIGNALS:
            loop.remove_signal_handler(sig)
