"""The clients among the commands, against a scripted gateway over real gRPC."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from galley.cli.__main__ import app
from galley.common.printable import printable
from galley.core.errors import InvalidField, Unavailable, UnknownSession
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.stack import endpoint
from galley.version import __version__
from tests.fakes.gateway import SESSION, FakeGateway, Said, serving

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "GALLEY_ENDPOINT": ""}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def galley(*args: str, stdin: str = "", **env: str) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin, env={**PLAIN, **env})


def test_generate_prints_the_text_exactly_and_tells_the_session_aside() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = galley("generate", "Say hello", "--endpoint", address)
    assert result.exit_code == 0
    assert result.stdout == "Hello, world!\n"
    assert f"session {SESSION} · 5 + 4 tokens · 2 rounds · mean acceptance length 2.00" in result.stderr
    assert "ended by stop string '!'" in result.stderr
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    assert [(turn.role, turn.content) for turn in request.messages.messages] == [("user", "Say hello")]


def test_generate_takes_its_endpoint_from_the_environment_and_its_prompt_from_stdin() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = galley("generate", "-", "--raw", stdin="Once upon", GALLEY_ENDPOINT=address)
    assert result.exit_code == 0
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    assert request.text == "Once upon"


def test_generate_finds_the_stack_that_runs_here() -> None:
    with serving(FakeGateway()) as address:
        told = endpoint.announce(address)
        assert galley("generate", "x").stdout == "Hello, world!\n"
        endpoint.withdraw(told)
        gone = galley("generate", "x")
    assert gone.exit_code == 1
    assert gone.stderr == (
        "error: no stack runs here: start one with `galley up`, or name a gateway with --endpoint\n"
    )


def test_every_flag_reaches_the_wire() -> None:
    gateway = FakeGateway()
    flags = (
        "--temperature=0.5 --top-p=0.5 --top-k=7 --min-p=0.25 --frequency-penalty=1 --presence-penalty=-1 "
        "--repetition-penalty=1.5 --seed=18446744073709551615 --max-tokens=9 --min-tokens=2 --stop=a "
        "--stop=b --ignore-eos --logprobs=3 --k=2 --strategy=ngram --workload=code "
        "--idempotency-key=key --continue-without-client --timeout=60"
    )
    with serving(gateway) as address:
        assert galley("generate", "x", "--raw", "--endpoint", address, *flags.split()).exit_code == 0
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
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=3,
        speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=2, strategy="ngram"),
        workload="code",
        idempotency_key="key",
        continue_without_client=True,
    )
    assert gateway.requests == [expected]


def test_no_speculation() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        assert galley("generate", "x", "--no-speculation", "--endpoint", address).exit_code == 0
        assert galley("generate", "x", "--no-speculation", "--k=2", "--endpoint", address).exit_code == 2
    (request,) = gateway.requests
    assert isinstance(request, pb.GenerateRequest)
    assert request.speculation.mode == pb.Speculation.MODE_OFF


def test_json_is_one_event_a_line() -> None:
    with serving(FakeGateway()) as address:
        result = galley("generate", "x", "--json", "--endpoint", address)
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


def test_origins_are_told_apart_without_colours() -> None:
    with serving(FakeGateway()) as address:
        result = galley("generate", "x", "--origins", "--endpoint", address)
    assert result.stdout == "Hello[, wor]ld!\n\n"
    assert "in brackets" in result.stderr


def test_a_refusal_is_one_line_with_status_and_field() -> None:
    error = InvalidField("sampling.top_p", "must be in (0, 1], is 2.0")
    with serving(FakeGateway(error=error)) as address:
        result = galley("generate", "x", "--top-p=2", "--endpoint", address)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error: INVALID_ARGUMENT: sampling.top_p: must be in (0, 1], is 2.0"
    )


def test_a_gateway_that_is_not_there_is_one_line() -> None:
    result = galley("generate", "x", "--endpoint", "127.0.0.1:1", "--patience=0")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_wrong_flag_is_a_usage_error() -> None:
    assert galley("generate", "x", "--k=-1").exit_code == 2
    assert galley("generate").exit_code == 2


def test_a_gateway_that_goes_away_is_not_to_be_seen() -> None:
    leaving, staying = FakeGateway(error=Unavailable("draining"), fail_at=2), FakeGateway()
    with serving(leaving) as first, serving(staying) as second:
        result = galley("generate", "x", GALLEY_ENDPOINT=f"{first},{second}")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world!\n"
    assert "error" not in result.stderr
    (request,) = staying.requests
    assert isinstance(request, pb.ResumeRequest)
    assert (request.session_id, request.next_index) == (SESSION, 3)


def test_a_stream_that_breaks_says_how_to_go_on_and_resume_does() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=2)
    with serving(gateway) as address:
        broken = galley("generate", "x", "--endpoint", address, "--patience=0")
        assert broken.exit_code == 1
        assert broken.stdout == "Hello, wor"
        assert f"to go on: galley resume {SESSION} --next-index 3" in broken.stderr
        assert "error: UNAVAILABLE: draining" in broken.stderr
        gateway.error = None
        resumed = galley("resume", SESSION, "--next-index", "3", "--endpoint", address)
    assert resumed.exit_code == 0
    assert resumed.stdout == "ld!\n"


def test_resume_of_an_unknown_session() -> None:
    with serving(FakeGateway(error=UnknownSession("nobody"))) as address:
        result = galley("resume", "nobody", "--endpoint", address)
    assert result.exit_code == 1
    assert "error: NOT_FOUND: session_id: no session 'nobody'" in result.stderr


def test_chat_remembers_the_conversation_until_it_is_reset() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = galley(
            "chat",
            "--system=Be brief.",
            "--endpoint",
            address,
            stdin="one\ntwo\n\n/reset\nthree\n/quit\nunread\n",
        )
    assert result.exit_code == 0
    turns = []
    for request in gateway.requests:
        assert isinstance(request, pb.GenerateRequest)
        turns.append([(turn.role, turn.content) for turn in request.messages.messages])
    system = ("system", "Be brief.")
    assert turns == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "Hello, world!\n"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_chat_goes_on_after_an_error_and_ends_with_its_input() -> None:
    gateway = FakeGateway(error=Unavailable("draining"))
    with serving(gateway) as address:
        result = galley("chat", "--endpoint", address, "--patience=0", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: UNAVAILABLE: draining") == 2
    second = gateway.requests[1]
    assert isinstance(second, pb.GenerateRequest)
    assert [turn.content for turn in second.messages.messages] == ["two"]


def test_ctrl_c_stops_an_answer_and_says_how_to_go_on() -> None:
    gateway = FakeGateway(script=(Said((1,), "first\n"), Said((2,), "never")), hang=True, fail_at=1)
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
            assert f"to go on: galley resume {SESSION} --next-index 1" in process.stderr.read()
        assert gateway.cancelled.wait(10)


def test_a_terminal_is_not_sent_control_characters() -> None:
    assert printable("a\tb\n\x1b[2Jc\x9b") == "a\tb\n\N{REPLACEMENT CHARACTER}[2Jc\N{REPLACEMENT CHARACTER}"


def test_version_and_help() -> None:
    assert galley("version").stdout == f"{__version__}\n"
    text = galley("--help").stdout
    for command in ("demo", "up", "generate", "chat", "resume", "plan", "gateway", "draft", "target"):
        assert command in text


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys, galley.cli.__main__\n"
        "slow = {'torch', 'grpc', 'matplotlib', 'redis', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(' '.join(slow) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_endpoint_is_not_taken_from_a_directory_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "galley").mkdir()
    (tmp_path / "galley").chmod(0o777)
    result = galley("generate", "x")
    assert result.exit_code == 1
    assert "only its owner can write" in result.stderr


def test_an_endpoint_of_a_stack_that_died_is_not_used() -> None:
    path = endpoint.announce("127.0.0.1:1")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    path.write_text(json.dumps({"address": "127.0.0.1:1", "pid": process.pid}), encoding="utf-8")
    with pytest.raises(endpoint.NoEndpoint):
        endpoint.find_endpoint(None)
    path.write_text("nonsense", encoding="utf-8")
    with pytest.raises(endpoint.NoEndpoint):
        endpoint.find_endpoint(None)


def test_a_later_stack_keeps_its_announcement() -> None:
    path = endpoint.announce("127.0.0.1:1")
    path.write_text(json.dumps({"address": "127.0.0.1:2", "pid": os.getppid()}), encoding="utf-8")
    endpoint.withdraw(path)
    assert endpoint.find_endpoint(None) == "127.0.0.1:2"


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
    told = galley("top", "--once", "--interval", "0", GALLEY_TOP_REDIS_URL=url)
    assert "--interval" in told.stderr, "it was another flag that was wrong"
