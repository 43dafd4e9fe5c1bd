"""The name of a target build: the same name, the same bits."""

from __future__ import annotations

import json
import platform
from hashlib import blake2b

import llvmlite.binding
import numba
import torch
import transformers

from galley.engine.cpu import packing
from galley.engine.load.cache_directory import file_digest
from galley.engine.model import CausalModel
from galley.engine.probe import probe_logits

# Raised with every change to the engine that may change a bit of a logit.
ENGINE_REVISION = 2
_DIGEST_BYTES = 8
_BUILD_FILES = ("*.safetensors", "config.json")


def fingerprint(model: CausalModel) -> str:
    """16 hex digits over all that the bits depend on, and over the logits of a fixed probe prompt.

    Takes one forward pass; the weights' digest is remembered between starts.
    """
    directory = model.info.directory
    files = sorted(path for pattern in _BUILD_FILES for path in directory.glob(pattern))
    build = {
        "weights": {path.name: file_digest(path) for path in files},
        "dtype": model.info.dtype,
        "engine_revision": ENGINE_REVISION,
        "attention": model.attention_kind,
        "forward": model.forward_kind,
        "block_tokens": model.kv.block_tokens,
        "matmul": "packed"
        if packing.serves(getattr(torch, model.info.dtype), model.info.device)
        else "torch",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)),
        "llvmlite": llvmlite.__version__,
        "cpu": _instruction_sets(),
        "libc": platform.libc_ver(),  # whose cosines and exponentials the kernels call
        "device": _device_kind(model.info.device),
        "tensor_parallel": model.info.ranks,
        **_cuda(model),
    }
    digest = blake2b(json.dumps(build, sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    digest.update(probe_logits(model).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _instruction_sets() -> list[str]:
    """By which oneDNN chooses its kernels, beside torch's own choice."""
    flags = torch.cpu.get_capabilities().items()
    return [torch.backends.cpu.get_cpu_capability(), *sorted(name for name, there in flags if there is True)]


def _cuda(model: CausalModel) -> dict[str, object]:
    """What more the bits depend on there: products are cuBLAS's, and their kernels go by their shapes."""
    if torch.device(model.info.device).type != "cuda":
        return {}
    return {"cuda": torch.version.cuda, "rows_of_pass": model.max_rows}


def _device_kind(device: str) -> str:
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind
