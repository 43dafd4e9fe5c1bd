"""The flags that say how an answer is made, and how a gateway is spoken to; of all commands that ask one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from galley.client.options import GenerateOptions, Retries, Speculation, Tls

_SAMPLING, _LENGTH, _SPECULATION, _TLS = "Sampling", "Length", "Speculation", "TLS to the gateway"

Endpoint = Annotated[
    str | None,
    typer.Option(
        envvar="GALLEY_ENDPOINT",
        help="The gateway, host:port; of several, with commas, each takes over from the one before. "
        "Default: those of the stack that `galley up` runs on this machine.",
        metavar="HOST:PORT",
    ),
]


def not_shown(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """Of an option that may hold a secret: refuse one on the command line."""
    from galley.common.config.secrets import is_secret  # noqa: PLC0415  # slow to load

    source = ctx.get_parameter_source(param.name or "")
    shown = source is not None and source.name == "COMMANDLINE"
    if shown and value and is_secret(value):
        raise typer.BadParameter(
            f"holds a password, and everybody can read a command line: use {param.envvar}"
        )
    return value


PATIENCE_S = Retries().patience_s
Patience = Annotated[
    float,
    typer.Option(min=0, help="How long to go on trying while no gateway answers, in seconds; 0: not at all."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object a line for each event of the stream, for machines.")
]
Origins = Annotated[
    bool,
    typer.Option("--origins", help="Tell the tokens that came from the draft apart from the target's own."),
]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Deadline of the whole answer, in seconds.")]


def answer_options(  # noqa: PLR0913  # one parameter a flag
    *,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens at most.", rich_help_panel=_LENGTH)
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Tokens at least.", rich_help_panel=_LENGTH)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Ends the answer; not part of it. May be given again.", rich_help_panel=_LENGTH),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end.", rich_help_panel=_LENGTH)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help=">= 0; 0 is greedy. Default: 1.", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].", rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help=">= 1; 0 is off.", rich_help_panel=_SAMPLING)
    ] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].", rich_help_panel=_SAMPLING)] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="In [-2, 2].", rich_help_panel=_SAMPLING)
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="In [-2, 2].", rich_help_panel=_SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="In (0, 10]; 1 is off.", rich_help_panel=_SAMPLING)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**64 - 1,
            help="Of the noise. Default: the gateway draws one, and says it.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, help="Give each token's logprob, and the N likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=0, help="Draft tokens a round.", rich_help_panel=_SPECULATION)
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="How to draft: ngram, model, ...", rich_help_panel=_SPECULATION)
    ] = "",
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Plain decoding.", rich_help_panel=_SPECULATION)
    ] = False,
    workload: Annotated[
        str, typer.Option(help="A label under which acceptance is counted.", rich_help_panel=_SPECULATION)
    ] = "",
    idempotency_key: Annotated[
        str, typer.Option(help="The same key and request join the same session.")
    ] = "",
    continue_without_client: Annotated[
        bool,
        typer.Option(
            "--continue-without-client",
            help="If this command ends first, go on: `galley resume` shows the rest.",
        ),
    ] = False,
    timeout: Timeout = None,
    force_trace: Annotated[
        bool, typer.Option("--force-trace", help="Have the gateways trace this, whatever they sample.")
    ] = False,
) -> GenerateOptions:
    """The client's options for these flags; bounds that the gateway knows better are left to it."""
    if no_speculation and (k is not None or strategy):
        raise typer.BadParameter("--no-speculation leaves no room for --k and --strategy")
    return {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "logprobs": logprobs,
        "speculation": Speculation(off=no_speculation, k=k, strategy=strategy),
        "workload": workload,
        "idempotency_key": idempotency_key,
        "continue_without_client": continue_without_client,
        "timeout_s": timeout,
        "force_trace": force_trace,
    }


def tls_options(
    *,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            envvar="GALLEY_TLS",
            help="Trust public authorities. Any flag below asks for TLS too; "
            "the stack that `galley up` runs here, and is found by itself, speaks none.",
            rich_help_panel=_TLS,
        ),
    ] = False,
    tls_ca_file: Annotated[
        str,
        typer.Option(
            envvar="GALLEY_TLS_CA_FILE", help="Trust these authorities alone (PEM).", rich_help_panel=_TLS
        ),
    ] = "",
    tls_cert_file: Annotated[
        str,
        typer.Option(
            envvar="GALLEY_TLS_CERT_FILE",
            help="A certificate of our own (PEM), for gateways that ask.",
            rich_help_panel=_TLS,
        ),
    ] = "",
    tls_key_file: Annotated[
        str, typer.Option(envvar="GALLEY_TLS_KEY_FILE", help="Its key (PEM).", rich_help_panel=_TLS)
    ] = "",
    tls_server_name: Annotated[
        str,
        typer.Option(
            envvar="GALLEY_TLS_SERVER_NAME",
            help="The name in the gateway's certificate. Default: the host of its address.",
            rich_help_panel=_TLS,
        ),
    ] = "",
) -> Tls | None:
    """The client's TLS for these flags, its files tried; None where none is asked for."""
    files = (tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
    if not (tls or any(files)):
        return None
    from galley.client.client import channel_tls  # noqa: PLC0415  # grpc is slow to load
    from galley.common.tls.files import BadFile  # noqa: PLC0415

    asked = Tls(*files)
    try:
        channel_tls(asked)
    except BadFile as error:
        flag = "--tls-" + error.setting.replace("_", "-")
        raise typer.BadParameter(error.problem, param_hint=flag) from None
    return asked


def with_answer_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(..., options)` the flags of `answer_options` in place of `options`."""
    return _with_flags_of(answer_options, "options", command)


def with_tls_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(..., tls)` the flags of `tls_options` in place of `tls`."""
    return _with_flags_of(tls_options, "tls", command)


def _with_flags_of(
    options_of: Callable[..., object], replaced: str, command: Callable[..., None]
) -> Callable[..., None]:
    flags = inspect.signature(options_of, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = options_of(**{name: given.pop(name) for name in flags})
        command(**given, **{replaced: options})

    parameters = [*(p for name, p in own.items() if name != replaced), *flags.values()]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    # Typer reads both.
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
