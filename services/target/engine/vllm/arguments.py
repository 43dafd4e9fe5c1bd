"""The arguments of vLLM's engine: from the target's settings, then `--vllm-args`, then what Galley needs.

No vLLM is needed to build them. `--vllm-args` may set everything but the names in `_OWN`, by which Galley
puts its drafts and its sampling into vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from galley.core.errors import UnsupportedModel
from services.target.engine.vllm.adapters import NO_ADAPTERS, Adapters
from services.target.settings import TargetSettings

_PACKAGE = "services.target.engine.vllm"
# The design uses internals of vLLM, so a version is admitted once its tests have passed.
_OLDEST, _NEWEST = (0, 32), (0, 32)
# vLLM's own limit.
_MAX_DRAFT_TOKENS = 128
_OWN = {
    "model": "--model",
    "tokenizer": "--model",
    "speculative_config": "Galley's drafts",
    "scheduler_cls": "Galley's drafts",
    "worker_extension_cls": "Galley's sampling",
    "scheduling_policy": "the priority of sessions",
    "async_scheduling": "Galley's drafts, which may arrive until a step begins",
    "kv_events_config": "the report of cached prefixes",
    "runner": "a causal language model",
    "generation_config": "the sampling parameters of each request",
    "enable_lora": "--lora-adapters",
    "max_loras": "--lora-adapters",
    "max_lora_rank": "--lora-adapters",
    "skip_tokenizer_init": "the gateway, which alone tokenizes",
}
# Read by vLLM when it is imported.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # One rank runs in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else each rank on the CPU needs a NUMA node of its own. --threads says how many threads it has.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def set_environment() -> None:
    """Set the variables that vLLM reads, unless they are set. Call it before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_version(version: str) -> None:
    """Raise UnsupportedModel for a version of vLLM that Galley has not been tested with."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major = minor = -1
    if not _OLDEST <= (major, minor) <= _NEWEST:
        raise UnsupportedModel(f"vllm: must be of version {_range()}, got {version}")


def _range() -> str:
    oldest, newest = (".".join(map(str, version)) for version in (_OLDEST, _NEWEST))
    return f"{oldest}.x" if oldest == newest else f"{oldest}.x to {newest}.x"


def engine_arguments(
    settings: TargetSettings, directory: Path, given: Mapping[str, object], adapters: Adapters = NO_ADAPTERS
) -> dict[str, object]:
    """Return the arguments of vLLM's `EngineArgs`. Raise ValueError for one that Galley must set itself."""
    for name in given:
        if name in _OWN:
            raise ValueError(f"vllm_args.{name}: must not be set; it belongs to {_OWN[name]}")
    if given.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "vllm_args.data_parallel_size: must be 1; start one target replica for each rank of data instead"
        )
    if given.get("pipeline_parallel_size", 1) != 1:
        raise ValueError(
            "vllm_args.pipeline_parallel_size: must be 1; vLLM's runner verifies no draft tokens over stages"
        )
    overrides = given.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        raise ValueError(f"vllm_args.hf_overrides: must be an object, got {overrides!r}")  # noqa: TRY004
    return {
        **_from_settings(settings, adapters),
        **given,
        # Most of what a bfloat16 token depends on the rows beside it comes from the head.
        "hf_overrides": {"head_dtype": "float32", **overrides},
        **_galleys_own(settings, directory),
        **adapters.arguments(),
    }


def _from_settings(settings: TargetSettings, adapters: Adapters) -> dict[str, object]:
    # With adapters vLLM demands that all sequences can draw in one step, with all draft tokens.
    rows = 1 + _draft_tokens(settings) if adapters.directories else 1
    return {
        "kv_cache_memory_bytes": settings.kv_memory_mb * 2**20,
        "max_model_len": -1,  # reduced to what the KV pool holds
        "max_num_seqs": settings.max_sessions,
        "max_num_batched_tokens": max(settings.max_rows, settings.max_sessions * rows),
        "tensor_parallel_size": settings.tensor_parallel,
        "load_format": "safetensors",  # a pickle can run code
        # torch.compile needs a compiler on the CPU, which images do not have.
        "enforce_eager": settings.device == "cpu",
        "enable_prefix_caching": True,
    }


def _galleys_own(settings: TargetSettings, directory: Path) -> dict[str, object]:
    drafts = _draft_tokens(settings)
    return {
        "model": str(directory),
        "tokenizer": str(directory),
        "skip_tokenizer_init": True,
        "runner": "generate",
        "generation_config": "vllm",  # sampling parameters come with each request
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "scheduler_cls": f"{_PACKAGE}.scheduler.StepScheduler",
        "worker_extension_cls": f"{_PACKAGE}.worker.DrawExtension",
        "speculative_config": {
            "method": "custom_class",
            "model": f"{_PACKAGE}.worker.NoProposer",
            "num_speculative_tokens": drafts,
            # Else a sequence with one token to compute is padded to 1 + drafts rows.
            "num_speculative_tokens_per_batch_size": [(1, 1, drafts)],
        },
    }


def _draft_tokens(settings: TargetSettings) -> int:
    return min(max(1, settings.max_draft_tokens), _MAX_DRAFT_TOKENS)


def refuse_unknown(given: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise ValueError for a name that vLLM's `EngineArgs` does not have."""
    for name in given:
        if name not in known:
            raise ValueError(f"vllm_args.{name}: must be an argument of vLLM's engine (EngineArgs)")
