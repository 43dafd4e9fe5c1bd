"""`galley demo`: one answer with and without speculation, from a stack of real processes."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from galley.cli.flags import FAILED, INTERRUPTED, Output, fail, say
from galley.cli.up import (
    DraftModel,
    DType,
    LogDir,
    Model,
    Strategy,
    run_stack,
    shown_stack,
    stack_options,
)
from galley.client.options import GenerateOptions, Message, Speculation
from galley.stack.options import StackOptions

if TYPE_CHECKING:
    from galley.cli.answer import View
    from galley.client.client import AsyncClient, AsyncStream
    from galley.pb.galley.v1 import galley_pb2 as pb

# The answer repeats the prompt, which suits n-gram drafts best.
DEFAULT_PROMPT = """Write this passage again, word for word:

The old lighthouse stands on a cliff above the sea. Every evening the keeper climbs the stairs and lights \
the lamp. Ships far out on the water see the light and turn away from the rocks. In the morning the keeper \
puts out the lamp, writes the weather in his book and goes down to sleep. Nobody in the village has ever \
seen him, but all of them know that the lamp has never been dark."""
_SEED = 1
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer as the client saw it; times in seconds since the request."""

    stream: AsyncStream
    finished: pb.Finished
    first_token_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time of the whole answer, prefill included."""
        return len(self.stream.tokens) / self.total_s


def demo(
    *,
    prompt: Annotated[
        str, typer.Option(envvar="GALLEY_DEMO_PROMPT", help="The prompt. Default: to rewrite a passage.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens.")] = 96,
    model: Model = "",
    draft_model: DraftModel = None,
    strategy: Strategy = None,
    dtype: DType = None,
    log_dir: LogDir = None,
) -> None:
    """Start a stack, stream one answer, compare it with plain decoding, stop the stack."""
    options = stack_options(
        model=model, draft_model=draft_model, strategy=strategy, dtype=dtype, log_dir=log_dir
    )
    same = run_stack(_demo(options, Output(highlight=False), prompt.strip() or DEFAULT_PROMPT, max_tokens))
    if same is None:
        raise typer.Exit(INTERRUPTED)
    if not same:
        say("error: speculation changed the tokens; this is a bug", style="red")
        raise typer.Exit(FAILED)


async def _demo(options: StackOptions, console: Console, prompt: str, max_tokens: int) -> bool:
    from galley.client.client import AsyncClient  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import GalleyRpcError  # noqa: PLC0415

    async with shown_stack(options, console) as stack, AsyncClient(stack.gateways[0], api_key="") as client:
        try:
            return await stack.run(compare(client, console, prompt, max_tokens))
        except GalleyRpcError as error:
            raise fail(error) from None


async def compare(client: AsyncClient, console: Console, prompt: str, max_tokens: int) -> bool:
    """Show the answer and its figures. Return True if it has the same tokens without speculation."""
    from galley.cli.answer import TextView, legend  # noqa: PLC0415  # protobuf is slow to load

    drafted: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "seed": _SEED,
        "workload": "demo",
    }
    plain: GenerateOptions = {**drafted, "speculation": Speculation(off=True)}
    with _busy(console, "warming up"):
        for options in (drafted, plain):
            await _timed(client, prompt, {**options, "max_tokens": min(_WARM_UP_TOKENS, max_tokens)})
    console.print()
    console.print(Text.assemble(("Prompt  ", "bold"), prompt), soft_wrap=True)
    console.print()
    console.print(Text.assemble(("Answer  ", "bold"), legend(console)), soft_wrap=True)
    with_draft = await _timed(client, prompt, drafted, TextView(console, origins=True))
    with _busy(console, "the same again, without speculation"):
        without = await _timed(client, prompt, plain)
    console.print()
    console.print(_summary(with_draft, without))
    console.print(
        Text(f"session {with_draft.stream.session_id}, plain {without.stream.session_id}"), soft_wrap=True
    )
    return with_draft.stream.tokens == without.stream.tokens


async def _timed(
    client: AsyncClient, prompt: str, options: GenerateOptions, view: View | None = None
) -> Timed:
    started_at = time.perf_counter()
    first_token_s = 0.0
    stream = client.stream([Message("user", prompt)], **options)
    try:
        async for event in stream:
            if not first_token_s and event.HasField("chunk"):
                first_token_s = time.perf_counter() - started_at
            if view is not None:
                view.show(event)
    finally:
        if view is not None:
            view.close()
    total_s = time.perf_counter() - started_at
    if stream.finished is None:
        raise fail("the stream ended without the event Finished")
    return Timed(stream, stream.finished, first_token_s, total_s)


def _summary(with_draft: Timed, without: Timed) -> Table:
    from galley.client.result import speculation_usage  # noqa: PLC0415  # protobuf is slow to load

    on, off = with_draft.finished.speculation, without.finished.speculation
    table = Table("", title="Summary", title_justify="left")
    table.add_column("speculation", justify="right")
    table.add_column("plain", justify="right")
    for name, one, other in (
        ("prompt tokens", with_draft.finished.usage.prompt_tokens, without.finished.usage.prompt_tokens),
        ("output tokens", len(with_draft.stream.tokens), len(without.stream.tokens)),
        ("rounds", on.rounds, off.rounds),
        ("drafted", on.drafted, off.drafted),
        ("verified", on.verified, off.verified),
        ("accepted", on.accepted, off.accepted),
    ):
        table.add_row(name, str(one), str(other))
    mean = [speculation_usage(stats).mean_accepted_length for stats in (on, off)]
    table.add_row("mean accepted length", *(f"{one:.2f}" for one in mean))
    times = (with_draft.first_token_s, without.first_token_s)
    table.add_row("time to first token", *(f"{seconds * 1000:.0f} ms" for seconds in times))
    table.add_row("tokens/s", f"{with_draft.tokens_per_s:.1f}", f"{without.tokens_per_s:.1f}")
    table.add_row("speed-up", f"{with_draft.tokens_per_s / without.tokens_per_s:.2f}×", "")
    same = with_draft.stream.tokens == without.stream.tokens
    table.add_row("same tokens", "yes" if same else "NO", "")
    return table


def _busy(console: Console, what: str) -> AbstractContextManager[object]:
    if console.is_terminal:
        return console.status(what)
    console.print(Text(f"{what} ..."))
    return nullcontext()
