"""A trained draft's directory: what of it is served, what is refused, and what its reduced head says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from galley.common.models.files import tokenizer_hash
from galley.core.errors import Unavailable, UnsupportedModel
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepChunk
from galley.engine.cpu import int8, packing
from galley.engine.cpu.int8 import Int8Linear, int8_product
from galley.engine.cpu.kernels.int8 import AVX2, GROUP, VNNI, Instructions
from galley.engine.cpu.packing import MIN_ROWS, Linears
from galley.engine.cpu.trials import Trials
from galley.engine.load import draft_directory
from galley.engine.load.draft_directory import embeddings_sha256
from galley.engine.model import Rows, load_model
from galley.engine.sampler import draw_all
from tests.fakes.failing_file import FAILING
from tests.fakes.feature_drafts import save_feature_draft
from tests.fakes.model_configs import VOCAB, load, save_random, tokens_of, whole
from tests.integration.galley.engine.drafts import (
    HEAD_TOKENS,
    LAYERS,
    Draft,
    draft_of,
    load_draft,
    save_target,
)

# VNNI's processors have AVX2 too.
RUNNABLE = {VNNI: [VNNI, AVX2], AVX2: [AVX2], None: []}[int8.instructions()]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def directory(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_of(target).save(tmp_path_factory.mktemp("draft") / "draft")


def reference(directory: Path, target: Path, tokens: list[int]) -> torch.Tensor:
    weights = load_file(directory / "model.safetensors")
    wide = {
        name: weight.float() * weights[f"{name}.scale"][:, None] if weight.dtype == torch.int8 else weight
        for name, weight in weights.items()
        if not name.endswith(".scale")
    }
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    heads = wide.pop("galley.head_tokens").long()
    head = torch.zeros(VOCAB, wide["lm_head.weight"].shape[1]).index_copy(0, heads, wide["lm_head.weight"])
    config = transformers.LlamaConfig.from_pretrained(directory)
    llama: Any = transformers.LlamaForCausalLM
    model = llama(config).eval()
    model.load_state_dict({"model.embed_tokens.weight": embedding} | wide | {"lm_head.weight": head})
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    outside = sorted(set(range(VOCAB)) - set(heads.tolist()))
    logits[:, outside] = -torch.inf
    return logits


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.02), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("by", [*RUNNABLE, None])
def test_a_draft_equals_the_reference_of_its_weights(
    directory: Path,
    target: Path,
    dtype: torch.dtype,
    tolerance: float,
    by: Instructions | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "instructions", lambda: by)
    model = load_draft(directory, target, dtype)
    tokens = tokens_of(random.Random(1), 50)
    ours, theirs = whole(model, tokens), reference(directory, target, tokens)
    assert ours.shape == (50, VOCAB)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    inside = sorted(HEAD_TOKENS)
    error = (ours - theirs)[:, inside].norm() / theirs[:, inside].norm()
    assert error < tolerance


def test_a_draft_of_float_weights_and_its_own_embeddings_needs_no_target(
    target: Path, tmp_path: Path
) -> None:
    directory = draft_of(target, own=True, int8=False).save(tmp_path / "draft")
    model = load_draft(directory, None)
    tokens = tokens_of(random.Random(2), 20)
    expected = reference(directory, target, tokens)
    assert torch.allclose(whole(model, tokens), expected, atol=1e-3, rtol=1e-3)


def test_a_draft_on_two_threads_reads_one_prompt_while_it_drafts_for_another(
    directory: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "choose", lambda _: 0)
    before = torch.get_num_threads()
    model = load_draft(directory, target, threads=2)
    size = BLOCK_TOKENS
    unfinished = StepChunk(0, tokens_of(random.Random(4), 60), range(-(-60 // size)), 0)
    drafting = StepChunk(0, tokens_of(random.Random(5), 40), range(100, 100 - (-40 // size)), 1)
    try:
        alone = model.run([drafting])
        together = model.run([unfinished, drafting])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


def test_a_drafts_facts_come_from_its_config(directory: Path, target: Path) -> None:
    model = load_draft(directory, target)
    assert model.info.vocab_size == VOCAB
    assert model.info.tokenizer_hash == tokenizer_hash(target)
    assert model.info.deterministic
    assert model.forward_kind == "own"
    assert model.kv.shape.layers == LAYERS


def test_a_draft_is_served_with_the_embeddings_of_the_target_named(directory: Path, target: Path) -> None:
    model = load_model(
        str(directory), dtype="float32", device="cpu", threads=1, kv_blocks=16, target_model=str(target)
    )
    tokens = tokens_of(random.Random(3), 9)
    assert torch.equal(whole(model, tokens), whole(load_draft(directory, target), tokens))


def test_a_draft_that_reads_states_has_their_projections(
    directory: Path, target: Path, tmp_path: Path
) -> None:
    reading = load_draft(save_feature_draft(directory, tmp_path / "draft", (1, 3)), target)
    plain, tokens = load_draft(directory, target), tokens_of(random.Random(5), 20)
    assert plain.features is None
    assert reading.features is not None
    assert (reading.features.layers, reading.features.size) == ((1, 3), 64)
    # Without states it is the plain draft.
    assert torch.equal(whole(reading, tokens), whole(plain, tokens))
    # As int8, the projections are those of float weights, but for the rounding of rows.
    floats = save_feature_draft(directory, tmp_path / "floats", (1, 3), int8=False)
    exact = load_draft(floats, target).features
    assert exact is not None
    states = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2))
    for ours, theirs in (
        (reading.features.from_target(states), exact.from_target(states)),
        (reading.features.from_own(states[:, 0]), exact.from_own(states[:, 0])),
    ):
        assert ours.shape == theirs.shape == (5, 64)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_only_tokens_of_the_head_are_drawn(directory: Path, target: Path) -> None:
    model = load_draft(directory, target)
    rng = random.Random(4)
    history = tokens_of(rng, 12)
    logits = model.forward([Rows(model.new_cache(), history, 1)])[0].expand(40, -1)
    draws = [
        Draw(SamplingParams(temperature=temperature, seed=seed), history, 12, frozenset(), 0)
        for temperature in (0.0, 5.0)
        for seed in range(20)
    ]
    drawn = draw_all(logits, draws)
    tokens = {token for outcome in drawn if isinstance(outcome, Sampled) for token in outcome.tokens}
    assert len(tokens) > 10
    assert tokens <= set(HEAD_TOKENS)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "packed"), (torch.bfloat16, "own")])
def test_an_int8_head_over_float_layers_keeps_rows_apart(
    target: Path, tmp_path: Path, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "kind", lambda dtype, device: kind)
    given, make = [], Linears.make

    def watched(linears: Linears, *layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        run = make(linears, *layer)

        def product(rows: torch.Tensor) -> torch.Tensor:
            given.append(len(rows))
            return run(rows)

        return product

    monkeypatch.setattr(Linears, "make", watched)
    draft = draft_of(target)
    for name in [name for name in draft.weights if name.endswith(".scale") and ".layers." in name]:
        weight = name.removesuffix(".scale")
        draft.weights[weight] = draft.weights[weight].float() * draft.weights.pop(name)[:, None]
    model = load_draft(draft.save(tmp_path / "draft"), target, dtype)
    assert model.info.deterministic
    tokens, cache = tokens_of(random.Random(6), 20), model.new_cache()
    one_by_one = [model.forward([Rows(cache, [token], 1)])[0] for token in tokens]
    assert torch.equal(torch.cat(one_by_one), whole(model, tokens))
    fewest = MIN_ROWS if kind == "packed" else 1
    assert min(given) == fewest, "oneDNN computes fewer rows by another kernel"


def test_a_step_without_logits_and_one_of_many_parts(directory: Path, target: Path) -> None:
    model = load_draft(directory, target)
    tokens = tokens_of(random.Random(5), 700)
    cache = model.new_cache()
    assert model.forward([Rows(cache, tokens, 0)])[0].shape == (0, VOCAB)
    cache.truncate(0)
    last = model.forward([Rows(cache, tokens, 600)])[0]
    assert torch.equal(last, whole(model, tokens)[100:])


SPOILT: dict[str, tuple[Callable[[Draft], object], str]] = {
    "another format": (lambda d: d.section.update(format=3), r"format must be 1 or 2, got 3"),
    "no format": (lambda d: d.config.update(galley_draft="yes"), r"format must be 1 or 2, got 'yes'"),
    "tied": (lambda d: d.config.update(tie_word_embeddings=True), "tie_word_embeddings false"),
    "another family": (lambda d: d.config.update(model_type="qwen2"), "must be a llama"),
    "no tokenizer": (lambda d: d.section.pop("tokenizer_hash"), "tokenizer_hash must be a hash"),
    "whose embeddings": (lambda d: d.section.update(embeddings="mine"), "embeddings must be"),
    "which embeddings": (lambda d: d.section.pop("embeddings_sha256"), "embeddings_sha256 must be a hash"),
    "other embeddings": (
        lambda d: d.section.update(embeddings_sha256="0" * 64),
        "must be the target of this draft",
    ),
    "a head too large": (
        lambda d: d.section.update(head_vocab=VOCAB + 1),
        r"head_vocab must be in \[1, 97\]",
    ),
    "a head of another size": (
        lambda d: d.section.update(head_vocab=5),
        r"must be int32 \[5\], got torch.int32",
    ),
    "a larger vocabulary": (lambda d: d.config.update(vocab_size=VOCAB + 1), r"must be \[98, 64\]"),
    "another shape": (lambda d: d.config.update(intermediate_size=64), r"the shape.*layers\.0\.mlp"),
    "a layer more": (lambda d: d.config.update(num_hidden_layers=3), r"missing.*layers\.2"),
    "no head": (
        lambda d: d.weights.pop("galley.head_tokens"),
        "galley.head_tokens: must be int32.*got nothing",
    ),
    "long tokens": (
        lambda d: d.weights.update({"galley.head_tokens": d.weights["galley.head_tokens"].long()}),
        r"must be int32 \[64\], got torch.int64",
    ),
    "falling tokens": (
        lambda d: d.weights.update({"galley.head_tokens": d.weights["galley.head_tokens"].flip(0)}),
        "must be strictly rising",
    ),
    "a token twice": (lambda d: d.weights["galley.head_tokens"][1:2].fill_(1), "must be strictly rising"),
    "a token beyond": (lambda d: d.weights["galley.head_tokens"][-1:].fill_(VOCAB), "got 1 to 97"),
    "a token before": (lambda d: d.weights["galley.head_tokens"][:1].fill_(-1), "got -1 to"),
    "no scale": (lambda d: d.weights.pop("lm_head.weight.scale"), "lm_head.weight: int8 weights must have"),
    "a scale too few": (
        lambda d: d.weights.update({"lm_head.weight.scale": torch.ones(63)}),
        "lm_head.weight: int8 weights must have",
    ),
    "a weight too many": (lambda d: d.weights.update(other=torch.ones(1)), "must not hold the weights other"),
    "a scale of nothing": (
        lambda d: d.weights.update({"model.norm.weight.scale": torch.ones(1)}),
        "must not hold the weights model.norm.weight.scale",
    ),
}


def with_layers(*layers: object) -> Callable[[Draft], object]:
    return lambda draft: draft.section.update(format=2, feature_layers=list(layers))


SPOILT |= {
    "no feature layers": (lambda d: d.section.update(format=2), "feature_layers must be 1 to 4.*got None"),
    "feature layers of text": (with_layers("1"), "feature_layers must be 1 to 4 rising"),
    "falling feature layers": (with_layers(3, 1), "feature_layers must be 1 to 4 rising"),
    "a feature layer twice": (with_layers(1, 1), "feature_layers must be 1 to 4 rising"),
    "feature layer 0": (with_layers(0, 1), "feature_layers must be 1 to 4 rising"),
    "too many feature layers": (with_layers(1, 2, 3, 4, 5), "feature_layers must be 1 to 4 rising"),
    "no projections": (with_layers(1), r"features\.weight, .*own\.weight"),
    "projections of a plain draft": (
        lambda d: d.weights.update({"own.weight": torch.ones(64, 64)}),
        r"must not hold the weights own\.weight",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_directory_that_does_not_fit_is_refused_by_name(name: str, target: Path, tmp_path: Path) -> None:
    change, reason = SPOILT[name]
    draft = draft_of(target)
    change(draft)
    with pytest.raises(UnsupportedModel, match=reason):
        load_draft(draft.save(tmp_path / "draft"), target)


def test_a_draft_without_its_target_is_refused(directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match="target_model: must be set"):
        load_draft(directory, None)
    with pytest.raises(UnsupportedModel, match="target_model: must be set"):
        load(directory)


def test_a_file_that_is_no_safetensors_is_refused(target: Path, tmp_path: Path) -> None:
    directory = draft_of(target).save(tmp_path / "draft")
    (directory / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load_draft(directory, target)


def test_a_damaged_target_is_refused(directory: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    (target / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: cannot be read"):
        load_draft(directory, target)


def test_weights_that_are_no_file_are_refused(directory: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    (target / "model.safetensors").mkdir()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: cannot be read: Is a directory"):
        load_draft(directory, target)


def test_a_disk_that_fails_is_no_fault_of_the_draft(directory: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    (target / "model.safetensors").symlink_to(FAILING)
    with pytest.raises(Unavailable, match=r"target/model\.safetensors: cannot be read: Input/output error"):
        load_draft(directory, target)


def test_weights_that_no_draft_has_are_refused_before_they_are_widened(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(target)
    draft.weights |= {"x": torch.zeros(8, 8, dtype=torch.int8), "x.scale": torch.ones(8)}

    def refuse(name: str, *_: object) -> None:
        raise AssertionError(f"{name} was widened")

    monkeypatch.setattr(draft_directory, "_scaled", refuse)
    with pytest.raises(UnsupportedModel, match="must not hold the weights x"):
        load_draft(draft.save(tmp_path / "draft"), target)


def test_a_target_without_embeddings_of_that_name_is_refused(directory: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=1, n_head=4)
    with pytest.raises(UnsupportedModel, match=r"must hold model\.embed_tokens\.weight"):
        load_draft(directory, save_random(config, tmp_path / "gpt2"))


def test_the_hash_is_of_float32_whatever_the_dtype() -> None:
    numbers = torch.randn(5000, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = sha256(numbers.float().numpy().astype("<f4").tobytes()).hexdigest()
    assert embeddings_sha256(numbers) == embeddings_sha256(numbers.float()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_product_is_that_of_its_parts_and_keeps_rows_apart(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    layers = [_int8_layer(outputs, 192, generator) for outputs in (64, 32)]
    product = int8_product(layers, dtype)
    assert (product is not None) == bool(RUNNABLE)
    if product is None:
        return
    rows = torch.randn(70, 192, generator=generator).to(dtype)
    rows[3] *= 1000
    rows[5] = 0
    together = product(rows)
    expected = torch.cat([rows.float() @ layer.weight.T for layer in layers], dim=1)
    error = (together.float() - expected).norm(dim=1)
    assert bool((error <= 0.02 * expected.norm(dim=1)).all())
    for first, last in ((0, 1), (3, 5), (5, 20), (60, 70)):
        assert torch.equal(product(rows[first:last].contiguous()), together[first:last])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so(bad: float) -> None:
    layer = _int8_layer(32, 192, torch.Generator().manual_seed(3))
    product = int8_product([layer], torch.float32) or layer
    rows = torch.ones(4, 192)
    rows[1, 70], rows[2, 0] = bad, bad
    out = product(rows)
    assert not bool(out[1:3].isfinite().any())
    assert bool(out[[0, 3]].isfinite().all())


def _int8_layer(outputs: int, inputs: int, generator: torch.Generator) -> Int8Linear:
    stored = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    scales = torch.rand(outputs, generator=generator) / 127
    return Int8Linear(stored.float() * scales[:, None], stored, scales)


def test_inputs_that_the_kernel_does_not_take_are_left_to_others() -> None:
    assert int8_product([_int8_layer(64, 96, torch.Generator())], torch.float32) is None


@pytest.mark.parametrize("by", RUNNABLE)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (48, 192), (97, 128)])
def test_all_instructions_give_the_bits_of_the_definition(
    outputs: int, inputs: int, by: Instructions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "instructions", lambda: by)
    generator = torch.Generator().manual_seed(4)
    layer = _int8_layer(outputs, inputs, generator)
    layer.bias = torch.nn.Parameter(torch.randn(outputs, generator=generator))
    rows = torch.randn(19, inputs, generator=generator)
    product = int8_product([layer], torch.float32)
    assert product is not None
    assert torch.equal(product(rows), _defined(rows, layer))


def _defined(rows: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
    """Return the product as docs/cpu-kernels.md defines it: float64 holds what a fused operation rounds."""
    weights, scales = layer.stored
    total = torch.zeros(len(rows), len(scales))
    for group in range(0, rows.shape[1], GROUP):
        part = rows[:, group : group + GROUP]
        largest = part.abs().amax(1, keepdim=True)
        numbers = (part * (127 / largest)).round().double()
        dots = numbers @ weights[:, group : group + GROUP].double().T
        total = (dots * (largest / 127).double() + total.double()).float()
    return total * scales + layer.bias.detach()


def test_extremes_of_int8_are_exact() -> None:
    stored = torch.full((32, 128), -128, dtype=torch.int8)
    stored[1::2] = 127
    layer = Int8Linear(stored.float(), stored, torch.ones(32))
    product = int8_product([layer], torch.float32) or layer
    rows = torch.stack((torch.full((128,), 127.0), torch.full((128,), -127.0)))
    assert torch.equal(product(rows).detach(), rows @ layer.weight.T.detach())
