"""`--config FILE`: which flags it sets, what wins over it, and what is refused by line and key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.common.config.file import TABLES
from galley.common.config.settings import parse_settings
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.settings import GatewaySettings
from tests.fakes.gateway import FakeGateway, serving

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "GALLEY_ENDPOINT": "", "GALLEY_CONFIG": ""}
GENERATE = """
[generate]
max-tokens = 9
temperature = 1  # a whole number is a number
stop = [
  "a",
  "b",
]
chat = false
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "galley.toml"
    path.write_text(GENERATE)
    return path


def galley(*args: str, **env: str) -> Result:
    return CliRunner().invoke(app, list(args), env={**PLAIN, **env})


def request_of(*args: str, **env: str) -> pb.GenerateRequest:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = galley(*args, **{"GALLEY_ENDPOINT": address, **env})
    assert result.exit_code == 0, result.output
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    return request


def test_the_file_sets_flags_of_each_kind(file: Path) -> None:
    request = request_of("generate", "x", "--config", str(file))
    assert (request.text, request.max_tokens, list(request.stop)) == ("x", 9, ["a", "b"])
    assert request.sampling.temperature == 1


def test_the_documented_file_is_accepted(file: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    file.write_text(page.split("```toml\n")[1].split("```")[0])
    assert request_of("generate", "x", "--config", str(file)).max_tokens == 256
    refused = galley("up", "--config", str(file), "--name", "a/b")
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, "nothing else is wrong"
    assert errors[0].startswith("error: --name: must be")
    settings = parse_settings(GatewaySettings, ["--config", str(file)], "test", "")
    assert settings.max_sessions == 128


def test_flags_win_over_the_file(file: Path) -> None:
    request = request_of("generate", "x", "--config", str(file), "--max-tokens=3", "--stop=c", "--chat")
    assert (request.max_tokens, list(request.stop)) == (3, ["c"])
    assert request.messages.messages[0].content == "x"


def test_the_environment_wins_over_the_file(file: Path) -> None:
    file.write_text('[generate]\nendpoint = "127.0.0.1:1"\n')
    assert request_of("generate", "x", "--raw", "--config", str(file)).text == "x"


def test_the_file_may_stand_before_the_command_or_in_the_environment(file: Path) -> None:
    assert request_of("--config", str(file), "generate", "x").max_tokens == 9
    assert request_of("generate", "x", GALLEY_CONFIG=str(file)).max_tokens == 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[up]\n\ngrpc-prot = 1", "--config: {}:3: up.grpc-prot: unknown; did you mean grpc-port?"),
        ("[up]\nzzz = 1", "--config: {}:2: up.zzz: unknown"),
        ("# none\n[generat]\nseed = 1", "--config: {}:2: generat: unknown; did you mean generate?"),
        ('[up]\nhttp-port = "1"', "--config: {}:2: up.http-port: must be a whole number, got text"),
        ("[up]\nhttp-port = true", "--config: {}:2: up.http-port: must be a whole number, got true or false"),
        ("[up]\ntrace = 1", "--config: {}:2: up.trace: must be true or false, got a whole number"),
        ("[up]\nmodel = 1", "--config: {}:2: up.model: must be text, got a whole number"),
        ('[up]\nname = "blue"\nk = 65', "{}:3: up.k: must be at most 64, got 65"),
        (
            '[up]\nstrategy = "foo"',
            "{}:2: up.strategy: must be one of ngram, model, features, hybrid, none, got 'foo'",
        ),
        ("[up]\nredis-url = 'redis://u:canary@x'", "{}:2: up.redis-url: must not hold a password"),
        ("[up]\nconfig = 'other.toml'", "--config: {}:2: up.config: unknown"),
        ("port = 1", "--config: {}:1: port: must be in the table of a command, such as [up]"),
        ("[up\n", "--config: {}: must be TOML: "),
        ("[up]\nname = 'caf\udce9'", "--config: {}: must be TOML: "),
    ],
)
def test_what_is_wrong_is_named_by_line_and_key(file: Path, text: str, problem: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    refused = galley("up", "--config", str(file))
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {problem.format(file)}")
    assert len(refused.stderr.splitlines()) == 1
    assert "canary" not in refused.output


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused = galley("ps", "--config", str(tmp_path / "none.toml"))
    assert refused.exit_code == 2
    assert f"--config: {tmp_path}/none.toml: No such file or directory" in refused.stderr


def test_a_file_does_not_undo_a_quick_bench(file: Path) -> None:
    file.write_text("[bench]\nconcurrency = '2'\nmax-tokens = 48\n")
    command: Any = typer.main.get_command(app)
    for arguments in (["--quick", "--config", str(file)], ["--config", str(file), "--quick"]):
        context = command.commands["bench"].make_context("bench", arguments)
        assert context.params["concurrency"] == "1,4"
        assert context.params["max_tokens"] == 32


def test_serve_reads_the_table_of_up(file: Path) -> None:
    file.write_text('[up]\nmodel = "./none"\nhttp-port = 9\n')
    config = ("--config", str(file))
    clash = galley("serve", "x", "--grpc-port=9", *config)
    assert clash.stderr.startswith("error: --http-port: must differ from --grpc-port, got 9 for both")
    model = galley("serve", *config)
    assert model.stderr.startswith(
        "error: --model: must be a directory, a .gguf file or a hub id, got ./none"
    )
    file.write_text("[up]\nhttp-port = 70000\n")
    beyond = galley("serve", "x", *config)
    assert beyond.stderr.startswith(f"error: {file}:2: up.http-port: must be at most 65535, got 70000")
    assert {clash.exit_code, model.exit_code, beyond.exit_code} == {2}


def test_every_command_has_a_table() -> None:
    command: Any = typer.main.get_command(app)
    assert set(command.commands) == TABLES | {"serve"}


def _takes_a_file(command: Any) -> bool:
    return any("--config" in parameter.opts for parameter in command.params)


def test_every_command_but_the_servers_takes_a_file() -> None:
    command: Any = typer.main.get_command(app)
    without = {
        name
        for name, each in command.commands.items()
        if not all(_takes_a_file(one) for one in getattr(each, "commands", {name: each}).values())
    }
    assert without == {"gateway", "draft", "target", "prepare", "completion"}


def test_a_server_gets_the_file(file: Path) -> None:
    file.write_text("[gateway]\nkk = 1\n")
    for args in (["gateway", "--config", str(file)], ["--config", str(file), "gateway"]):
        command = [sys.executable, "-m", "galley.cli", *args]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode == 2
        assert ended.stderr == (
            f"galley gateway: error: --config: {file}:2: gateway.kk: unknown; did you mean k?\n"
        )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_galley(shell: str) -> None:
    script = galley("completion", shell)
    assert script.exit_code == 0
    assert f"_GALLEY_COMPLETE=complete_{shell} " in script.stdout


def test_bash_completes_a_command() -> None:
    source = f'galley() {{ {sys.executable} -m galley.cli "$@"; }}; source <(galley completion bash)'
    complete = "COMP_WORDS='galley se' COMP_CWORD=1 _GALLEY_COMPLETE=complete_bash galley; complete -p galley"
    done = subprocess.run(["bash", "-c", f"{source}; {complete}"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "serve"
    assert "-F _galley_completion galley" in done.stdout


def test_the_commands_of_a_group_share_its_table(file: Path) -> None:
    file.write_text('[drafts]\npool = "a b"\n')
    for command in ("list", "history"):
        refused = galley("drafts", command, "--config", str(file), GALLEY_DRAFTS_REDIS_URL="redis://x:1")
        assert refused.exit_code == 2
        assert "must be 1 to 128 letters" in refused.stderr
