"""Load a model into vLLM, check it and name its build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from galley.common.logs import get_logger
from galley.common.models.files import code_asked_for
from galley.core.errors import UnsupportedModel
from galley.engine.load.resolve import resolve_model
from services.target.engine.vllm.adapters import Adapters, read_adapters
from services.target.engine.vllm.core import VllmCore, start
from services.target.engine.vllm.probe import Probe, probe
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)
# What a replica may hold or take at once; its bits are the same with more.
_SIZES = {"gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "num_gpu_blocks_override"}


def load_core(settings: TargetSettings, given: Mapping[str, object]) -> VllmCore:
    """Start vLLM with the settings' model and the arguments of `--vllm-args`, and probe it; blocks.

    Raise UnsupportedModel, ValueError for an argument that cannot be used, or what vLLM raises.
    """
    directory = resolve_model(settings.model, _refuse_code)
    adapters = read_adapters(settings.adapters)
    core = start(settings, directory, given, adapters)
    try:
        result = probe(core)
        core.reset_prefix_cache()
        core.facts()  # drops the probe's events
        _name_build(core, directory, given, adapters, result)
    except BaseException:
        core.close()
        raise
    info = core.info
    _LOG.info("vllm started", dtype=info.dtype, ranks=info.ranks, deterministic=info.deterministic)
    return core


def _refuse_code(config: dict[str, Any]) -> None:
    if (reason := code_asked_for(config)) is not None:
        raise UnsupportedModel(f"{config.get('model_type') or 'the model'}: {reason}")


def _name_build(
    core: VllmCore,
    directory: Path,
    given: Mapping[str, object],
    adapters: Adapters,
    result: Probe,
) -> None:
    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415

    from galley.engine.fingerprint import device_kind, hash_build, instruction_sets  # noqa: PLC0415

    facts = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "arguments": {name: value for name, value in given.items() if name not in _SIZES},
        "dtype": core.info.dtype,
        "cpu": instruction_sets(),
        "device": device_kind(core.info.device),
        "ranks": core.info.ranks,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", ""),
        "adapters": adapters.digest,
    }
    build = hash_build(facts, directory, result.bits)
    core.info = replace(
        core.info,
        fingerprint=build.fingerprint,
        weights_digest=build.weights_digest,
        deterministic=result.deterministic and not adapters.directories,  # the probe uses none
    )
