"""GGUF files: what transformers skips in them is read or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from galley.core.errors import UnsupportedModel
from galley.engine.load.module import DTYPES, load_config, load_module
from galley.engine.load.resolve import resolve_model
from galley.engine.load.support import cache_dir, file_digest
from tests.fakes.tiny_gguf import HEADS, SIZE, save_tiny_gguf


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "tiny.gguf"


def llama3_divisors(theta: float, factor: float, context: int) -> list[float]:
    """Return the divisors that llama.cpp's convert_hf_to_gguf.py writes for Llama 3.1 to 3.3."""
    divisors = []
    size = SIZE // HEADS
    for frequency in 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)):
        wavelength = 2 * np.pi / float(frequency)
        smooth = min(1, max(0, (context / wavelength - 1) / 3))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def frequencies(directory: Path) -> torch.Tensor:
    module = load_module(directory, load_config(directory), dtype=DTYPES["float32"], device="cpu").module
    frequencies: torch.Tensor = module.model.rotary_emb.inv_freq
    return frequencies


def rope(source: Path) -> dict[str, Any]:
    parameters: dict[str, Any] = load_config(resolve_model(str(source))).rope_parameters
    return parameters


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.type: must be"),
        ({"rope.scaling.attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor: must be absent"),
        ({"rope.freq_base_swa": 500.0}, r"llama\.rope\.freq_base_swa: must be 10000\.0, got 500\.0"),
    ],
)
def test_keys_of_rope_that_are_not_read_are_refused(
    keys: dict[str, str | float], reason: str, source: Path
) -> None:
    save_tiny_gguf(source, keys=keys)
    with pytest.raises(UnsupportedModel, match=f"{reason}.*use the model's safetensors directory"):
        resolve_model(str(source))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "rope_factors_long.weight", "blk.0.attn_q.weight.scale"]
)
def test_tensors_that_the_model_lacks_are_refused(name: str, source: Path) -> None:
    save_tiny_gguf(source, tensors={name: np.ones(SIZE, np.float32)})
    with pytest.raises(UnsupportedModel, match=f"tensors must be those of llama, got {name}; use"):
        resolve_model(str(source))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (np.ones((SIZE, SIZE), np.float32), r"must have the shape \(48, 32\), got \(32, 32\)"),
        (np.ones((48, SIZE), np.int8), "must be a GGUF that transformers can read: .*I8"),
    ],
)
def test_tensors_of_another_shape_or_an_unknown_type_are_refused(
    weight: NDArray[Any], reason: str, source: Path
) -> None:
    save_tiny_gguf(source, tensors={"blk.0.ffn_up.weight": weight})
    with pytest.raises(UnsupportedModel, match=reason):
        resolve_model(str(source))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("blk.0.attn_q.weight", np.ones((30, SIZE), np.float32)),
        ("rope_freqs.weight", np.ones(8, np.int8)),
    ],
)
def test_tensors_that_cannot_be_read_are_refused(name: str, tensor: NDArray[Any], source: Path) -> None:
    save_tiny_gguf(source, tensors={name: tensor})
    with pytest.raises(UnsupportedModel, match="must be a GGUF that transformers can read: "):
        resolve_model(str(source))


def test_heads_of_which_another_part_is_rotated_are_refused(source: Path) -> None:
    save_tiny_gguf(source, "starcoder2", rotated=8)
    with pytest.raises(UnsupportedModel, match="must rotate 16 values of each head, got 8;"):
        resolve_model(str(source))


@pytest.mark.parametrize("divisors", [[1, 1, 1, 1, 1, 2, 4, 8], [8.0] * 8, [1, 8]])
def test_other_divisors_of_frequencies_are_refused(divisors: list[float], source: Path) -> None:
    save_tiny_gguf(source, tensors={"rope_freqs.weight": np.array(divisors, np.float32)})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight: must be the scaling of Llama 3"):
        resolve_model(str(source))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_read_from_its_divisors(factor: float, source: Path) -> None:
    divisors = llama3_divisors(500_000.0, factor, 8192)
    save_tiny_gguf(
        source,
        keys={"rope.freq_base": 500_000.0},
        tensors={"rope_freqs.weight": np.array(divisors, np.float32)},
    )
    directory = resolve_model(str(source))
    assert load_config(directory).rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(frequencies(directory), plain / torch.tensor(divisors))


@pytest.mark.parametrize(
    "keys", [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}]
)
def test_linear_scaling_is_read(keys: dict[str, str | float], source: Path) -> None:
    save_tiny_gguf(source, keys=keys)
    directory = resolve_model(str(source))
    torch.testing.assert_close(frequencies(directory), 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16) / 4)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope.freq_base": 10_000.0, "rope.freq_base_swa": 10_000.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0},
    ],
)
def test_rope_without_effect_is_taken(keys: dict[str, str | float], source: Path) -> None:
    save_tiny_gguf(source, keys=keys, tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert rope(source) == {"rope_type": "default", "rope_theta": 10_000.0}


def test_the_base_is_read_where_transformers_does_not(source: Path) -> None:
    save_tiny_gguf(source, "starcoder2", {"rope.freq_base": 999_999.4375})
    assert rope(source)["rope_theta"] == 999_999.4375


def test_a_copy_of_an_earlier_converter_is_not_used(source: Path) -> None:
    save_tiny_gguf(source)
    earlier = cache_dir() / "models" / f"tiny-{file_digest(source)[:16]}"
    earlier.mkdir(parents=True)
    assert resolve_model(str(source)) != earlier


def test_linear_scaling_is_that_of_full_attention(source: Path) -> None:
    keys: dict[str, str | float] = {
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    save_tiny_gguf(source, "gemma3", keys)
    assert rope(source) == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
