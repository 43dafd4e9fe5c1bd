"""`galley bench` as an operator meets it: through the command line, against a gateway on real gRPC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galley.bench.workloads import FIXED_SETS
from galley.cli.app import app
from galley.client.errors import GalleyRpcError
from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import FakeGateway, serving

SHORT = ["--workloads=chat", "--concurrency=1,2", "--prompts-per-workload=1", "--repeats=2", "--max-tokens=4"]


def run(*arguments: str) -> Result:
    terminal = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["bench", *arguments], env=terminal)


def requests_of(gateway: FakeGateway) -> list[pb.GenerateRequest]:
    return [request for request in gateway.requests if isinstance(request, pb.GenerateRequest)]


def test_all_offered_strategies_are_measured(tmp_path: Path) -> None:
    gateway = FakeGateway()
    plot = tmp_path / "bench.png"
    with serving(gateway) as address:
        result = run("--endpoint", address, *SHORT, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    modes = {(request.speculation.mode, request.speculation.strategy) for request in requests_of(gateway)}
    fixed = pb.Speculation.MODE_FIXED
    assert modes == {(pb.Speculation.MODE_OFF, ""), (pb.Speculation.MODE_AUTO, ""), (fixed, "ngram")}
    *_, conclusion, drawn = result.output.splitlines()
    assert "for tiny and its draft" in conclusion
    assert drawn == f"Plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_chains_and_trees_of_a_strategy_are_measured() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = run("--endpoint", address, *SHORT, "--strategies=ngram", "--k=2,4", "--width=1,2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["asked"]["arms"] == [
        "off",
        "ngram-2",
        "ngram-2x2",
        "ngram-4",
        "ngram-4x2",
    ]
    sent = {(request.speculation.k, request.speculation.width) for request in requests_of(gateway)}
    assert sent == {(0, 0), (2, 0), (2, 2), (4, 0), (4, 2)}


def test_repeated_run_uses_new_labels_and_prompts() -> None:
    gateway = FakeGateway()
    calls = []
    with serving(gateway) as address:
        for _ in range(2):
            gateway.requests.clear()
            assert run("--endpoint", address, *SHORT, "--strategies=auto").exit_code == 0
            requests = requests_of(gateway)
            calls.append(({r.workload for r in requests}, {r.messages.SerializeToString() for r in requests}))
    (labels, prompts), (labels_again, prompts_again) = calls
    assert not labels & labels_again
    assert not prompts & prompts_again


def test_json_is_one_object_and_nothing_else_on_standard_output() -> None:
    with serving(FakeGateway()) as address:
        result = run("--endpoint", address, *SHORT, "--strategies=auto", "--temperature=0,0.7", "--json")
    assert result.exit_code == 0, result.output
    actual = json.loads(result.stdout)
    assert actual["asked"]["arms"] == ["off", "auto"]
    assert list(actual["asked"]["prompt_sha256"]) == ["chat"]
    cells = [(row["streams"], row["temperature"], row["arm"]) for row in actual["rows"]]
    assert sorted(cells) == sorted((n, t, arm) for n in (1, 2) for t in (0.0, 0.7) for arm in ("off", "auto"))
    assert all(row["speculation"]["verified"] for row in actual["rows"])
    assert {row["streams"] for row in actual["rows"]} == {1, 2}
    assert actual["conclusion"]


def test_the_user_s_own_prompts_are_asked(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("Where is the harbour?\n", encoding="utf-8")
    gateway = FakeGateway()
    with serving(gateway) as address:
        result = run(
            "--endpoint", address, f"--prompts={mine}", "--concurrency=1", "--repeats=1", "--strategies=off"
        )
    assert result.exit_code == 0, result.output
    texts = {request.messages.messages[0].content.partition(" ")[2] for request in requests_of(gateway)}
    assert texts == {"Where is the harbour?"}
    assert all(request.workload.startswith("mine/") for request in requests_of(gateway))


def test_a_question_list_is_asked_by_category_with_the_answers_before_each_turn(tmp_path: Path) -> None:
    questions = tmp_path / "question.jsonl"
    questions.write_text(
        '{"question_id": 1, "category": "qa", "turns": ["Where is the harbour?", "And the station?"]}\n'
        '{"question_id": 2, "category": "math", "turns": ["What is two and two?"]}\n',
        encoding="utf-8",
    )
    gateway = FakeGateway()
    flags = ["--concurrency=1", "--repeats=1", "--strategies=off", "--prompts-per-workload=1"]
    with serving(gateway) as address:
        result = run("--endpoint", address, f"--prompts={questions}", "--by-category", *flags)
    assert result.exit_code == 0, result.output
    conversations = [
        (
            request.workload.partition("/")[0],
            [(turn.role, turn.content) for turn in request.messages.messages],
        )
        for request in requests_of(gateway)
    ]
    assert {workload for workload, _ in conversations} == {"question.qa", "question.math"}
    longest = max((turns for _, turns in conversations), key=len)
    assert [role for role, _ in longest] == ["user", "assistant", "user"]
    assert longest[1][1], "the answer to the first turn"
    assert longest[2][1] == "And the station?"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--workloads=poems"], f"must be one of {', '.join(FIXED_SETS)}, got 'poems'"),
        (["--concurrency=0"], "must be numbers >= 1"),
        (["--concurrency=x"], "must be numbers >= 1"),
        (["--temperature=nan"], "must be numbers >= 0"),
        (["--k="], "must be numbers >= 1"),
        (["--prompts=/no/such/file"], "cannot read /no/such/file"),
        (["--plot=/no/such/folder/x.png"], "must be in a directory that exists"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_started(arguments: list[str], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())


def test_a_strategy_that_is_not_offered_is_named_with_those_that_are() -> None:
    with serving(FakeGateway()) as address:
        result = run("--endpoint", address, *SHORT, "--strategies=off,hybrid")
    assert result.exit_code == 1
    assert "strategy: must be one of off, auto, ngram here, got hybrid" in result.stderr


def test_a_gateway_that_refuses_is_a_line_and_no_traceback() -> None:
    with serving(FakeGateway(error=InvalidField("max_tokens", "is too many"), fail_at=0)) as address:
        result = run("--endpoint", address, *SHORT)
    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr
    assert "is too many" in result.stderr
    assert "Traceback" not in result.output


def test_an_answer_that_fails_ends_the_run() -> None:
    with serving(FakeGateway(error=InvalidField("max_tokens", "is too many"), fail_at=1)) as address:
        result = run("--endpoint", address, *SHORT)
    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr
    assert "is too many" in result.stderr
    assert not isinstance(result.exception, GalleyRpcError)
