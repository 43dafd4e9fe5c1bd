"""How a target is configured: flags and GALLEY_TARGET_* environment."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.common.config import settings_config
from services.common.defaults import DEFAULT_MODEL
from services.common.replica_settings import ReplicaSettings


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
    max_draft_tokens: int = Field(default=16, ge=0, le=256, description="Most draft tokens in one item.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Ranks over which the model is sharded; 1 is this process alone."
    )
    redis_url: SecretStr = Field(
        default=SecretStr(""),
        description="Where the replica registers: redis://, rediss:// or unix://; empty: it does not.",
    )
    advertise: str = Field(
        default="", description="Address that gateways are told, host:port; empty: where it listens."
    )
