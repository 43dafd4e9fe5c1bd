"""How a target is configured: flags and GALLEY_TARGET_* environment."""

from __future__ import annotations

from pydantic import Field

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
    max_kv_tokens: int = Field(
        default=65536,
        ge=1,
        description="Tokens of KV kept over all sessions; at least one context window is.",
    )
    max_draft_tokens: int = Field(default=16, ge=0, le=256, description="Most draft tokens in one item.")
