"""From a service's settings to a loaded model: the one way in which draft and target do it."""

from __future__ import annotations

from pathlib import Path

from services.engine.loading import parse_dtype
from services.engine.model import CausalModel
from services.engine.prepare import resolve_model


def load_model(spec: str, *, dtype: str, device: str, threads: int) -> CausalModel:
    """The model that `spec` names, resolved and loaded; raises UnsupportedModel. Blocks, long at first."""
    return CausalModel.load(
        resolve_model(spec),
        dtype=parse_dtype(dtype, device),
        device=device,
        threads=threads,
        name=_name_of(spec),
    )


def _name_of(spec: str) -> str:
    """What to call the model: a hub id as it is, a path by its last part."""
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else spec
