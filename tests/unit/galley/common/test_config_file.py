"""Settings of a service from the table of its role in a file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import SecretStr

from galley.common.config.file import kind_of, read_config
from galley.common.config.settings import parse_settings
from services.gateway.settings import GatewaySettings

TABLE = """
[gateway]
k = 3
store-timeout-s = 2
generation-config = "none"
page = false
redis-url = "redis://store:6379/0"

[draft]
anything = "is read by the draft"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "galley.toml"
    path.write_text(TABLE)
    return path


def parse(*argv: str) -> GatewaySettings:
    return parse_settings(GatewaySettings, argv, "test", "")


def test_the_table_sets_what_flags_and_environment_do_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_GATEWAY_STORE_TIMEOUT_S", "4")
    settings = parse("--config", str(file), "--no-page", "--generation-config", "auto")
    assert (settings.k, settings.page, settings.store_timeout_s) == (3, False, 4)
    assert settings.generation_config == "auto"
    assert settings.redis_url.get_secret_value() == "redis://store:6379/0"
    assert settings.credit == parse().credit


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("kk = 3", "gateway.kk: unknown; did you mean k?"),
        ("http_port = 3", "gateway.http_port: unknown; did you mean http-port?"),
        ('k = "3"', "gateway.k: must be a whole number, got text"),
        ("k = 65", "gateway.k: must be at most 64, got 65"),
        ("store-timeout-s = 0", "gateway.store-timeout-s: must be above 0, got 0"),
        ('generation-config = "some"', "gateway.generation-config: must be 'auto' or 'none'"),
        ('http-cors-origins = "x"', "gateway.http-cors-origins: must be * or scheme://host[:port], got 'x'"),
        ('id-secret = "canary"', "gateway.id-secret: must not hold a secret; use the environment or id-sec"),
        ("id-secret = 987654321", "gateway.id-secret: must be text, got a whole number"),
        ('redis-url = "redis://u:canary@s"', "gateway.redis-url: must not hold a secret"),
    ],
)
def test_a_wrong_line_is_named(
    file: Path, line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"[gateway]\n\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        parse("--config", str(file))
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"test: error: --config: {file}:3: {problem}")
    assert not re.search("canary|987654321", printed)


def test_a_misspelt_table_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a gateway would ignore all of it, such as its file of keys."""
    file.write_text('[gatway]\napi-keys-file = "keys"\n')
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert (
        capsys.readouterr().err
        == f"test: error: --config: {file}:1: gatway: unknown; did you mean gateway?\n"
    )


def test_lines_of_keys_in_every_form(file: Path) -> None:
    file.write_text('up.k = 1\n\n[a]\nb = """\nx\n"""\nc = [\n 1,\n]\n"d" = { e = 1 }\n')
    config = read_config(file)
    places = [("up", "k"), ("a", ""), ("a", "b"), ("a", "c"), ("a", "d")]
    lines = [config.place(*place).split(":")[1] for place in places]
    assert lines == ["1", "3", "4", "7", "10"]


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (int | None, int),
        (Annotated[float, "bound"], float),
        (bool, bool),
        (list[str] | None, list),
        (Literal["a", "b"] | None, str),
        (Path, str),
        (SecretStr, str),
    ],
)
def test_kinds_of_flags(annotation: Any, kind: type) -> None:
    assert kind_of(annotation) is kind


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"/fifo: must be a regular file$"):
        read_config(tmp_path / "fifo")
