"""Load the engine that the target's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from galley.common.server.process import limit_threads
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.target.engine.protocol import LoadedEngine


def load_engine(settings: TargetSettings) -> LoadedEngine:
    """Load the model, and probe it; blocks. Raise UnsupportedModel, OutOfMemory, or ValueError."""
    limit_threads(settings.thread_count)  # before torch is imported
    if settings.engine == "vllm":
        from services.target.engine.vllm.loading import load_core  # noqa: PLC0415  # only vLLM's environment
        from services.target.engine.vllm.target import VllmEngine  # noqa: PLC0415  # has what these import

        return VllmEngine(load_core(settings, settings.vllm_arguments))
    from services.target.engine.paged.loading import load_paged_engine  # noqa: PLC0415

    return load_paged_engine(settings)
