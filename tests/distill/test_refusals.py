"""Bad input is refused before any work, and the option that is at fault is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from services.cli.distill import distill
from services.core.errors import InvalidField
from services.distill.corpus import Corpus, read_corpus, write_corpus
from services.distill.distil import distil
from services.distill.material import gather
from services.distill.options import Options
from tests.distill.collected import Collected


@pytest.fixture
def options(tmp_path: Path, target_dir: Path, prompts: Path) -> Options:
    return Options(target=target_dir, out=tmp_path / "draft", work=tmp_path / "work", prompts=(prompts,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", 3),
        ("head", 0),
        ("tokens", 0),
        ("hardness", 1.5),
        ("scored", -0.1),
        ("held_out_share", 0.0),
        ("rate", 0.0),
        ("temperature", 0.0),
        ("dtype", "float16"),
        ("held_out", Path("there.npz")),
        ("prompts", ()),
        ("corpus", (Path("there.npz"),)),
        ("target", Path("nowhere")),
        ("against", Path("nowhere")),
    ],
)
def test_an_option_out_of_its_bounds(options: Options, field: str, value: Any) -> None:
    short = replace(options, answer=2, tokens=10, scored=0.0, dtype="float32")
    named = "prompts" if field == "corpus" else field
    with pytest.raises(InvalidField) as refused:
        distil(replace(short, **{field: value}), Collected())
    assert refused.value.field == named
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "no JSON object"),
        ("{}", "prompt must be text"),
        ('{"prompt": 3}', "prompt must be text"),
        ('{"messages": [{"role": "user"}]}', "messages a list"),
        ('{"prompt": "w4", "workload": 1}', "workload must be a name"),
    ],
)
def test_a_line_that_is_no_prompt(options: Options, tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "w5"}) + "\n" + line + "\n")
    options.work.mkdir()
    with pytest.raises(InvalidField, match=rf"prompts: .*log\.jsonl:2.*{said}"):
        gather(replace(options, prompts=(path,), dtype="float32"), Collected())


def corpus() -> Corpus:
    return Corpus(
        ids=np.arange(10),
        offsets=np.array([0, 4, 10]),
        prompt_len=np.array([2, 3]),
        workload=np.array([0, 0]),
        workload_names=("a",),
        temperature=np.zeros(2, np.float32),
    )


def test_a_corpus_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(corpus(), path)
    read = read_corpus(path)
    assert [read.tokens(i).tolist() for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert read.answers().tolist() == [2, 3, 7, 8, 9]
    assert read.answer_offsets.tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"offsets": np.array([0, 4, 9])}, "offsets do not cover"),
        ({"prompt_len": np.array([2, 6])}, "is empty"),
        ({"prompt_len": np.array([2])}, "different lengths"),
        ({"workload": np.array([0, 1])}, "not in workload_names"),
    ],
)
def test_a_corpus_whose_arrays_do_not_fit(tmp_path: Path, broken: dict[str, Any], said: str) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(replace(corpus(), **broken), path)
    with pytest.raises(InvalidField, match=f"corpus: .*{said}"):
        read_corpus(path)


def test_a_corpus_of_another_vocabulary(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(replace(corpus(), ids=np.arange(10) + 1000), path)
    with pytest.raises(InvalidField, match="corpus: a token is not in the target's vocabulary of 128"):
        distil(replace(options, prompts=(), corpus=(path,)), Collected())


def test_a_run_is_not_taken_up_with_other_options(options: Options) -> None:
    short = replace(
        options,
        head=100,
        layers=1,
        tokens=64,
        batch=64,
        answer=4,
        scored=0.0,
        dtype="float32",
        checkpoint_s=0.0,
    )
    distil(short, Collected())
    with pytest.raises(InvalidField, match=r"work: .* rate was 0\.001"):
        distil(replace(short, rate=0.01), Collected())


def test_the_command_names_the_flag(target_dir: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(distill)
    arguments = [
        str(tmp_path / "draft"),
        "--target",
        str(target_dir),
        "--self-prompts",
        "4",
        "--hardness",
        "2",
    ]
    refused = CliRunner().invoke(app, arguments, env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert "--hardness" in refused.output
    assert not (tmp_path / "draft").exists()


def test_the_command_writes_a_draft_and_a_plot_from_prompts_that_the_target_makes_up(
    target_dir: Path, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(distill)
    given = {
        "target": target_dir, "self-prompts": 12, "head": 100, "layers": 1, "tokens": 300, "batch": 128,
        "answer": 8, "evaluate-every": 100, "dtype": "float32", "plot": tmp_path / "course.png",
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    made = CliRunner().invoke(app, [str(tmp_path / "draft"), *flags])
    assert made.exit_code == 0, made.output
    assert "accepted of greedy guesses after" in made.output
    assert (tmp_path / "draft" / "model.safetensors").exists()
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")
