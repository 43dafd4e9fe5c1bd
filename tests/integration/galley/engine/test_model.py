from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from galley.core.errors import Broken
from galley.engine.cpu import packing
from galley.engine.fingerprint import Build, build_of, hash_build
from galley.engine.model import MAX_ROWS, CausalModel, Rows
from tests.fakes.model_configs import CONFIGS, SMALL, VOCAB, load, tokens_of, whole
from tests.fakes.truncated_model import truncate_model


@torch.inference_mode()
def eager(directory: Path, tokens: list[int]) -> torch.Tensor:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_family_equals_its_own_eager_attention(kind: str, make_model: Callable[[Any], Path]) -> None:
    rng = random.Random(1)
    directory = make_model(CONFIGS[kind]())
    model = load(directory)
    for count in (150, 64, 3):
        prompt = tokens_of(rng, count)
        ours, theirs = whole(model, prompt), eager(directory, prompt)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
WIDE_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3MoeConfig(**(SMALL | EXPERTS | WIDE_HEADS), num_experts=4),
        transformers.Glm4MoeConfig(**(SMALL | EXPERTS | WIDE_HEADS), n_routed_experts=4, n_group=1),
        transformers.MixtralConfig(**(SMALL | WIDE_HEADS), num_local_experts=4),
        transformers.GPTNeoXConfig(**(SMALL | WIDE_HEADS)),  # ignores head_dim
    ],
    ids=lambda config: config.model_type,
)
def test_a_head_size_that_no_class_declares_is_that_of_the_models_code(
    config: Any, make_model: Callable[[Any], Path]
) -> None:
    directory = make_model(config)
    model = load(directory)
    used = 16 if config.model_type == "gpt_neox" else 32
    assert (model.kv.shape.key_dim, model.kv.shape.value_dim) == (used, used)
    prompt = tokens_of(random.Random(2), 60)
    ours, theirs = whole(model, prompt), eager(directory, prompt)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("kind", "dtype"), [("own", torch.bfloat16), ("packed", torch.float32)])
