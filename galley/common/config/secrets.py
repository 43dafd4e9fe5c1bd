"""Read secret settings from the environment or from files, never from a command line.

A secret setting `x` has a second setting `x_file`, the path of a file that holds it, as a mounted Secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import SecretStr
from pydantic_settings import BaseSettings

_FILE = "_file"
MAX_SECRET_BYTES = 64 * 1024


def load_secret_files(cls: type[BaseSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the secrets that are in files.

    Raise ValueError, which names the flag and never a secret, if a file cannot be read or a secret is given
    both ways.
    """
    values = dict(given)
    prefix = str(cls.model_config.get("env_prefix", ""))
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
    """Raise ValueError if the file cannot be read, is empty, is not text or exceeds MAX_SECRET_BYTES."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise ValueError(f"{path}: is larger than {MAX_SECRET_BYTES} bytes")
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text:
        raise ValueError(f"{path}: holds no line of text")
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
    """Return the flag and the environment variable."""
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
