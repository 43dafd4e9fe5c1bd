"""LoRA adapters of the vLLM engine: directories in PEFT's format, each under the name that requests give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from galley.common.models.files import MODEL_FILES, foreign_file
from galley.core.errors import UnsupportedModel
from galley.engine.load.support import file_digest

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The values that vLLM's max_lora_rank takes.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters by name. `rank` is the largest one; `digest` covers names, configurations and weights."""

    directories: Mapping[str, Path] = field(default_factory=dict)
    rank: int = 0
    digest: str = ""

    def arguments(self) -> dict[str, object]:
        """Return the arguments of vLLM's engine; none without adapters."""
        if not self.directories:
            return {}
        # All fit into one step: a paused session comes back with its adapter, whatever runs beside it then.
        # One place more stays empty: vLLM's CPU kernels use the last one for rows without an adapter.
        return {"enable_lora": True, "max_loras": len(self.directories) + 1, "max_lora_rank": self.rank}


NO_ADAPTERS = Adapters()


def read_adapters(directories: Mapping[str, Path]) -> Adapters:
    """Check the files of each adapter, and hash them; blocks. Raise UnsupportedModel."""
    digest, rank = blake2b(digest_size=16), 0
    for name, directory in sorted(directories.items()):
        if (reason := foreign_file(directory, MODEL_FILES)) is not None:
            raise UnsupportedModel(f"lora_adapters: {name}: {reason}")
        config = _config(name, directory)
        rank = max(rank, _rank(name, config))
        weights = directory / _WEIGHTS
        if not weights.is_file():
            raise UnsupportedModel(f"lora_adapters: {name}: {directory} must have {_WEIGHTS}")
        for part in (name, file_digest(directory / _CONFIG), file_digest(weights)):
            digest.update(part.encode() + b"\0")
    return Adapters(dict(directories), rank, digest.hexdigest() if directories else "")


def _config(name: str, directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"lora_adapters: {name}: {path} must be readable JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UnsupportedModel(f'lora_adapters: {name}: {path} must have "peft_type": "LORA"')
    return config


def _rank(name: str, config: Mapping[str, Any]) -> int:
    """Return the rank that the engine must have room for."""
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise UnsupportedModel(f"lora_adapters: {name}: rank_pattern must be an object, got {pattern!r}")
    ranks = [config.get("r"), *pattern.values()]
    for rank in ranks:
        if not isinstance(rank, int) or not 1 <= rank <= _RANKS[-1]:
            raise UnsupportedModel(f"lora_adapters: {name}: r must be in [1, {_RANKS[-1]}], got {rank!r}")
    return next(room for room in _RANKS if room >= max(ranks))
