"""How a target is configured: flags and GALLEY_TARGET_* environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.common.config import ServiceSettings, settings_config
from services.common.defaults import DEFAULT_MODEL


class TargetSettings(ServiceSettings):
    """What the target process can be told."""

    model_config = settings_config("GALLEY_TARGET_")

    model: str = Field(
        default=DEFAULT_MODEL, min_length=1, description="Hub id, or directory or GGUF file of the model."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Of weights and KV; auto is bfloat16 where the device computes in it, else float32.",
    )
    device: str = Field(default="cpu", min_length=1, description="Torch device, such as cpu or cuda:0.")
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Threads of the CPU kernels; more than one stalls beside other busy processes.",
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
    max_waiting: int = Field(
        default=1024, ge=1, description="Most items that wait for a step; more are refused."
    )
