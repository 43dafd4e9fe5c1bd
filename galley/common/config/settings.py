"""Read the configuration of a service from flags and environment into one frozen, validated value.

A secret setting `x` has a second setting `x_file`, the path of a file that holds it, as a mounted Secret.
Command lines hold no secrets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    SettingsConfigDict,
)

from galley.common.config.file import kind_of, read_config
from galley.common.constraints import constraint_of
from galley.common.regular_file import read_regular

S = TypeVar("S", bound=BaseSettings)

MIB = 2**20
OFF = -1
"""Value of a port setting that opens none."""
_FILE = "_file"
MAX_SECRET_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one server, which gRPC enforces; 0 s for idle time or age is no limit.

    - `max_message_bytes` bounds a request message.
    - `max_message_fields` bounds the fields of a message above 64 KiB, `max_numbers_bytes` its lists of
      numbers; 0 is no bound.
    - `max_metadata_bytes` bounds the metadata of a call: names and values, and 32 bytes for each entry.
    - `max_concurrent_rpcs` calls may be open on one connection; more wait at the client.
    - `max_connections` may be open, divided among the acceptors of the port; later ones are closed at once.
    - A connection closes after `max_connection_idle_s` without calls. At `max_connection_age_s` it takes no
      more calls, and closes when its last call has ended.
    - `min_ping_interval_s`: a peer that pings more often while nothing else is sent is disconnected.
    - `handshake_timeout_s` bounds the set-up of a connection.
    - `request_timeout_s` bounds the wait for a request after its call has begun.
    """

    max_message_bytes: int = 4 * MIB
    max_message_fields: int = 0
    max_numbers_bytes: int = 0
    max_metadata_bytes: int = 16 * 1024
    max_concurrent_rpcs: int = 1000
    max_connections: int = 4096
    max_connection_idle_s: float = 0.0
    max_connection_age_s: float = 0.0
    min_ping_interval_s: float = 5.0
    handshake_timeout_s: float = 10.0
    request_timeout_s: float = 20.0


def settings_config(env_prefix: str) -> SettingsConfigDict:
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


class ServiceSettings(BaseSettings):
    model_config = settings_config("GALLEY_")

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. :: is every address of the machine, of IPv4 and IPv6.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on. 0 lets the system choose.")
    metrics_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port of /metrics for Prometheus. 0 lets the system choose, -1 serves no metrics.",
    )
    health_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Second port that serves only health, without TLS. 0 lets the system choose, -1 opens "
        "none.",
    )
    max_message_bytes: int = Field(
        default=4 * MIB, ge=1024, le=64 * MIB, description="Largest accepted request message, in bytes."
    )
    reflection: bool = Field(default=True, description="Serve gRPC reflection.")
    tls_cert_file: str = Field(
        default="",
        description="PEM file of the server certificate, followed by its chain. Empty serves without TLS.",
    )
    tls_key_file: str = Field(default="", description="PEM file of the key of --tls-cert-file.")
    tls_client_ca_file: str = Field(
        default="",
        description="PEM file of the authorities of client certificates. Empty accepts clients without one.",
    )
    ready_fd: int | None = Field(
        default=None,
        ge=0,
        description="File descriptor to which the start is reported, as JSON lines.",
    )
    die_with_parent: bool = Field(
        default=False, description="Stop when the process that started this one ends."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: Literal["json", "console"] = Field(
        default="json", description="Log format: one JSON object a line, or text for people."
    )
    drain_timeout_s: float = Field(
        default=25.0,
        ge=0,
        le=3600,
        description="Time for running work to finish after SIGTERM, in seconds.",
    )

    @property
    def collects_metrics(self) -> bool:
        """Return True if metrics are read from a port of this process."""
        return self.metrics_port != OFF

    def server_limits(self) -> ServerLimits:
        return ServerLimits(max_message_bytes=self.max_message_bytes)

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, given: Any) -> Any:
        return load_secret_files(cls, given)

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("--tls-cert-file, --tls-key-file: must be given together")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("--tls-client-ca-file: requires --tls-cert-file and --tls-key-file")
        return self


class _FlagSource(CliSettingsSource[Any]):
    def _help_format(self, _name: str, field: FieldInfo, *_: Any) -> str:
        text = field.description or ""
        default = field.get_default(call_default_factory=True)
        value = default.get_secret_value() if isinstance(default, SecretStr) else default
        if isinstance(value, bool):
            value = str(value).lower()
        if value not in ("", None):
            text += f" Default: {value}."
        return text.replace("%", "%%")


