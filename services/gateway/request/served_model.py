"""The model that a gateway serves: what targets and drafts say of themselves, and the tokenizer that fits."""

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

# Of a request that fixes it, and does not say at what.
_FIXED_K = 4


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
        """What the targets said of themselves when they were last met."""
        return self.targets.info

    def request_model(self) -> Model:
        """What a request is checked against."""
        return Model(self.name, self.info.context_window, self.info.vocab_size, self._strategies())

    def _strategies(self) -> tuple[str, ...]:
        """The drafts', once one has told them; until then every name may turn out to be one."""
        return self.drafts.strategies or STRATEGIES

    def spec(self, asked: GenerateSpec, session_id: str, arrival_ns: int, tenant_salt: bytes) -> SessionSpec:
        """The session that a request asks for."""
        k, auto, strategy = self._speculation(asked)
        own_ends = () if asked.ignore_eos else self.info.eos_token_ids
        return SessionSpec(
            session_id=session_id,
            prompt=tuple(asked.prompt),
            sampling=asked.sampling,
            max_position=asked.max_position,
            vocab_size=self.info.vocab_size,
            stop_token_ids=frozenset({*asked.stop_token_ids, *own_ends}),
            stop_strings=tuple(asked.stop),
            min_tokens=asked.min_tokens,
            logprobs=asked.logprobs,
            k=k,
            auto=auto,
            strategy=strategy,
            workload=asked.workload,
            arrival_ns=arrival_ns,
            priority=asked.priority,
            tenant_salt=tenant_salt,
            continue_without_client=asked.continue_without_client,
        )

    def _speculation(self, asked: GenerateSpec) -> tuple[int, bool, str]:
        """The most draft tokens a round, whether fewer may be asked for, and the strategy."""
        wanted = asked.speculation
        strategy = wanted.strategy or self.default_strategy
        if wanted.mode == "off":
            return 0, False, ""
        if wanted.mode == "fixed":
            return min(_FIXED_K, self.default_k) if wanted.k is None else wanted.k, False, strategy
        return self.default_k if wanted.k is None else min(wanted.k, self.default_k), True, strategy

    def describe(self) -> pb.GetModelInfoResponse:
        """What clients may know."""
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
