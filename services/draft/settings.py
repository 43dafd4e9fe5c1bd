"""How a draft is configured: flags and GALLEY_DRAFT_* environment."""

from __future__ import annotations

from pathlib import Path  # pydantic reads the annotation
from typing import Literal, Self

from pydantic import Field, model_validator

from galley.common.config.defaults import DEFAULT_MODEL
from galley.common.config.settings import settings_config
from galley.common.registry.settings import ReplicaSettings


class DraftSettings(ReplicaSettings):
    """What the draft process can be told."""

    model_config = settings_config("GALLEY_DRAFT_")

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id, or directory or GGUF file of a model with the target's tokenizer; "
        "without one the strategies `model` and `hybrid` are not offered.",
    )
    target_model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="Hub id, directory or GGUF file of the target: whose embeddings a trained draft takes.",
    )
    tokenizer: Path | None = Field(
        default=None, description="Directory of the target's tokenizer.json, where no model is given."
    )
    default_strategy: Literal["ngram", "model", "hybrid", "oracle", "none"] = Field(
        default="ngram", description="Strategy of items that name none."
    )
    oracle_answers: Path | None = Field(
        default=None, description='File of known sessions, a JSON object {"tokens": [...]} a line; for tests.'
    )
    oracle_spoil: float = Field(default=0.0, ge=0, le=1, description="Chance that the oracle spoils a token.")
    max_draft_tokens: int = Field(
        default=64, ge=1, le=256, description="Most tokens that an item may ask for."
    )
    max_batch: int = Field(
        default=64,
        ge=1,
        description="Sessions that one step of a model drafts for; of more, the oldest items go first.",
    )
    max_sessions: int = Field(
        default=256, ge=1, le=65536, description="Sessions whose tokens and KV are kept."
    )
    max_kv_tokens: int = Field(default=65536, ge=1, description="Tokens kept over all sessions.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_strategy in ("model", "hybrid") and self.model is None:
            raise ValueError(f"--default-strategy {self.default_strategy} needs --model")
        if self.default_strategy == "oracle" and self.oracle_answers is None:
            raise ValueError("--default-strategy oracle needs --oracle-answers")
        return self
