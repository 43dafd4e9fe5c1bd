"""Commands that speak TLS to a gateway: by flags, by the environment, and by no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.stack import endpoint
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.gateway import SESSION, FakeGateway, serving
from tests.fakes.tls_servers import credentials_of

COMMANDS = {
    "generate": ("generate", "Say hello"),
    "resume": ("resume", SESSION),
    "chat": ("chat",),
}


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "client", authority.ca, authority.issue("galley.test"))


@pytest.fixture
def address(files: Mounted) -> Iterator[str]:
    credentials = credentials_of(files, mutual=True)
    with serving(FakeGateway(), credentials) as address:
        yield address


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def tls_environment(files: Mounted) -> dict[str, str]:
    return {
        "GALLEY_TLS_CA_FILE": files.ca,
        "GALLEY_TLS_CERT_FILE": files.cert,
        "GALLEY_TLS_KEY_FILE": files.key,
        "GALLEY_TLS_SERVER_NAME": "galley.test",
    }


def flags(files: Mounted) -> list[str]:
    names = {
        name.removeprefix("GALLEY_").lower().replace("_", "-"): path
        for name, path in tls_environment(files).items()
    }
    return [f"--{name}={path}" for name, path in names.items()]


def galley(*args: str, **env: str) -> Result:
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "GALLEY_ENDPOINT": ""}
    return CliRunner().invoke(app, list(args), input="Say hello\n", env={**plain, **env})


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_take_flags_or_the_environment(
    command: tuple[str, ...], files: Mounted, address: str
) -> None:
    for result in (
        galley(*command, "--endpoint", address, *flags(files)),
        galley(*command, "--endpoint", address, **tls_environment(files)),
    ):
        assert "Hello, world!" in result.stdout, result.stderr


def test_bench_speaks_tls_too(files: Mounted, address: str) -> None:
    arguments = (
        "--strategies=off",
        "--workloads=chat",
        "--concurrency=1",
        "--repeats=1",
        "--endpoint",
        address,
    )
    assert galley("bench", *arguments, **tls_environment(files)).exit_code == 0


@pytest.mark.parametrize(
    "given",
    [{}, {"GALLEY_TLS": "1"}, {"GALLEY_TLS_SERVER_NAME": "another"}],
    ids=["plain", "public authorities", "another name"],
)
def test_client_with_wrong_tls_files_gets_no_answer(
    given: dict[str, str], files: Mounted, address: str
) -> None:
    whole = {**tls_environment(files), **given} if "GALLEY_TLS_SERVER_NAME" in given else given
    result = galley("generate", "x", "--patience", "0", "--endpoint", address, **whole)
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_missing_key_is_reported_in_one_line(command: tuple[str, ...], files: Mounted, address: str) -> None:
    result = galley(*command, "--endpoint", address, **tls_environment(files), GALLEY_API_KEY_FILE="/nowhere")
    assert "error: GALLEY_API_KEY_FILE: /nowhere: No such file" in result.stderr
    assert not isinstance(result.exception, ValueError)


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        (["--tls-ca-file=/nowhere"], "--tls-ca-file: /nowhere: No such file"),
        (["--tls-cert-file={cert}"], "--tls-key-file: required with --tls-cert-file"),
        (["--tls-cert-file={cert}", "--tls-key-file={ca}"], "--tls-key-file: {ca}: must hold a private key"),
    ],
)
def test_unusable_file_is_reported_before_any_request(flag: list[str], problem: str, files: Mounted) -> None:
    paths = {"ca": files.ca, "cert": files.cert}
    result = galley("generate", "x", "--endpoint", "127.0.0.1:1", *(part.format(**paths) for part in flag))
    assert result.exit_code == 2
    assert problem.format(**paths) in result.stderr


def test_path_named_like_a_field_is_reported_as_typed(files: Mounted, tmp_path: Path) -> None:
    key = tmp_path / "key_file"
    key.write_text("no key")
    flags = [f"--tls-cert-file={files.cert}", f"--tls-key-file={key}"]
    result = galley("generate", "x", "--endpoint", "127.0.0.1:1", *flags)
    assert f"--tls-key-file: {key}: must hold a private key" in result.stderr


def test_the_stack_that_runs_here_is_spoken_to_plainly(files: Mounted) -> None:
    with serving(FakeGateway()) as plain, endpoint.Endpoint() as stack:
        stack.announce(plain)
        assert galley("generate", "x", **tls_environment(files)).stdout == "Hello, world!\n"
