"""A tiny pair, distilled from prompts to draft directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from galley.common.models.files import DRAFT_SECTION, tokenizer_hash
from galley.core.errors import InvalidField
from galley.distill.data.corpus import read_corpus
from galley.distill.export import SHARPENING, begin_from, read_draft, write_draft
from galley.distill.options import Options
from galley.distill.run import Distilled, distil
from galley.distill.training.models import read_target
from galley.distill.training.training import head_tokens
from galley.engine.batch import Rows
from galley.engine.load.draft_directory import HEAD_TOKENS, SCALE
from galley.engine.model import CausalModel
from tests.fakes.tiny_model import VOCAB
from tests.integration.galley.distill.collected import Collected, Killed


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, prompts: Path) -> Options:
    folder = tmp_path_factory.mktemp("distilled")
    return Options(
        target=target_dir,
        out=folder / "draft",
        work=folder / "work",
        prompts=(prompts,),
        layers=1,
        head=100,
        tokens=32_000,
        batch=512,
        answer=24,
        held_out_share=0.15,
        evaluate_every=8_000,
        scored=1.0,
        rate=0.003,
        dtype="float32",
    )


@pytest.fixture(scope="session")
def distilled(options: Options) -> Distilled:
    return distil(options, Collected())


def test_the_draft_agrees_with_its_target_more_than_an_untrained_one(
    options: Options, distilled: Distilled, tmp_path: Path
) -> None:
    target = read_target(options.target)
    heads = read_draft(options.out, target, "start")[1]
    write_draft(tmp_path, target.student(1, torch.from_numpy(heads)), target, heads, options.target)
    compared = distil(replace(options, against=tmp_path), Collected())
    assert compared.acceptance == distilled.acceptance
    assert compared.against is not None
    for name, trained in compared.acceptance.items():
        assert trained.greedy > compared.against[name].greedy
        assert trained.sampled > compared.against[name].sampled
        assert trained.accepted_per_round > compared.against[name].accepted_per_round
    assert compared.acceptance["all"].greedy > compared.against["all"].greedy + 0.05


def test_every_workload_is_measured_as_training_goes(distilled: Distilled) -> None:
    assert set(distilled.acceptance) == {"a", "b", "all"}
    assert (
        distilled.acceptance["a"].tokens + distilled.acceptance["b"].tokens
        == distilled.acceptance["all"].tokens
    )
    assert [point["seen"] // 8_000 for point in distilled.curve] == [1, 2, 3, 4]


@pytest.mark.usefixtures("distilled")
def test_the_engine_loads_what_was_written(options: Options) -> None:
    config = json.loads((options.out / "config.json").read_text())
    stored = load_file(options.out / "model.safetensors")
    heads = stored[HEAD_TOKENS]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == VOCAB
    assert config[DRAFT_SECTION]["tokenizer_hash"] == tokenizer_hash(options.target)
    assert config[DRAFT_SECTION]["head_vocab"] == len(heads) == 100
    assert heads.dtype == torch.int32
    assert bool((heads.diff() > 0).all())
    assert stored["lm_head.weight"].dtype == torch.int8
    assert stored["lm_head.weight" + SCALE].shape == (100,)
    assert "model.embed_tokens.weight" not in stored
    loaded = CausalModel.load(
        options.out, dtype=torch.float32, device="cpu", threads=1, target=options.target
    )
    assert loaded.info.vocab_size == VOCAB
    tokens = [3, 70, 12, 9, 55]
    theirs = loaded.forward([Rows(loaded.new_cache(), tokens, len(tokens))])[0]  # [rows, vocab]
    draft, heads_read = read_draft(options.out, read_target(options.target), "start")
    with torch.inference_mode():
        ours = draft.lm_head(draft.states(torch.tensor([tokens]), torch.arange(len(tokens))))
    # The engine rounds the inputs of a product to int8 as well.
    assert float((theirs[:, torch.from_numpy(heads_read)] - ours).norm() / ours.norm()) < 0.03
    assert bool(theirs[:, sorted({*range(VOCAB)} - {*heads.tolist()})].isneginf().all())


@pytest.mark.usefixtures("distilled")
def test_the_readme_says_how_it_was_made(options: Options) -> None:
    readme = (options.out / "README.md").read_text()
    assert "galley distill DIR --target" in readme
    assert "--scored 1.0" in readme
    assert str(options.target) not in readme
    record = json.loads((options.out / "training.json").read_text())
    assert record["answer_tokens_seen"] >= options.tokens
    assert record["options"]["seed"] == options.seed


@pytest.mark.usefixtures("distilled")
@pytest.mark.parametrize("stage", ["answers", "labels", "training"])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(
    options: Options, tmp_path: Path, stage: str
) -> None:
    again = replace(options, out=tmp_path / "draft", work=tmp_path / "work", checkpoint_s=0.0)
    with pytest.raises(Killed):
        distil(again, Collected(kill_at=(stage, 0.4)))
    store = again.work / "answers.jsonl"
    with store.open("a") as file:
        file.write('{"place": 3, "dig')
    with (again.work / "curve.jsonl").open("a") as file:
        file.write('{"seen": 2, "acc')
    collected = Collected()
    result = distil(again, collected)
    assert [point["seen"] // 8_000 for point in result.curve] == [1, 2, 3, 4]
    assert collected.first_of(stage) > 0
    whole, resumed = (load_file(folder.out / "model.safetensors") for folder in (options, again))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.usefixtures("distilled")
def test_a_corpus_does_in_place_of_prompts(options: Options, tmp_path: Path) -> None:
    corpus = options.work / "train.npz"
    short = replace(
        options, out=tmp_path / "draft", work=tmp_path / "work", prompts=(), corpus=(corpus,), tokens=600
    )
    result = distil(short, Collected()).acceptance
    assert result["all"].tokens > 0
    held_out = replace(short, work=tmp_path / "other", held_out=options.work / "heldout.npz")
    assert distil(held_out, Collected()).acceptance["all"].tokens != result["all"].tokens


@pytest.mark.usefixtures("distilled")
def test_the_head_is_the_most_frequent_tokens(options: Options) -> None:

    corpus = read_corpus(options.work / "train.npz")
    heads = head_tokens(corpus, VOCAB, 10, always=(1,))
    counts = np.bincount(corpus.answers(), minlength=VOCAB)
    others = np.delete(counts, heads)
    assert 1 in heads
    assert others.max() <= counts[[token for token in heads if token != 1]].min()


def test_training_goes_on_from_a_draft_with_a_layer_more(options: Options, distilled: Distilled) -> None:
    folder = options.out.parent
    grown = replace(options, start=options.out, layers=2, tokens=6_000, rate=0.001, out=folder / "grown")
    result = distil(replace(grown, work=folder / "grown.work"), Collected()).acceptance["all"]
    assert result.greedy >= distilled.acceptance["all"].greedy
    assert json.loads((grown.out / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_layer_more_changes_nothing_at_first(options: Options, distilled: Distilled) -> None:
    target = read_target(options.target)
    draft, heads = read_draft(options.out, target, "start")
    student = target.student(2, torch.from_numpy(heads))
    begin_from(student, draft)
    tokens, rows = torch.arange(2, 12)[None], torch.arange(10)
    states, same = student.states(tokens, rows), draft.states(tokens, rows)
    torch.testing.assert_close(states * SHARPENING, same)
    with pytest.raises(InvalidField, match="start"):
        begin_from(target.student(1, torch.from_numpy(heads)), student)
