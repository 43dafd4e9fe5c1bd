"""Load the paged engine, or a shard of its model, from the target's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from galley.common.logs import get_logger
from galley.engine.parallel.ranks import ALONE, Ranks
from services.target.settings import TargetSettings, memory_reported

if TYPE_CHECKING:
    from galley.engine.fingerprint import Build
    from galley.engine.model import CausalModel
    from services.target.engine.paged.engine import PagedEngine

_LOG = get_logger(__name__)
_MIB = 2**20


def load_paged_engine(settings: TargetSettings) -> PagedEngine:
    """Load the model with a KV pool within the memory bound, and probe it; blocks.

    Raise UnsupportedModel, OutOfMemory, or ValueError if the pool is too small for the probes. A pool smaller
    than one context window reduces the window that the replica offers.
    """
    from services.target.engine.paged.engine import PagedEngine  # noqa: PLC0415  # imports torch

    model, build = load_shard(settings, kv_blocks(settings))
    engine = PagedEngine(model, *build)
    if engine.info.context_window < model.info.context_window:
        _LOG.warning(
            "context window reduced",
            kv_memory_mb=settings.kv_memory_mb,
            context_window=engine.info.context_window,
            model_context_window=model.info.context_window,
        )
    return engine


def load_shard(settings: TargetSettings, blocks: int, ranks: Ranks = ALONE) -> tuple[CausalModel, Build]:
    """Load the model, or one rank's shard; return it and its build.

    All ranks call it at once, since loading probes the model. Raise UnsupportedModel or OutOfMemory.
    """
    # Late, so that --help and Ray's controller need no torch.
    from galley.engine.fingerprint import build_of  # noqa: PLC0415
    from galley.engine.model import load_model  # noqa: PLC0415

    with memory_reported(settings):
        model = load_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.thread_count,
            kv_blocks=blocks,
            ranks=ranks,
            invariant=settings.invariant,
            quantization=settings.quantization,
        )
        return model, build_of(model)


def refuse_model(settings: TargetSettings) -> None:
    """Raise UnsupportedModel, before anything starts, if the model cannot be sharded over these ranks."""
    from galley.engine.load.module import load_config  # noqa: PLC0415  # so that --help needs no torch
    from galley.engine.parallel.sharding import refuse_ranks  # noqa: PLC0415

    refuse_ranks(load_config(_directory(settings)), settings.tensor_parallel)


def kv_blocks(settings: TargetSettings, ranks: Ranks = ALONE) -> int:
    """Return how many KV blocks fit into a rank's memory. Raise UnsupportedModel, ValueError if too few."""
    from galley.engine.kv_shape import kv_shape  # noqa: PLC0415  # imports torch
    from galley.engine.load.module import load_config, parse_dtype  # noqa: PLC0415
    from galley.engine.model import PROBE_BLOCKS  # noqa: PLC0415

    config = load_config(_directory(settings))
    block_bytes = kv_shape(config, parse_dtype(settings.dtype, settings.device), ranks).block_bytes
    blocks = settings.kv_memory_mb * _MIB // block_bytes
    if blocks < PROBE_BLOCKS:
        least = f"{-(-PROBE_BLOCKS * block_bytes // _MIB)} ({PROBE_BLOCKS} blocks of {block_bytes} bytes)"
        raise ValueError(f"kv_memory_mb: must be >= {least}, got {settings.kv_memory_mb}")
    return blocks


def _directory(settings: TargetSettings) -> Path:
    """Return the model's directory; download or convert it first if need be, which may take all memory."""
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415

    with memory_reported(settings):
        return resolve_model(settings.model)
