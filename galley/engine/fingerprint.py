"""The fingerprint of a target build: equal fingerprints mean equal bits; and the digest of its weights."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from glob import escape
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding
import numba
import torch
import transformers

from galley.common.models.fast_tokenizer import CONFIG, read_json
from galley.common.models.files import end_token_ids
from galley.engine.batch import NONE
from galley.engine.cpu import packing
from galley.engine.load.support import file_digest
from galley.engine.model import CausalModel, probe_logits

# Increased with every change to the engine that may change a bit of a logit.
ENGINE_REVISION = 3
_DIGEST_BYTES = 8
_WEIGHTS_DIGEST_BYTES = 16
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Build(NamedTuple):
    """Hashes in hex: of everything the bits depend on, and of the model's files alone."""

    fingerprint: str
    weights_digest: str


def build_of(model: CausalModel) -> Build:
    """Return the build of a model; runs one step. Digests of the files are kept in the cache directory."""
    probe = probe_logits(model).cpu().contiguous().numpy().tobytes()
    return hash_build(_facts(model), model.info.directory, probe)


def hash_build(facts: Mapping[str, object], directory: Path, probe: bytes) -> Build:
    """Return the build of the model in `directory` by `facts` of its engine and what a probe computed."""
    weights = _digests(directory, (*_weights_files(directory), "config.json"))
    listed = json.dumps(weights, sort_keys=True).encode()
    build = json.dumps({"weights": weights, **_mask_facts(directory), **facts}, sort_keys=True).encode()
    fingerprint = blake2b(build, digest_size=_DIGEST_BYTES)
    fingerprint.update(probe)
    return Build(fingerprint.hexdigest(), blake2b(listed, digest_size=_WEIGHTS_DIGEST_BYTES).hexdigest())


def _weights_files(directory: Path) -> Sequence[str]:
    """Return patterns of the files that the engines read weights from."""
    index = directory / _INDEX
    if (directory / _WEIGHTS).exists() or not index.exists():
        return ("*.safetensors",)
    return sorted({escape(name) for name in read_json(index)["weight_map"].values()})


def _digests(directory: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return the digest of each file there is, by its name."""
    files = sorted(path for pattern in patterns for path in directory.glob(pattern))
    return {path.name: file_digest(path) for path in files}


def _mask_facts(directory: Path) -> dict[str, object]:
    """Return what the masks of grammars depend on: what the tokens are, and which ones end an answer."""
    try:
        added = read_json(directory / CONFIG).get("added_tokens_decoder")
    except (OSError, ValueError):
        added = None  # the replica then compiles no grammar
    return {
        "llguidance": version("llguidance"),
        "tokenizer": _digests(directory, ("tokenizer.json",)),
        "added_tokens": added,
        "end_tokens": end_token_ids(directory),
    }


def _facts(model: CausalModel) -> dict[str, object]:
    """Return everything the bits depend on, besides the weights."""
    dtype = getattr(torch, model.info.dtype)
    matmul = packing.kind(dtype, model.info.device)
    most_rows = packing.most_rows(dtype) if matmul == "packed" else 0
    return {
        "dtype": model.info.dtype,
        "engine_revision": ENGINE_REVISION,
        "attention": model.attention_kind,
        "forward": model.forward_kind,
        "block_tokens": model.kv.block_tokens,
        "matmul": matmul,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)),
        "llvmlite": llvmlite.__version__,
        "cpu": instruction_sets(),
        "libc": platform.libc_ver(),  # the kernels call its cosines and exponentials
        "device": device_kind(model.info.device),
        "tensor_parallel": model.info.ranks,
        **_cuda(model),
        # Left out without: replicas of earlier versions compute the same bits.
        **({} if model.info.quantization == NONE else {"quantization": model.info.quantization}),
        **({"rows_of_product": most_rows} if most_rows else {}),
    }


def instruction_sets() -> list[str]:
    """Return the instruction sets by which oneDNN and torch choose kernels."""
    flags = torch.cpu.get_capabilities().items()
    return [torch.backends.cpu.get_cpu_capability(), *sorted(name for name, there in flags if there is True)]


def _cuda(model: CausalModel) -> dict[str, object]:
    """Return what else the bits depend on on CUDA, where cuBLAS chooses kernels by shapes; {} elsewhere."""
    if torch.device(model.info.device).type != "cuda":
        return {}
    return {"cuda": torch.version.cuda, "rows_of_pass": model.max_rows}


def device_kind(device: str) -> str:
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind
