"""From a service's settings to a loaded model: the one way in which draft and target do it."""

from __future__ import annotations

from pathlib import Path

from galley.common.models.hub import hub_model
from galley.common.server.process import hand_back_free_memory
from galley.engine.cuda.options import DeviceOptions
from galley.engine.load.draft_directory import takes_embeddings
from galley.engine.load.module import parse_dtype
from galley.engine.load.resolve import resolve_model
from galley.engine.model import DEFAULT_KV_BLOCKS, CausalModel
from galley.engine.parallel.ranks import ALONE, Ranks


def load_model(  # noqa: PLR0913  # each a choice of its own
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
    """The model that `spec` names, resolved and loaded; raises UnsupportedModel. Blocks, long at first.

    `target_model` names the model whose embeddings a trained draft takes; it is resolved only for one that
    does. `invariant`: a row's bits in any pass are wanted of a device other than the CPU, which keeps them.
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
    """What to call the model: a hub id without its revision, a path by its last part."""
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else hub_model(spec)[0]
