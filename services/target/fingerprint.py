"""The name of a target build: a hash of what its bits depend on, and of the bits of a fixed probe."""

from __future__ import annotations

import json
import platform
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
import transformers

from services.common.version import __version__
from services.engine.model import Rows

if TYPE_CHECKING:
    from services.engine.model import CausalModel

_PROBE_LEN = 32
_DIGEST_BYTES = 8


def fingerprint_of(model: CausalModel) -> str:
    """16 hex digits; two replicas that share them give a position the same logits, as far as a probe tells.

    The probe runs a prefill and then a single token, so that both shapes of work are in it.
    """
    digest = blake2b(json.dumps(_build(model), sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    cache = model.new_cache()
    probe = [(7 * i + 1) % model.info.vocab_size for i in range(_PROBE_LEN)]
    for tokens in (probe[:-1], probe[-1:]):
        (logits,) = model.forward([Rows(cache, tokens, 1)])  # float32 [1, vocab]
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
