"""Load a model from a service's settings, for draft and target alike."""

from __future__ import annotations

from pathlib import Path

from galley.common.models.files import hub_model
from galley.common.server.process import hand_back_free_memory
from galley.engine.cuda.options import DeviceOptions
from galley.engine.load.draft_directory import takes_embeddings
from galley.engine.load.module import parse_dtype
from galley.engine.load.resolve import resolve_model
from galley.engine.model import DEFAULT_KV_BLOCKS, CausalModel
from galley.engine.parallel.ranks import ALONE, Ranks


def load_model(  # noqa: PLR0913
    spec: str,
    *,
    dtype: str,
    device: str,
    threads: int,
    kv_blocks: int = DEFAULT_KV_BLOCKS,
    ranks: Ranks = ALONE,
    target_model: str | None = None,
    invariant: bool = False,
) -> CausalModel:
    """Resolve and load the model that `spec` names; blocks, and for long at first. Raises UnsupportedModel.

    `target_model` names the model whose embeddings a trained draft uses. `invariant` asks a CUDA device for
    the same bits in any step.
    """
    directory = resolve_model(spec)
    target = resolve_model(target_model) if target_model and takes_embeddings(directory) else None
    model = CausalModel.load(
        directory,
        dtype=parse_dtype(dtype, device),
        device=device,
        threads=threads,
        name=_name_of(spec),
        kv_blocks=kv_blocks,
        ranks=ranks,
        target=target,
        options=DeviceOptions(invariant=invariant),
    )
    hand_back_free_memory()
    return model


def _name_of(spec: str) -> str:
    """Return the model's name: a hub id without its revision, or the last part of a path."""
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else hub_model(spec)[0]
