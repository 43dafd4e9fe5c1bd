"""Define the settings of a draft replica: flags, or GALLEY_DRAFT_* in the environment."""

from __future__ import annotations

from pathlib import Path  # pydantic reads the annotation
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from galley.common.config.settings import settings_config
from galley.common.models.files import DEFAULT_MODEL
from galley.common.registry.registration import ReplicaSettings
from galley.core.versions.state import check_version

_MIB = 1 << 20


def _check_version(version: str) -> str:
    return check_version(version) if version else ""


class DraftSettings(ReplicaSettings):
    model_config = settings_config("GALLEY_DRAFT_")

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Draft model with the target's tokenizer: a hub id, a directory or a GGUF file. Without "
        "one, `model`, `features` and `hybrid` are not offered. `features` replaces `model` for a draft that "
        "reads its target's states.",
    )
    target_model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="Target model whose embeddings a trained draft uses: hub id, directory or GGUF file.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Target's tokenizer, for a draft without --model: a hub id or a directory.",
    )
    default_strategy: Literal["ngram", "model", "features", "hybrid", "oracle", "none"] = Field(
        default="ngram",
        description="Strategy of requests that name none. For a draft that reads its target's states it is "
        "`features` if not set.",
    )
    oracle_answers: Path | None = Field(
        default=None,
        description='For tests: file of known sessions, one object {"tokens": [...]} a line.',
    )
    oracle_spoil: float = Field(default=0.0, ge=0, le=1, description="For tests: chance of a wrong token.")
    max_draft_tokens: int = Field(
        default=64, ge=1, le=256, description="Largest number of draft tokens in a proposal."
    )
    max_batch: int = Field(
        default=64,
        ge=1,
        description="Most sessions in one step of the model. If more wait, the oldest requests go first.",
    )
    max_sessions: int = Field(
        default=256, ge=1, le=65536, description="Most sessions whose tokens and KV are cached."
    )
    max_kv_tokens: int = Field(default=65536, ge=1, description="Most cached tokens, all sessions together.")
    shared_answers_ttl_s: float = Field(
        default=900.0,
        ge=0,
        le=86400,
        description="Time for which recent answers are kept in Redis for the other drafts of the pool, in "
        "seconds. 0 shares none, as does a draft without --redis-url.",
    )

    version: Annotated[str, AfterValidator(_check_version)] = Field(
        default="",
        description="Name of the version of this draft, by which sessions are split between drafts: letters, "
        "digits and . _ -. Empty: the digest of its weights.",
    )
    max_load_mib: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="Largest trained draft that this replica accepts in place of its own while it runs, in "
        "MiB. Until it serves, both are in memory, and its files in the temporary directory. 0 accepts none.",
    )

    @property
    def max_load_bytes(self) -> int:
        return self.max_load_mib * _MIB

    @property
    def shares_answers(self) -> bool:
        return bool(self.redis_url.get_secret_value()) and self.shared_answers_ttl_s > 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_strategy in ("model", "features", "hybrid") and self.model is None:
            raise ValueError(f"--default-strategy: must not be {self.default_strategy} without --model")
        if self.max_load_mib and self.model is None:
            raise ValueError("--max-load-mib: requires --model")
        if self.default_strategy == "oracle" and self.oracle_answers is None:
            raise ValueError("--default-strategy: must not be oracle without --oracle-answers")
        return self
