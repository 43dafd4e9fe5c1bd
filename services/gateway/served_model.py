"""The model that a gateway serves: descriptions of targets and drafts, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from galley.core.answer.answer import SessionSpec
from galley.core.names import STRATEGIES
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.drafts import DraftPool
from services.gateway.replicas.targets import TargetPool
from services.gateway.request.validate import GenerateSpec, Limits, Model

if TYPE_CHECKING:
    from galley.common.models.tokenizer import Tokenizer

_FIXED_K = 4
"""Draft tokens a round in mode FIXED, where the request gives no number."""


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
        """Return the description that holds for all targets."""
        return self.targets.info

    def request_model(self) -> Model:
        """Return what requests are validated against."""
        return Model(self.name, self.info.context_window, self.info.vocab_size, self._strategies())

    def _strategies(self) -> tuple[str, ...]:
        """Return the strategies of the drafts; all known ones until a draft was met."""
        return self.drafts.strategies or STRATEGIES

    def spec(
        self, request: GenerateSpec, session_id: str, arrival_ns: int, tenant_salt: bytes
    ) -> SessionSpec:
        """Return the session of a request."""
        k, auto, strategy = self._speculation(request)
        own_ends = () if request.ignore_eos else self.info.eos_token_ids
        return SessionSpec(
            session_id=session_id,
            prompt=tuple(request.prompt),
            sampling=request.sampling,
            max_position=request.max_position,
            vocab_size=self.info.vocab_size,
            stop_token_ids=frozenset({*request.stop_token_ids, *own_ends}),
            stop_strings=tuple(request.stop),
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            k=k,
            auto=auto,
            strategy=strategy,
            workload=request.workload,
            arrival_ns=arrival_ns,
            priority=request.priority,
            tenant_salt=tenant_salt,
            continue_without_client=request.continue_without_client,
        )

    def _speculation(self, request: GenerateSpec) -> tuple[int, bool, str]:
        """Return the most draft tokens a round, True if fewer may be proposed, and the strategy."""
        speculation = request.speculation
        strategy = speculation.strategy or self.default_strategy
        if speculation.mode == "off":
            return 0, False, ""
        if speculation.mode == "fixed":
            return min(_FIXED_K, self.default_k) if speculation.k is None else speculation.k, False, strategy
        return self.default_k if speculation.k is None else min(speculation.k, self.default_k), True, strategy

    def describe(self) -> pb.GetModelInfoResponse:
        """Return the public description of the model."""
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
