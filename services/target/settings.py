"""How a target is configured: flags and GALLEY_TARGET_* environment."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from galley.common.config.defaults import DEFAULT_MODEL
from galley.common.config.settings import settings_config
from galley.common.registry.settings import ReplicaSettings


class TargetSettings(ReplicaSettings):
    """What the target process can be told."""

    model_config = settings_config("GALLEY_TARGET_")

    model: str = Field(
        default=DEFAULT_MODEL, min_length=1, description="Hub id, or directory or GGUF file of the model."
    )
    max_sessions: int = Field(
        default=64, ge=1, le=65536, description="Sessions whose KV is kept; idle ones make room."
    )
    kv_memory_mb: int = Field(
        default=1536,
        ge=1,
        description="Bound of the KV pool of a rank, in MiB; the context window is cut to what it holds.",
    )
    max_rows: int = Field(
        default=256,
        ge=8,
        le=65536,
        description="About how many tokens one forward pass takes; longer prompts take several.",
    )
    max_linger_ms: float = Field(
        default=50.0,
        ge=0,
        le=10_000,
        description="Longest time that a pass waits for a draft that is due, where it pays; 0 never waits.",
    )
    invariant: bool = Field(
        default=False,
        description="On CUDA, spend time on the same bits in any company; the CPU has them always.",
    )
    max_draft_tokens: int = Field(default=16, ge=0, le=256, description="Most draft tokens in one item.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Ranks over which the model is sharded; 1 is this process alone."
    )
    hosts: int = Field(
        default=1, ge=1, le=64, description="Hosts that share these ranks; each runs as many processes."
    )
    host_index: int = Field(
        default=0, ge=0, lt=64, description="Which of the hosts this is; 0 runs rank 0, and serves."
    )
    ranks_address: str = Field(
        default="", description="host:port at which host 0 meets the others; needed with several hosts."
    )
    ranks_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="How long hosts, and ranks that load, wait for one another at the start.",
    )

    @model_validator(mode="after")
    def _hosts_share_ranks(self) -> Self:
        if self.tensor_parallel % self.hosts:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} is not divided by --hosts {self.hosts}"
            )
        if self.host_index >= self.hosts:
            raise ValueError(f"--host-index {self.host_index} is not below --hosts {self.hosts}")
        if self.hosts > 1 and not self.ranks_address.rpartition(":")[2].isdecimal():
            raise ValueError(f"--hosts {self.hosts} need --ranks-address host:port")
        return self
