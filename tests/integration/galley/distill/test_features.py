"""A draft that reads its target's states, from a tiny pair's prompts to its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from typer.testing import CliRunner

from galley.cli.distill import distill
from galley.core.errors import InvalidField
from galley.distill.data.corpus import Conversation, Corpus, batch_of, corpus_of, read_corpus
from galley.distill.export import read_draft
from galley.distill.features.collection import Collected, Collection, chosen, layers_of
from galley.distill.features.draft import FeatureDraft, TargetStates
from galley.distill.features.evaluation import Measured, guesses_of, measure
from galley.distill.features.run import distil_features
from galley.distill.features.training import known_places, unrolled_loss
from galley.distill.options import Options
from galley.distill.training.models import Llama, LlamaShape, read_target, rotation_of
from galley.distill.training.training import Schedule, Training
from galley.engine.model import CausalModel
from tests.integration.galley.distill.collected import Collected as Reported
from tests.integration.galley.distill.collected import Killed

_WORDS = 16
_SHAPE = LlamaShape(
    hidden=16, inner=32, heads=4, kv_heads=2, head_dim=4, layers=2, norm_eps=1e-5, rope_theta=100.0
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for threads that a busy machine does not run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, prompts: Path) -> Options:
    folder = tmp_path_factory.mktemp("features")
    return Options(
        target=target_dir,
        out=folder / "draft",
        work=folder / "work",
        prompts=(prompts,),
        layers=1,
        head=100,
        tokens=4_000,
        batch=512,
        answer=16,
        held_out_share=0.15,
        evaluate_every=1_000,
        rate=0.003,
        dtype="float32",
        features=True,
        collected=2_500,
    )


@pytest.fixture(scope="session")
def measured(options: Options) -> Measured:
    return distil_features(options, Reported())


def test_drafts_are_measured_with_the_states_and_without_at_the_same_places(measured: Measured) -> None:
    assert set(measured) == {"features", "lost"}
    for temperature in ("0", "0.7", "1"):
        known, lost = (measured[name][temperature]["all"] for name in ("features", "lost"))
        assert known.tokens == lost.tokens > 0
        assert known.by_depth != lost.by_depth
    assert set(measured["features"]["0.7"]) == {"a", "b", "all"}


class Foreseeing(Llama):
    """A target of random answers, whose state at each token names the two tokens after the next one."""

    def layer_states(self, tokens: Tensor, after: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        following = [torch.cat([tokens[:, ahead:], tokens[:, :ahead]], 1) for ahead in (1, 2, 3)]
        named = torch.cat([functional.one_hot(of_it, _WORDS).float() for of_it in following[1:]], 2)
        return [named for _ in after], functional.one_hot(following[0], 2 * _WORDS).float() * 20


def test_a_draft_learns_from_the_targets_states_and_carries_them_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(_WORDS, (120, 24)).numpy()
    corpus = corpus_of([Conversation(row, 4, "a", 0.0) for row in ids])
    shape = replace(_SHAPE, hidden=2 * _WORDS, head_dim=_WORDS // 2, layers=1)
    target = Foreseeing(shape, torch.randn(_WORDS, 2 * _WORDS), _WORDS)
    with torch.no_grad():
        target.lm_head.weight.copy_(torch.eye(2 * _WORDS)[:_WORDS])
    draft, heads = FeatureDraft(shape, target.embedding, _WORDS, (1,)), np.arange(_WORDS)
    learned = Collection(tmp_path, heads, (1,), with_outputs=True)
    learned.collect(corpus.part(np.arange(100)), target, lambda _: None)
    held = Collection(tmp_path / "held", heads, (1,), with_outputs=True)
    held.collect(corpus.part(np.arange(100, 120)), target, lambda _: None)
    with learned.read(corpus.part(np.arange(100))) as collected:
        training = Training(draft, Schedule(30_000, 512, 0.01))
        training.run(collected.corpus, unrolled_loss(draft, collected, 1, torch.float32), lambda _: None)
    with held.read(corpus.part(np.arange(100, 120))) as collected:
        guesses = {
            name: guesses_of(draft, heads, collected, torch.float32, known=known)
            for name, known in (("features", True), ("lost", False))
        }
        measured = measure(collected.corpus, collected.outputs(), target.lm_head.weight.detach(), guesses)
    known, lost = (measured[name]["0"]["all"].by_depth for name in ("features", "lost"))
    assert min(known[:2]) > 0.8
    assert max(lost) < 0.3
    assert known[2] < 0.3


@pytest.mark.usefixtures("measured")
def test_the_directory_says_what_the_draft_needs(options: Options) -> None:
    section = json.loads((options.out / "config.json").read_text())["galley_draft"]
    assert section["format"] == 2
    assert section["feature_layers"] == [1, 2]
    stored = load_file(options.out / "model.safetensors")
    assert stored["features.weight"].dtype == torch.int8
    assert stored["features.weight"].shape == (32, 64)
    record = json.loads((options.out / "training.json").read_text())
    assert record["answer_tokens_seen"] >= options.tokens
    assert "--features" in (options.out / "README.md").read_text()
    model = CausalModel.load(options.out, dtype=torch.float32, device="cpu", threads=1, target=options.target)
    assert model.features is not None
    assert (model.features.layers, model.features.size) == ((1, 2), 32)


@pytest.mark.parametrize("stage", ["features", "training"])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(
    options: Options, measured: Measured, tmp_path: Path, stage: str
) -> None:
    again = replace(options, out=tmp_path / "draft", work=tmp_path / "work", checkpoint_s=0.0)
    with pytest.raises(Killed):
        distil_features(again, Reported(kill_at=(stage, 0.4)))
    reported = Reported()
    assert distil_features(again, reported) == measured
    assert reported.first_of("training") > (512 if stage == "training" else 0)
    whole, resumed = (load_file(folder.out / "model.safetensors") for folder in (options, again))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.usefixtures("measured")
def test_training_goes_on_from_a_feature_draft_and_compares_with_it(options: Options, tmp_path: Path) -> None:
    further = replace(
        options, out=tmp_path / "draft", work=tmp_path / "work", start=options.out, against=options.out
    )
    corpus: dict[str, Any] = {
        "prompts": (),
        "corpus": (options.work / "train.npz",),
        "held_out": options.work / "heldout.npz",
    }
    result = distil_features(replace(further, **corpus, tokens=1_000, rate=1e-5), Reported())
    now, before = (result[name]["0"]["all"].by_depth[0] for name in ("features", "present"))
    assert now == pytest.approx(before, abs=0.05)


@pytest.mark.usefixtures("measured")
def test_damaged_shard_is_named(options: Options, tmp_path: Path) -> None:
    corpus = read_corpus(options.work / "train.npz")
    collection = Collection(tmp_path, np.arange(100), (1, 2))
    with pytest.raises(InvalidField, match=r"work: .*features-00000\.safetensors: cannot be read"):
        collection.read(corpus)


def test_the_command_prints_what_was_measured(target_dir: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(distill)
    given = {
        "target": target_dir, "self-prompts": 40, "held-out-share": 0.2, "head": 100, "layers": 1,
        "tokens": 200, "batch": 128, "answer": 8, "dtype": "float32",
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    made = CliRunner().invoke(app, [str(tmp_path / "draft"), "--features", *flags])
    assert made.exit_code == 0, made.output
    assert "lost" in made.output
    assert "nan" not in made.output
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_a_plot_is_refused_before_any_work(target_dir: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(distill)
    flags = [
        "--features",
        "--self-prompts",
        "200",
        "--target",
        str(target_dir),
        "--plot",
        str(tmp_path / "p.png"),
    ]
    refused = CliRunner().invoke(
        app, [str(tmp_path / "draft"), *flags], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert refused.exit_code == 2
    assert "--plot" in refused.output
    assert not (tmp_path / "draft.work").exists()


@pytest.fixture(scope="module")
def held(options: Options, measured: Measured) -> Iterator[tuple[Corpus, Collected]]:
    corpus = read_corpus(options.work / "heldout.npz")
    part = chosen(corpus, round(options.collected * 0.15), options.seed)
    heads = read_draft(options.out, read_target(options.target), "start")[1]
    with Collection(options.work / "held-features", heads, (1, 2), with_outputs=True).read(part) as collected:
        yield part, collected


def test_collected_states_are_the_targets(options: Options, held: tuple[Corpus, Collected]) -> None:
    corpus, collected = held
    batch = batch_of(corpus, np.arange(2))
    whole = read_target(options.target).whole(torch.float32)
    with torch.inference_mode():
        passed, final = whole.layer_states(batch.tokens, (1, 2))
    states, length = collected.states(batch), int(corpus.lengths[0]) - 1
    torch.testing.assert_close(states[0, :length, 1].float(), passed[1][0, :length], rtol=0.01, atol=0.01)
    torch.testing.assert_close(collected.outputs()[batch.places], final.flatten(0, 1)[batch.rows])
    labels = collected.labels(batch.places)
    logits = whole.lm_head(collected.outputs()[batch.places])
    torch.testing.assert_close(labels.log_probs(1).exp().sum(1) <= 1 + 1e-5, torch.ones(len(logits)) > 0)
    best = logits.argmax(1)
    heads = torch.from_numpy(read_draft(options.out, read_target(options.target), "start")[1])
    inside = labels.logits[:, 0] >= 0
    assert torch.equal(heads[labels.ids[:, 0]][inside], best[inside])


def _random_draft() -> FeatureDraft:
    torch.manual_seed(5)
    draft = FeatureDraft(_SHAPE, torch.randn(30, 16), 12, (1, 3)).requires_grad_(requires_grad=False)
    for projection in (draft.features, draft.own):
        projection.weight.normal_()
    return draft


def _drafted(
    draft: FeatureDraft, tokens: list[int], states: Tensor, known: list[bool], confirmed: int
) -> Tensor:
    """Return the state at the last token as a service would: token by token, each with its keys kept."""
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in draft.layers]
    residual = torch.zeros(16)
    cosines, sines = rotation_of(_SHAPE, len(tokens))
    for place, token in enumerate(tokens):
        added = torch.zeros(16)
        if place >= confirmed:
            added = draft.own(rms_norm(residual, (16,), eps=1e-5) * draft.own_scale)
        elif place > 0 and known[place - 1]:
            added = draft.features(
                rms_norm(states[place - 1], (16,), eps=1e-5).flatten() * draft.features_scale
            )
        residual = draft.embedding[token] + added
        rotation = cosines[place : place + 1], sines[place : place + 1]
        for layer, pairs in zip(draft.layers, kept, strict=True):
            normed = layer.input_layernorm(residual)[None, None]
            queries, *pair = layer.self_attn.projected(normed, rotation)
            pairs.append((pair[0], pair[1]))
            keys, values = (torch.cat(parts, 2).repeat_interleave(2, 1) for parts in zip(*pairs, strict=True))
            mixed = scaled_dot_product_attention(queries, keys, values)
            residual = residual + layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(16))
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
    out: Tensor = draft.model.norm(residual)
    return out


def test_drafting_at_all_places_at_once_is_drafting_token_by_token() -> None:
    draft = _random_draft()
    tokens, states = torch.randint(30, (1, 9)), torch.randn(1, 9, 2, 16)
    known = torch.rand(1, 9) > 0.4
    outputs = draft.unrolled(tokens, torch.arange(9), TargetStates(states, known), 4)
    for depth, of_depth in enumerate(outputs):
        for last in range(depth, 9):
            confirmed = last + 1 - depth
            alone = _drafted(draft, tokens[0, : last + 1].tolist(), states[0], known[0].tolist(), confirmed)
            if confirmed > 0:
                torch.testing.assert_close(of_depth[last], alone, rtol=1e-4, atol=1e-4)


def test_a_new_feature_draft_is_the_draft_that_it_began_as(options: Options) -> None:
    target = read_target(options.target)
    plain = target.student(1, torch.arange(50))
    draft = FeatureDraft(plain.shape, plain.embedding, 50, layers_of(2))
    draft.load_state_dict(draft.state_dict() | plain.state_dict())
    tokens, rows = torch.arange(2, 12)[None], torch.arange(10)
    given = TargetStates(torch.randn(1, 10, 2, 32), torch.ones(1, 10, dtype=torch.bool))
    draft.level(given.states[0])
    torch.testing.assert_close(draft.unrolled(tokens, rows, given, 1)[0], plain.states(tokens, rows))


def test_states_are_dropped_by_the_seed_alone() -> None:
    tokens = torch.zeros(200, 40, dtype=torch.int64)
    known, same = (known_places(tokens, np.random.default_rng([1, 7])) for _ in range(2))
    assert torch.equal(known, same)
    shares = known.float().mean(1)
    assert 0.5 < float((shares == 1).float().mean()) < 0.75
    assert float((shares == 0).float().mean()) > 0.04
