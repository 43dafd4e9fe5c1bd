"""Check that a target fits, so that every answer under the served name is that of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.errors import GalleyError, TokenizerMismatch, Unavailable
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb


@dataclass(frozen=True, slots=True)
class TargetRequirements:
    """`models` has entries NAME, or NAME@DIGEST for these weights of the model only.

    `max_draft_tokens` is the largest number of draft tokens that the gateway would send.
    """

    tokenizer_hash: str
    models: Sequence[str]
    max_draft_tokens: int

    def fault_in(
        self, info: pb.GetTargetInfoResponse | TargetLease, others: pb.GetTargetInfoResponse
    ) -> GalleyError | None:
        """Return why a target cannot serve the same requests as the `others`; their fields are 0 at first."""
        if info.tokenizer_hash != self.tokenizer_hash:
            return TokenizerMismatch(self.tokenizer_hash, info.tokenizer_hash, "gateway")
        if not {info.model, f"{info.model}@{info.weights_digest}"} & set(self.models):
            served = f"{info.model}@{info.weights_digest or 'unknown'}"
            return Unavailable(f"model: must be {' or '.join(self.models)} (--target-models), got {served}")
        if others.vocab_size not in {0, info.vocab_size}:
            return Unavailable(
                f"vocab_size: must be {others.vocab_size} as at the other targets, got {info.vocab_size}"
            )
        needed = min(self.max_draft_tokens, others.max_draft_tokens)
        if info.max_draft_tokens < needed:
            return Unavailable(f"max_draft_tokens: must be >= {needed}, got {info.max_draft_tokens}")
        return None
