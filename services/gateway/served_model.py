"""The model that a gateway serves: descriptions of targets and drafts, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from galley.core.names import STRATEGIES
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.targets import TargetPool
from services.gateway.request.validate import Limits, Model

if TYPE_CHECKING:
    from galley.common.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`default_k` is the most draft tokens a round under AUTO, and `default_strategy` its strategy."""

    name: str
    targets: TargetPool
    tokenizer: Tokenizer
    drafts: DraftPool
    limits: Limits
    max_sessions: int
    default_k: int
    default_strategy: str

    @property
    def info(self) -> pb.GetTargetInfoResponse:
        return self.targets.info

    def request_model(self) -> Model:
        """Return what requests are validated against; all known strategies until a draft was met."""
        return Model(
            self.name,
            self.info.context_window,
            self.info.vocab_size,
            self.drafts.strategies or STRATEGIES,
            tuple(self.info.eos_token_ids),
            self.default_k,
            self.default_strategy,
        )

    def describe(self) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=self.name,
            context_window=self.info.context_window,
            vocab_size=self.info.vocab_size,
            tokenizer_hash=self.info.tokenizer_hash,
            fingerprint=self.info.fingerprint,
            deterministic=self.info.deterministic,
            max_draft_tokens=self.limits.max_draft_tokens,
            strategies=self.drafts.strategies,
            dtype=self.info.dtype,
            device=self.info.device,
            max_sessions=self.max_sessions,
        )
