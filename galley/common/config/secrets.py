"""Secrets as settings: by environment or from a file, never on a command line, which everybody can read.

A secret setting `x` has a neighbour `x_file`: the path of a file that holds it, such as a mounted Secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from galley.common.secret_file import read_secret

_FILE = "_file"


def with_secrets_read(cls: type[BaseSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given to settings of `cls`, with the secrets that are in files.

    Raises ValueError, naming the flag and never a secret, where a file cannot be read or a secret is given
    both ways.
    """
    told = dict(given)
    prefix = str(cls.model_config.get("env_prefix", ""))
    for secret in _secrets(cls):
        name = secret + _FILE
        if not told.get(name):
            continue
        if _text(told.get(secret, "")):
            raise ValueError(f"{named(name, prefix)}: {named(secret, prefix)} is given too; one is enough")
        try:
            told[secret] = read_secret(Path(str(told[name])))
        except ValueError as error:
            raise ValueError(f"{named(name, prefix)}: {error}") from None
    return told


def shown_secrets(settings: BaseSettings, argv: Sequence[str]) -> list[str]:
    """The flags of `argv` that hold a secret."""
    flags = [_flag(name) for name in _secrets(type(settings))]
    return [flag for flag in flags if any(is_secret(text) for text in _given(flag, argv))]


def _secrets(cls: type[BaseSettings]) -> list[str]:
    return [name for name, field in cls.model_fields.items() if field.annotation is SecretStr]


def _given(flag: str, argv: Sequence[str]) -> Iterator[str]:
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, attached, text = word.partition("=")
        if name == flag:
            yield text if attached else following


def named(name: str, env_prefix: str) -> str:
    """A setting as its user knows it."""
    return f"{_flag(name)} (or {f'{env_prefix}{name}'.upper()})"


def is_secret(text: str) -> bool:
    """Of a URL, only one with a password."""
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
