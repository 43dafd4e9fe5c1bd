"""The name of a target build: a hash of what its bits depend on, and of the bits of a fixed probe."""

from __future__ import annotations

import json
import platform
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
import transformers

from services.common.version import __version__
from services.engine.probe import probe_logits

if TYPE_CHECKING:
    from services.engine.model import CausalModel

_DIGEST_BYTES = 8


def fingerprint_of(model: CausalModel) -> str:
    """16 hex digits; replicas that share them give a position the same logits, as far as a probe tells."""
    digest = blake2b(json.dumps(_build(model), sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    logits = probe_logits(model)  # float32 [probe, vocab]
    digest.update(logits.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _build(model: CausalModel) -> dict[str, str]:
    return {
        "engine": __version__,
        "model": model.info.name,
        "dtype": model.info.dtype,
        "device": model.info.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
