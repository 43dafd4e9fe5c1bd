"""Secrets by environment or from a file: what is read, what is refused, and that nothing shows them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from pydantic_settings import BaseSettings

from galley.common.config.settings import MAX_SECRET_BYTES, load_secret_files, parse_settings, settings_config
from services.draft.settings import DraftSettings
from services.gateway.settings import GatewaySettings

CANARY = "canary-5c1e"
URL = f"redis://galley:{CANARY}@store.test:6379/0"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "url"
    path.write_text(URL + "\n")
    return path


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_settings(GatewaySettings, argv, "test", "")
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert CANARY not in output.out + output.err
    return output.err


def test_a_secret_is_read_from_its_file(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(CANARY)
    reported = parse_settings(
        GatewaySettings, ["--redis-url-file", str(file), "--id-secret-file", str(key)], "test", ""
    )
    assert reported.redis_url.get_secret_value() == URL
    assert reported.id_secret.get_secret_value() == CANARY
    assert CANARY not in repr(reported)
    with patch.dict(os.environ, {"GALLEY_DRAFT_REDIS_URL_FILE": str(file)}):
        assert parse_settings(DraftSettings, [], "test", "").redis_url.get_secret_value() == URL


def test_a_secret_is_read_from_the_environment() -> None:
    with patch.dict(os.environ, {"GALLEY_GATEWAY_REDIS_URL": URL, "GALLEY_GATEWAY_ID_SECRET": CANARY}):
        reported = parse_settings(GatewaySettings, [], "test", "")
    assert reported.redis_url.get_secret_value() == URL
    assert reported.id_secret.get_secret_value() == CANARY


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--redis-url", URL), "--redis-url"),
        ((f"--redis-url={URL}",), "--redis-url"),
        (("--redis-url", f"rediss+sentinel://s:1/0?service=g&sentinel_password={CANARY}"), "--redis-url"),
        (("--id-secret", CANARY), "--id-secret"),
    ],
)
def test_a_secret_on_the_command_line_is_refused(
    argv: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{flag}: must not hold a secret" in refusal(capsys, *argv)


def test_url_without_password_may_be_a_flag(file: Path) -> None:
    for url in ("redis://store.test:6379/0", "unix:///run/s", "redis://user@store.test/0"):
        assert parse_settings(GatewaySettings, ["--redis-url", url], "test", "").redis_url
    with patch.dict(os.environ, {"GALLEY_GATEWAY_ID_SECRET": CANARY}):
        parse_settings(GatewaySettings, ["--redis-url-file", str(file)], "test", "")


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (None, "No such file"),
        (b"", "must hold a line of text"),
        (b"\r\n", "must hold a line of text"),
        (CANARY.encode() + b"\xff", "must hold a line of text"),
        (CANARY.encode() + b"\0", "must hold a line of text"),
        (CANARY.encode() * MAX_SECRET_BYTES, "must be at most 65536 bytes"),
        (CANARY.encode(), "--redis-url (or GALLEY_GATEWAY_REDIS_URL): must be a URL"),
    ],
    ids=["none", "empty", "a line break", "no text", "zero", "large", "no URL"],
)
def test_a_file_that_holds_none_is_named(
    tmp_path: Path, content: bytes | None, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    error = refusal(capsys, "--redis-url-file", str(path))
    assert reported in error
    assert str(path) in error or "must be a URL" in error


def test_a_secret_that_is_given_twice_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict(os.environ, {"GALLEY_GATEWAY_REDIS_URL": URL}):
        error = refusal(capsys, "--redis-url-file", str(file))
    assert "--redis-url-file (or GALLEY_GATEWAY_REDIS_URL_FILE): " in error
    assert "must not be given with --redis-url (or GALLEY_GATEWAY_REDIS_URL)" in error


def test_a_fifo_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "url"
    os.mkfifo(path)
    assert f"{path}: must be a regular file" in refusal(capsys, "--redis-url-file", str(path))


class Listed(BaseSettings):
    model_config = settings_config("LISTED_")

    names: int = 1
    names_file: str = ""


def test_only_secrets_have_files_that_hold_them(tmp_path: Path) -> None:
    fields = {"names": 2, "names_file": str(tmp_path / "names")}
    assert load_secret_files(Listed, fields) == fields
