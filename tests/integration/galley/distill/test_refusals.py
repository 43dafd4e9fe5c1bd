"""Bad input is refused before any work, and the option that is at fault is named."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from galley.cli.distill import distill
from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.distill.data.corpus import Corpus, read_corpus, write_corpus
from galley.distill.data.material import gather, read_prompts
from galley.distill.options import Options
from galley.distill.run import distil
from tests.integration.galley.distill.collected import Collected, Killed


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
    ("line", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "prompt must be text"),
        ('{"prompt": 3}', "prompt must be text"),
        ('{"messages": [{"role": "user"}]}', "messages a list"),
        ('{"prompt": "w4", "workload": 1}', "workload must be a name"),
    ],
)
def test_a_line_that_is_no_prompt(options: Options, tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "w5"}) + "\n" + line + "\n")
    options.work.mkdir()
    with pytest.raises(InvalidField, match=rf"prompts: .*log\.jsonl:2.*{problem}"):
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
    ("broken", "problem"),
    [
        ({"offsets": np.array([0, 4, 9])}, "offsets must cover"),
        ({"prompt_len": np.array([2, 6])}, "must not be empty"),
        ({"prompt_len": np.array([2])}, "must have 1 entries"),
        ({"workload": np.array([0, 1])}, "must hold indices into workload_names"),
    ],
)
def test_a_corpus_whose_arrays_do_not_fit(tmp_path: Path, broken: dict[str, Any], problem: str) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(replace(corpus(), **broken), path)
    with pytest.raises(InvalidField, match=f"corpus: .*{problem}"):
        read_corpus(path)


def test_many_workloads_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, count = tmp_path / "corpus.npz", 300
    names = tuple(f"w{i:03}" for i in range(count))
    many = Corpus(
        np.arange(2 * count), np.arange(0, 2 * count + 1, 2), np.ones(count, np.int64), np.arange(count),
        names, np.zeros(count, np.float32),
    )  # fmt: skip
    write_corpus(many, path)
    assert read_corpus(path).workload.tolist() == list(range(count))


def _stored(**changed: Any) -> bytes:
    arrays = {name: np.array(getattr(corpus(), name)) for name in Corpus.__slots__}
    file = BytesIO()
    np.savez(file, **(arrays | changed))
    return file.getvalue()


def _plain() -> bytes:
    file = BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK", id="no zip"),
        pytest.param(_stored()[:400], id="torn"),
        pytest.param(_stored().replace(b"\x07\0\0\0", b"\xff\0\0\0", 1), id="a wrong checksum"),
        pytest.param(_plain(), id="one array"),
        pytest.param(_stored(ids=np.array(["x"] * 10)), id="words"),
        pytest.param(_stored(ids=np.linspace(0, 1, 10)), id="fractions"),
        pytest.param(_stored(prompt_len=np.int64(2)), id="a number"),
        pytest.param(_stored(offsets=np.array([[0, 4, 10]])), id="a table"),
        pytest.param(_stored(workload_names=np.array("a")), id="a name"),
        pytest.param(_stored(temperature=np.array([None, None])), id="objects"),
    ],
)
def test_a_file_that_is_no_corpus(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "corpus.npz"
    path.write_bytes(data)
    with pytest.raises(InvalidField, match=r"corpus: .*corpus\.npz"):
        read_corpus(path)


@settings(max_examples=60)
@given(at=st.integers(0, len(_stored()) - 1), bit=st.integers(0, 7))
def test_a_damaged_corpus_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    data = bytearray(_stored())
    data[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("damaged") / "corpus.npz"
    path.write_bytes(data)
    with suppress(InvalidField):
        read_corpus(path)


def test_a_prompt_may_hold_other_separators_of_lines(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    words = "\u2028".join(("w4", "w5"))
    path.write_text(json.dumps({"prompt": words}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert len(read_prompts([path], Tokenizer.load(str(options.target)))) == 1


def test_a_corpus_of_another_vocabulary(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    write_corpus(replace(corpus(), ids=np.arange(10) + 1000), path)
    with pytest.raises(InvalidField, match=r"corpus: tokens must be in \[0, 128\)"):
        distil(replace(options, prompts=(), corpus=(path,) * 70), Collected())  # as many prompts as it needs


SHORT: dict[str, Any] = {
    "head": 100, "layers": 1, "tokens": 64, "batch": 64, "answer": 4, "scored": 1.0, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, id=stage) for stage in ("answers", "labels", "training")]
)
def test_a_run_is_not_taken_up_with_other_options(options: Options, stage: str) -> None:
    short = replace(options, **SHORT)
    with pytest.raises(Killed):
        distil(short, Collected(kill_at=(stage, 0.2)))
    others: dict[str, Any] = {
        "rate": 0.01, "head": 40, "scored": 0.5, "answer": 6, "temperature": 3.0, "seed": 2,
        "self_prompts": 3,
    }  # fmt: skip
    for name, value in others.items():
        collected = Collected()
        with pytest.raises(InvalidField, match=rf"work: .* {name} = {SHORT.get(name, '')}"):
            distil(replace(short, **{name: value}), collected)
        assert collected.reports == [], "nothing was done"
    distil(replace(short, threads=2, evaluate_every=32), Collected())


def test_a_run_is_not_taken_up_with_other_contents_of_its_files(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(options.prompts[0].read_bytes())
    short = replace(options, **SHORT, prompts=(path,))
    with pytest.raises(Killed):
        distil(short, Collected(kill_at=("answers", 0.2)))
    path.write_text(json.dumps({"prompt": "w9"}) + "\n" + json.dumps({"prompt": "w8"}) + "\n")
    with pytest.raises(InvalidField, match=r"work: .* prompts_sha256 ="):
        distil(short, Collected())


def test_results_of_an_unknown_run_are_not_taken(options: Options) -> None:
    options.work.mkdir()
    write_corpus(corpus(), options.work / "train.npz")
    with pytest.raises(InvalidField, match=r"work: .*: must record a run: .*; choose another"):
        distil(replace(options, **SHORT), Collected())


def test_a_run_that_was_refused_for_its_prompts_may_begin_again(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{\n")
    short = replace(options, **SHORT, prompts=(path,))
    with pytest.raises(InvalidField, match=r"prompts: .*must be JSON"):
        distil(short, Collected())
    path.write_bytes(options.prompts[0].read_bytes())
    assert distil(short, Collected()).acceptance["all"].tokens > 0


@pytest.mark.parametrize(
    ("prompts", "share", "least"), [(133, 0.03, 134), (7, 0.5, 8)], ids=["by default", "of the largest share"]
)
def test_too_few_prompts_are_refused_with_their_number_and_the_bound(
    options: Options, tmp_path: Path, prompts: int, share: float, least: int
) -> None:
    path, collected = tmp_path / "few.jsonl", Collected()
    path.write_text(
        "".join(json.dumps({"prompt": f"w{4 + i % 60} w{4 + i // 60}"}) + "\n" for i in range(prompts))
    )
    with pytest.raises(InvalidField) as refused:
        distil(replace(options, **SHORT, prompts=(path,), held_out_share=share), collected)
    assert refused.value.field == "prompts"
    assert refused.value.problem == (
        f"must have at least {least} prompts, 4 of them held out (--held-out-share {share:g}), got {prompts}"
    )
    assert collected.reports == []


def test_prompts_that_the_target_makes_count_as_they_are_asked_for(options: Options) -> None:
    few = replace(options, **SHORT, prompts=(), self_prompts=100)
    with pytest.raises(InvalidField, match=r"at least 134 prompts, 4 of them held out .*, got 100"):
        distil(few, Collected())


def test_a_corpus_to_measure_on_needs_a_greedy_answer(options: Options, tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.npz", tmp_path / "held.npz"
    write_corpus(corpus(), train)
    write_corpus(replace(corpus(), temperature=np.full(2, 0.8, np.float32)), held_out)
    sampled = replace(options, **SHORT, prompts=(), corpus=(train,), held_out=held_out)
    with pytest.raises(InvalidField, match=r"held_out: must have a greedy answer .*, got 2 sampled ones"):
        distil(sampled, Collected())
    few = replace(options, **SHORT, prompts=(), corpus=(train,))
    with pytest.raises(InvalidField, match=r"corpus: must have at least 134 prompts, .*, got 2"):
        distil(few, Collected())


@pytest.mark.parametrize(("field", "value"), [("layers", 3), ("against", Path("nowhere"))])
def test_mismatched_draft_is_refused_before_any_work(options: Options, field: str, value: Any) -> None:
    collected = Collected()
    with pytest.raises(InvalidField) as refused:
        distil(replace(options, **{**SHORT, field: value}), collected)
    assert refused.value.field == field
    assert collected.reports == []
    assert not options.work.exists()


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


def test_command_writes_a_draft_and_a_plot(target_dir: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(distill)
    given = {
        "target": target_dir, "self-prompts": 40, "held-out-share": 0.2, "head": 100, "layers": 1,
        "tokens": 300, "batch": 128,
        "answer": 8, "evaluate-every": 100, "dtype": "float32", "plot": tmp_path / "course.png",
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    made = CliRunner().invoke(app, [str(tmp_path / "draft"), *flags])
    assert made.exit_code == 0, made.output
    assert "greedy acceptance after" in made.output
    assert "nan" not in made.output
    assert made.output.splitlines()[-1] == (
        f"next: galley bench --quick --model {target_dir} --draft-model {tmp_path / 'draft'}"
    )
    assert (tmp_path / "draft" / "model.safetensors").exists()
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")
