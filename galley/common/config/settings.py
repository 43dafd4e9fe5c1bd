"""Configuration of a service: one frozen value, from flags and environment, validated loudly at the edge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from galley.common.config.limits import ServerLimits
from galley.common.config.secrets import named, shown_secrets, with_secrets_read

S = TypeVar("S", bound=BaseSettings)


def settings_config(env_prefix: str) -> SettingsConfigDict:
    """The settings of Settings: subclasses set `model_config = settings_config("GALLEY_TARGET_")`."""
    return SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=env_prefix,
        cli_kebab_case="all",
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


class ServiceSettings(ServerLimits):
    """What every server process can be told."""

    model_config = settings_config("GALLEY_")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")
    metrics_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port on which Prometheus fetches /metrics; 0 lets the system choose, -1 is none.",
    )
    tls_cert_file: str = Field(
        default="", description="PEM of the certificate to serve with, its chain after it; empty: no TLS."
    )
    tls_key_file: str = Field(default="", description="PEM of its key.")
    tls_client_ca_file: str = Field(
        default="",
        description="PEM of the authorities of which every client must show a certificate; empty: of none.",
    )
    health_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port that tells health alone, without TLS; 0 lets the system choose, -1 is none.",
    )
    ready_fd: int | None = Field(
        default=None, ge=0, description="File descriptor that is told, in JSON lines, how the start goes."
    )
    die_with_parent: bool = Field(
        default=False, description="End when the process that started this one ends."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level logged."
    )
    log_format: Literal["json", "console"] = Field(
        default="json", description="One JSON object a line, or for people."
    )
    drain_timeout_s: float = Field(
        default=25.0,
        ge=0,
        le=3600,
        description="Longest time for work under way to finish after SIGTERM, in seconds.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, given: Any) -> Any:
        return with_secrets_read(cls, given)

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("--tls-cert-file and --tls-key-file go together")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
        return self


def parse_settings(cls: type[S], argv: Sequence[str], prog: str, description: str) -> S:
    """Read `cls` from flags, then environment, then defaults; exits 2 with a message if a value is wrong."""

    class Parsed(cls):  # type: ignore[valid-type,misc]  # a settings class is read by subclassing it
        model_config = SettingsConfigDict(cli_prog_name=prog)

    Parsed.__doc__ = description
    source: Any = CliSettingsSource(Parsed, add_argument_method=_add_long_flag)
    try:
        parsed = CliApp.run(Parsed, cli_args=list(argv), cli_settings_source=source)
    except ValidationError as error:
        for problem in error.errors():
            _say(prog, _explain(problem, _prefix_of(cls)))
        raise SystemExit(2) from None
    for flag in shown_secrets(parsed, argv):
        told = "holds a secret, and everybody can read a command line: give it by environment or by file"
        _say(prog, f"{flag}: {told}")
        raise SystemExit(2)
    return cls.model_construct(**{name: getattr(parsed, name) for name in cls.model_fields})


def _add_long_flag(parser: Any, *flags: str, **options: Any) -> Any:
    """Name a setting of one letter `--k`: pydantic-settings would accept `-k` only."""
    long = [flag if flag.startswith("--") or flag == "-h" else f"-{flag}" for flag in flags]
    return parser.add_argument(*long, **options)


def refuse(cls: type[BaseSettings], prog: str, setting: str, problem: str) -> NoReturn:
    """Exit 2 with a message, as where a value is wrong: what it names turned out to be of no use."""
    _say(prog, _of(setting, problem, _prefix_of(cls)))
    raise SystemExit(2)


def _say(prog: str, problem: str) -> None:
    print(f"{prog}: error: {problem}", file=sys.stderr)  # noqa: T201  # before logs


def _prefix_of(cls: type[BaseSettings]) -> str:
    return str(cls.model_config.get("env_prefix", ""))


def _explain(problem: ErrorDetails, env_prefix: str) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if not name:
        return problem["msg"].removeprefix("Value error, ")
    return _of(name, problem["msg"], env_prefix)


def _of(name: str, problem: str, env_prefix: str) -> str:
    return f"{named(name, env_prefix)}: {problem}"
