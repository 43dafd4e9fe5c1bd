"""`galley generate`, `galley resume` and `galley chat`: clients of a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from galley.cli.errors import INTERRUPTED, fail, say
from galley.cli.flags import (
    PATIENCE_S,
    AsJson,
    Endpoint,
    Origins,
    Patience,
    Timeout,
    with_answer_flags,
    with_tls_flags,
)
from galley.client.options import GenerateOptions, Message, Prompt, Retries, Tls
from galley.stack.endpoint import NoEndpoint, find_endpoint

if TYPE_CHECKING:
    from galley.cli.render import View
    from galley.client.client import AsyncClient, TokenStream

_CHAT_HELP = "/quit ends, /reset forgets the conversation, Ctrl-C stops an answer."


@with_tls_flags
@with_answer_flags
def generate(  # noqa: PLR0913  # one parameter a flag
    *,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    options: GenerateOptions,
    tls: Tls | None,
    endpoint: Endpoint = None,
    patience: Patience = PATIENCE_S,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="As a user's message, or as text to go on with as it stands.")
    ] = True,
    as_json: AsJson = False,
    origins: Origins = False,
) -> None:
    """Stream the answer to a prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    asked: Prompt = [Message("user", text)] if chat else text
    gateways = _gateways(endpoint, patience, tls)
    _stream(gateways, lambda client: client.generate(asked, **options), as_json=as_json, origins=origins)


@with_tls_flags
def resume(  # noqa: PLR0913  # one parameter a flag
    session_id: Annotated[str, typer.Argument(help="As `galley generate` told it.")],
    *,
    tls: Tls | None,
    next_index: Annotated[int, typer.Option(min=0, help="The first output token to show.")] = 0,
    endpoint: Endpoint = None,
    patience: Patience = PATIENCE_S,
    timeout: Timeout = None,
    as_json: AsJson = False,
    origins: Origins = False,
) -> None:
    """Go on with an answer that was cut off, at this or any other gateway."""
    _stream(
        _gateways(endpoint, patience, tls),
        lambda client: client.resume(session_id, next_index, timeout_s=timeout),
        as_json=as_json,
        origins=origins,
    )


@with_tls_flags
@with_answer_flags
def chat(
    *,
    options: GenerateOptions,
    tls: Tls | None,
    endpoint: Endpoint = None,
    patience: Patience = PATIENCE_S,
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    origins: Origins = False,
) -> None:
    """Talk with the model, one turn after the other."""
    gateways = _gateways(endpoint, patience, tls)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # history and line editing for input()
    say(_CHAT_HELP)
    first = [Message("system", system)] if system else []
    history = list(first)
    with asyncio.Runner() as runner:
        while (line := _ask()) is not None:
            if line == "/reset":
                history = list(first)
            elif line:
                turns = [*history, Message("user", line)]
                answer = _Answer(_view(as_json=False, origins=origins))
                if _complete(runner, answer, gateways, turns, options):
                    history = [*turns, Message("assistant", answer.text)]


def _ask() -> str | None:
    """The next line; None for /quit, the end of input or Ctrl-C."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def _complete(
    runner: asyncio.Runner,
    answer: _Answer,
    gateways: _Gateways,
    turns: list[Message],
    options: GenerateOptions,
) -> bool:
    """Stream one turn; False, and said why, if there is no whole answer."""
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415  # grpc is slow to load

    try:
        runner.run(answer.stream_from(gateways, lambda client: client.generate(turns, **options)))
    except KeyboardInterrupt:
        say("stopped")
        return False
    except (BadKey, GalleyRpcError) as error:
        say(f"error: {error}", style="red")
        return False
    return True


def _stream(
    gateways: _Gateways,
    start: Callable[[AsyncClient], TokenStream],
    *,
    as_json: bool,
    origins: bool,
) -> None:
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415  # grpc is slow to load

    answer = _Answer(_view(as_json=as_json, origins=origins))
    try:
        asyncio.run(answer.stream_from(gateways, start))
    except KeyboardInterrupt:
        answer.say_how_to_go_on()
        raise typer.Exit(INTERRUPTED) from None
    except (BadKey, GalleyRpcError) as error:
        answer.say_how_to_go_on()
        raise fail(error) from None
    if not as_json:
        answer.say_summary()


class _Gateways(NamedTuple):
    """Whom to ask and to trust, and how long to go on trying."""

    addresses: str
    retries: Retries
    tls: Tls | None


def _gateways(endpoint: str | None, patience_s: float, tls: Tls | None) -> _Gateways:
    try:
        # What runs here by `galley up` is found by a file of ours, and speaks no TLS.
        return _Gateways(find_endpoint(endpoint), Retries(patience_s), tls if endpoint else None)
    except (NoEndpoint, PermissionError) as error:
        raise fail(error) from None


def _view(*, as_json: bool, origins: bool) -> View:
    from galley.cli import render  # noqa: PLC0415  # protobuf is slow to load

    if as_json:
        return render.JsonView()
    console = Console(highlight=False)
    if origins:
        say(render.legend(console).plain)
        return render.OriginView(console)
    return render.TextView(console)


class _Answer:
    """One stream as it is shown; knows afterwards how far it came."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._stream: TokenStream | None = None
        self.text = ""

    async def stream_from(self, gateways: _Gateways, start: Callable[[AsyncClient], TokenStream]) -> None:
        """Show the stream that `start` opens, to its end."""
        from galley.client.client import AsyncClient  # noqa: PLC0415  # grpc is slow to load
        from galley.common.tracing.telemetry import start_telemetry  # noqa: PLC0415

        telemetry = start_telemetry("galley-cli", as_global=False)
        try:
            asked = AsyncClient(gateways.addresses, telemetry, gateways.retries, tls=gateways.tls)
            async with asked as client:
                self._stream = start(client)
                async for event in self._stream:
                    self.text += event.chunk.text
                    self._view.show(event)
        finally:
            self._view.close()
            telemetry.shutdown()

    def say_how_to_go_on(self) -> None:
        """After a stream that was cut off."""
        if self._stream is not None and self._stream.session_id:
            point = self._stream.resume_from()
            say(f"to go on: galley resume {point.session_id} --next-index {point.next_index}")

    def say_summary(self) -> None:
        """After a stream that came to its end."""
        from galley.cli.render import summary_line  # noqa: PLC0415  # protobuf is slow to load

        if self._stream is not None and self._stream.finished is not None:
            say(summary_line(self._stream.session_id, self._stream.finished))