@pytest.mark.parametrize("config", ["qwen2", "gpt_neox"])
def test_packed_weights_give_the_logits_of_plain_ones(
    kind: str,
    dtype: torch.dtype,
    config: str,
    make_model: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = make_model(CONFIGS[config]())
    tokens = tokens_of(random.Random(9), 40)
    monkeypatch.setattr(packing, "kind", lambda dtype, device: kind)
    packed = load(directory, dtype)
    monkeypatch.setattr(packing, "kind", lambda dtype, device: "torch")
    plain = load(directory, dtype)
    assert packed.info.deterministic  # torch's own products are so on some CPUs only
    ours, theirs = whole(packed, tokens), whole(plain, tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_rejected_tokens_leave_no_trace(make_model: Callable[[Any], Path]) -> None:
    rng = random.Random(3)
    model = load(make_model(CONFIGS["llama"]()), torch.bfloat16)
    tokens = tokens_of(rng, 120)
    expected = whole(model, tokens)
    cache = model.new_cache()
    while len(cache.tokens) < len(tokens):
        start = len(cache.tokens)
        accepted = min(rng.randint(1, 6), len(tokens) - start)
        wrong = [(token + 1) % VOCAB for token in tokens[start + accepted : start + accepted + 4]]
        fed = tokens[start : start + accepted] + wrong
        (logits,) = model.forward([Rows(cache, fed, len(fed))])
        assert torch.equal(logits[:accepted], expected[start : start + accepted])
        cache.truncate(start + accepted)
        assert cache.tokens == tokens[: start + accepted]


def test_long_prompts_are_cut_into_passes(make_model: Callable[[Any], Path]) -> None:
    rng = random.Random(4)
    model = load(make_model(CONFIGS["llama"]()))
    long, short = tokens_of(rng, MAX_ROWS + 100), tokens_of(rng, 3)
    caches = [model.new_cache(), model.new_cache()]
    got = model.forward([Rows(caches[0], long, 110), Rows(caches[1], short, 1)])
    assert [logits.shape for logits in got] == [(110, VOCAB), (1, VOCAB)]
    assert caches[0].tokens == long
    assert torch.equal(got[0], whole(model, long)[-110:])
    assert torch.equal(got[1], whole(model, short)[-1:])


def test_no_logits_wanted(make_model: Callable[[Any], Path]) -> None:
    model = load(make_model(CONFIGS["gpt2"]()))
    tokens = tokens_of(random.Random(5), 20)
    cache = model.new_cache()
    (none,) = model.forward([Rows(cache, tokens[:19], 0)])
    assert none.shape == (0, VOCAB)
    (last,) = model.forward([Rows(cache, tokens[19:], 1)])
    assert torch.equal(last, whole(model, tokens)[-1:])
    assert model.forward([Rows(cache, [], 0)])[0].shape == (0, VOCAB)
    assert model.forward([]) == []


def test_refused_rows_leave_the_cache_unchanged(make_model: Callable[[Any], Path]) -> None:
    model = load(make_model(CONFIGS["llama"]()))
    cache = model.new_cache()
    for rows in (
        [Rows(cache, [1], 2)],
        [Rows(cache, [VOCAB], 1)],
        [Rows(cache, [-1], 1)],
        [Rows(cache, [1] * 1025, 1)],
        [Rows(cache, [1], 1), Rows(cache, [2], 1)],
    ):
        with pytest.raises(Broken):
            model.forward(rows)
    assert cache.tokens == []
    with pytest.raises(ValueError, match="length: must be"):
        cache.truncate(1)


def test_a_build_names_weights_dtype_and_machine(
    make_model: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    directory = make_model(CONFIGS["llama"]())
    name, weights = build_of(load(directory))
    assert (len(name), len(weights)) == (16, 32)
    assert build_of(load(directory)) == (name, weights)
    other_dtype = build_of(load(directory, torch.bfloat16))
    assert other_dtype.fingerprint != name
    assert other_dtype.weights_digest == weights
    shallow = build_of(load(truncate_model(directory, [0, 2], tmp_path / "shallow")))
    assert shallow.fingerprint != name
    assert shallow.weights_digest != weights
    model = load(directory)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert build_of(model).fingerprint != name


def test_copies_of_a_model_that_name_other_tokens_are_other_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of grammars depend on these files, though no logit does."""
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))

    def build(name: str, **content: object) -> Build:
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        return hash_build({}, tmp_path, b"")

    added = {"7": {"content": "<mark>", "special": True}}
    builds = [
        hash_build({}, tmp_path, b""),
        build("tokenizer.json", version="1.0"),
        build("tokenizer_config.json", added_tokens_decoder=added),
        build("generation_config.json", eos_token_id=2),
    ]
    assert len({each.fingerprint for each in builds}) == len(builds)
    assert len({each.weights_digest for each in builds}) == 1
    # What only gateways read makes no other build.
    same = build("tokenizer_config.json", added_tokens_decoder=added, chat_template="{{ messages }}")
    assert same == build("generation_config.json", eos_token_id=2, temperature=0.6) == builds[-1]


def test_weights_that_no_engine_reads_make_no_other_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))

    def build(name: str, content: str) -> Build:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return hash_build({}, tmp_path, b"")

    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    for name in {*shards.values(), "config.json"}:
        build(name, name)
    index = "model.safetensors.index.json"
    before = hash_build({}, tmp_path, b"")
    assert build(index, json.dumps({"weight_map": shards})) == before
    assert build("consolidated.safetensors", "a copy in another form") == before
    assert build("model-2.safetensors", "other weights") != before
    # A whole file goes before an index.
    (tmp_path / "consolidated.safetensors").unlink()
    assert build("model-2.safetensors", "model-2.safetensors") == before
    assert build("model.safetensors", "the whole model") != before


@torch.inference_mode()
def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = out[0].tolist()
    return tokens


@pytest.mark.model
def test_the_default_model_equals_transformers(default_model: CausalModel, default_reference: Any) -> None:
    rng = random.Random(6)
    vocab = default_model.info.vocab_size
    for count in (90, 7):
        prompt = tokens_of(rng, count, vocab)
        with torch.inference_mode():
            theirs = default_reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(whole(default_model, prompt), theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.model
def test_the_default_model_decodes_as_transformers_does(
    default_model: CausalModel, default_reference: Any
) -> None:
    prompts = [[1, 9690, 198, 2683, 359], [504, 3575, 282, 4649, 314]]
    caches = [default_model.new_cache() for _ in prompts]
    chains = [list(prompt) for prompt in prompts]
    for _ in range(12):
        batch = [
            Rows(cache, chain[len(cache.tokens) :], 1) for cache, chain in zip(caches, chains, strict=True)
        ]
        for chain, logits in zip(chains, default_model.forward(batch), strict=True):
            chain.append(int(logits[-1].argmax()))
    assert chains == [greedy(default_reference, prompt, 12) for prompt in prompts]