def parse_settings(cls: type[S], argv: Sequence[str], prog: str, description: str) -> S:
    """Return the settings; flags override the environment, which overrides the file of --config.

    Exit 2 for a wrong value or a secret in a flag or file.
    """
    argv, config = _take_config(argv)
    try:
        table = _values_in(cls, config) if config else {}
    except ValueError as error:
        _print_error(prog, f"--config: {error}")
        raise SystemExit(2) from None

    class Parsed(cls):  # type: ignore[valid-type,misc]  # a settings class is read by subclassing it
        model_config = SettingsConfigDict(cli_prog_name=prog)

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[Any, ...]:
            from_file = InitSettingsSource(settings_cls, init_kwargs=table)
            return (*super().settings_customise_sources(settings_cls, *sources, **named), from_file)

    Parsed.__doc__ = (
        f"{description} --config FILE: defaults of these settings, as TOML in a table [{_table(cls)}]."
    )
    source: Any = _FlagSource(Parsed, add_argument_method=_add_long_flag)
    try:
        parsed = CliApp.run(Parsed, cli_args=list(argv), cli_settings_source=source)
    except ValidationError as error:
        for problem in error.errors():
            _print_error(prog, _describe(problem, _env_prefix(cls)))
        raise SystemExit(2) from None
    for flag in secrets_in_argv(parsed, argv):
        _print_error(
            prog,
            f"{flag}: must not hold a secret, as every user can read command lines; "
            "use the environment or a file",
        )
        raise SystemExit(2)
    return cls.model_construct(**{name: getattr(parsed, name) for name in cls.model_fields})


def _take_config(argv: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments without --config, and its value; the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    given, rest = parser.parse_known_args(list(argv))
    return rest, str(given.config)


def _table(cls: type[BaseSettings]) -> str:
    return _env_prefix(cls).removeprefix("GALLEY_").strip("_").lower()


def _values_in(cls: type[BaseSettings], path: str) -> dict[str, Any]:
    """Return the settings in the file's table. Raise ValueError that names line and key."""
    fields = {_flag(name).removeprefix("--"): (name, field) for name, field in cls.model_fields.items()}
    file, table = read_config(Path(path)), _table(cls)
    file.check_tables()
    values = file.values(table, {key: kind_of(field.annotation) for key, (_, field) in fields.items()})
    for key, value in values.items():
        name, field = fields[key]
        if name in _secret_names(cls) and is_secret(value):
            raise ValueError(
                f"{file.place(table, key)}: must not hold a secret; use the environment or {key}-file"
            )
        kind: Any = Annotated[field.annotation, *field.metadata, None]
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            problem = constraint_of(error.errors()[0])
            raise ValueError(f"{file.place(table, key)}: {problem}") from None
    return {fields[key][0]: value for key, value in values.items()}


def _add_long_flag(parser: Any, *flags: str, **options: Any) -> Any:
    """Name a setting of one letter `--k`: pydantic-settings would accept `-k` only."""
    long = [flag if flag.startswith("--") or flag == "-h" else f"-{flag}" for flag in flags]
    return parser.add_argument(*long, **options)


def exit_with_bad_setting(cls: type[BaseSettings], prog: str, setting: str, problem: str) -> NoReturn:
    _print_error(prog, f"{setting_label(setting, _env_prefix(cls))}: {problem}")
    raise SystemExit(2)


def _print_error(prog: str, problem: str) -> None:
    print(f"{prog}: error: {problem}", file=sys.stderr)  # noqa: T201  # before logs


def _env_prefix(cls: type[BaseSettings]) -> str:
    return str(cls.model_config.get("env_prefix", ""))


def _describe(problem: ErrorDetails, env_prefix: str) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    message = constraint_of(problem)
    return f"{setting_label(name, env_prefix)}: {message}" if name else message


def load_secret_files(cls: type[BaseSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the secrets that are in files.

    Raise ValueError, which names the flag and never a secret, if a file cannot be read or a secret is given
    both ways.
    """
    values = dict(given)
    prefix = _env_prefix(cls)
    for secret in _secret_names(cls):
        name = secret + _FILE
        if not values.get(name):
            continue
        if _text(values.get(secret, "")):
            raise ValueError(
                f"{setting_label(name, prefix)}: must not be given with {setting_label(secret, prefix)}"
            )
        try:
            values[secret] = read_secret(Path(str(values[name])))
        except ValueError as error:
            raise ValueError(f"{setting_label(name, prefix)}: {error}") from None
    return values


def read_secret(path: Path) -> str:
    """Return a file's text without final line ends. Raise ValueError if it holds no short text."""
    try:
        content = read_regular(path, MAX_SECRET_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text:
        raise ValueError(f"{path}: must hold a line of text")
    return text


def secrets_in_argv(settings: BaseSettings, argv: Sequence[str]) -> list[str]:
    flags = [_flag(name) for name in _secret_names(type(settings))]
    return [flag for flag in flags if any(is_secret(text) for text in _values_of(flag, argv))]


def _secret_names(cls: type[BaseSettings]) -> list[str]:
    return [name for name, field in cls.model_fields.items() if field.annotation is SecretStr]


def _values_of(flag: str, argv: Sequence[str]) -> Iterator[str]:
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, attached, text = word.partition("=")
        if name == flag:
            yield text if attached else following


def setting_label(name: str, env_prefix: str) -> str:
    """Return the flag and the environment variable of a setting, as errors name it."""
    return f"{_flag(name)} (or {f'{env_prefix}{name}'.upper()})"


def is_secret(text: str) -> bool:
    """Return True unless `text` is empty, or a URL without a password."""
    if "://" not in text:
        return bool(text)
    try:
        address = urlsplit(text)
    except ValueError:
        return True
    _, _, password = address.netloc.rpartition("@")[0].partition(":")
    in_query = any("password" in name for name, _ in parse_qsl(address.query))
    return bool(password) or in_query


def _text(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value or "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
