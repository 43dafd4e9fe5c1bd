"""From the target's settings to its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from galley.common.logs import get_logger
from galley.common.server.process import limit_threads
from galley.engine.parallel.ranks import ALONE, Ranks
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.target.engine.paged import PagedEngine

_LOG = get_logger(__name__)
_MIB = 2**20


def load_engine(settings: TargetSettings) -> PagedEngine:
    """Load the model with a KV pool of the memory allowed, and probe it; blocks. Raises UnsupportedModel.

    Raises ValueError where the pool does not hold what the probes need. A pool that does not hold one context
    window cuts the window that the replica offers, and says so in the log.
    """
    limit_threads(settings.threads)
    # Late, so that --help needs no torch.
    from galley.engine.fingerprint import fingerprint  # noqa: PLC0415
    from galley.engine.serving import load_model  # noqa: PLC0415
    from services.target.engine.paged import PagedEngine  # noqa: PLC0415

    model = load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        kv_blocks=kv_blocks(settings),
        invariant=settings.invariant,
    )
    engine = PagedEngine(model, fingerprint(model))
    if engine.info.context_window < model.info.context_window:
        _LOG.warning(
            "the KV memory cuts the context window",
            kv_memory_mb=settings.kv_memory_mb,
            context_window=engine.info.context_window,
            of_the_model=model.info.context_window,
        )
    return engine


def refuse_model(settings: TargetSettings) -> None:
    """Raise UnsupportedModel, before anything is started, if the model cannot be cut over so many ranks."""
    from galley.engine.load.module import load_config  # noqa: PLC0415  # so that --help needs no torch
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415
    from galley.engine.parallel.sharding import refuse_ranks  # noqa: PLC0415

    refuse_ranks(load_config(resolve_model(settings.model)), settings.tensor_parallel)


def kv_blocks(settings: TargetSettings, ranks: Ranks = ALONE) -> int:
    """How many blocks of a rank's KV the memory bound holds. Raises UnsupportedModel, ValueError."""
    from galley.engine.kv_pool import kv_block_bytes  # noqa: PLC0415  # imports torch
    from galley.engine.load.module import load_config, parse_dtype  # noqa: PLC0415
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415
    from galley.engine.probe import BLOCKS  # noqa: PLC0415

    config = load_config(resolve_model(settings.model))
    block_bytes = kv_block_bytes(config, parse_dtype(settings.dtype, settings.device), ranks)
    blocks = settings.kv_memory_mb * _MIB // block_bytes
    if blocks < BLOCKS:
        raise ValueError(
            f"kv_memory_mb: {settings.kv_memory_mb} MiB do not hold {BLOCKS} blocks of {block_bytes} bytes"
        )
    return blocks
