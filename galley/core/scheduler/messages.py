"""Inputs and outputs of the target's scheduler: plain values, without the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from galley.core.content import Miss, SessionKey
from galley.core.errors import GalleyError
from galley.core.features import NO_STATES, States
from galley.core.grammar.spec import GrammarSpec
from galley.core.hints import Hint
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.trees import CHAIN, Parents
from galley.core.values import value

if TYPE_CHECKING:
    from galley.core.grammar.compiled import (
        CompiledGrammar,  # imports llguidance, which a gateway may not need
    )


@dataclass(frozen=True, slots=True)
class Slice:
    """Confirmed tokens [start, start + len(tokens)) of a session, and the rules of its next tokens.

    The output of a session with a `grammar_hash` has a grammar; a slice that starts at 0 brings it.
    """

    key: SessionKey
    start: int
    tokens: Sequence[int]
    prefix_hash: bytes
    prompt_len: int
    max_position: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    grammar: GrammarSpec | None = None
    grammar_hash: bytes = b""

    @property
    def position(self) -> int:
        """Return the position of the first token that is not confirmed yet."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class VerifyRequest(Slice):
    """A validated request: a slice of a session, and draft tokens for what follows.

    `credit` is how many tokens may be confirmed after the first result without a new request. `hint_due`: a
    hint is being drafted. At most `max_verified` draft tokens are verified in a step; 0 means as many as pay.
    `arrival_ns` (Unix epoch) and `priority` order sessions: the higher priority first, then the older.
    `deadline_ns` is on the scheduler's clock. `logprobs` is how many of the likeliest tokens to return.
    `lora` names a LoRA adapter, which the salt in `key` covers. `compiled` is the grammar, if there is one.
    Results carry the target's states after `feature_layers`; none if that is empty. `block_hashes` are those
    of the full blocks of [0, position), or empty: then the scheduler computes those that it needs.
    """

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    parents: Parents = CHAIN
    credit: int = 0
    hint_due: bool = False
    max_verified: int = 0
    logprobs: int | None = None
    arrival_ns: int = 0
    priority: int = 0
    deadline_ns: int | None = None
    lora: str = ""
    compiled: CompiledGrammar | None = None
    feature_layers: tuple[int, ...] = ()
    block_hashes: Sequence[bytes] = ()

    @property
    def limit(self) -> int:
        """Return the position that no token may reach without a new request."""
        return self.position + len(self.draft_tokens) + 1 + self.credit


@value
class Extend:
    """An extension of an open request. `limit` is never lowered; a `hint` of None keeps the one before."""

    limit: int = 0
    hint: Hint | None = None
    hint_due: bool = False

    def then(self, later: Extend) -> Extend:
        """Return the extension that does what this one and a later one do."""
        return Extend(max(self.limit, later.limit), later.hint or self.hint, later.hint_due)


@value
class Confirmed:
    """Tokens from `position` on: `accepted` of the `verified` draft tokens, then at most one of the target's.

    The draft tokens may be a tree, of which only one path is accepted.

    The cache holds `kv_len` tokens. With `more`, further results follow. Times count from the last result, or
    from the arrival. `linger_ns`, a part of `queue_ns`, was spent waiting for hints. Estimates: a draft row
    adds `row_ns` to a step of `batch_sessions`; rows of prompts took `prefill_ns` of the step; `plain_ns` is
    `compute_ns` without draft tokens. `kv_reused`, the cached tokens found when blocks were allocated, is in
    the first result only. `batch_span` names the step in a trace. `states`, if wanted, are of consecutive
    tokens; the last is that of the token before the last of `tokens`.
    """

    position: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    logprobs: tuple[PositionLogprobs, ...]
    kv_len: int
    batch_sessions: int
    more: bool
    queue_ns: int
    compute_ns: int
    linger_ns: int = 0
    row_ns: int = 0
    prefill_ns: int = 0
    plain_ns: int = 0
    batch_rows: int = 0
    kv_reused: int = 0
    batch_span: bytes = b""
    states: States = NO_STATES


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer request of the session arrived; this one was at `position`, after a prefix of this hash."""

    position: int
    prefix_hash: bytes


# All but a Confirmed with `more` end their request. An error concerns its own request alone.
Outcome: TypeAlias = "Confirmed | Superseded | Miss | GalleyError"


@value
class Response:
    """An outcome of the request that `Scheduler.submit` numbered `request_id`.

    With `preempted`, it is a cache miss because blocks or session slots ran out.
    """

    request_id: int
    outcome: Outcome
    preempted: bool = False

    @property
    def is_last(self) -> bool:
        return not (isinstance(self.outcome, Confirmed) and self.outcome.more)


@value
class BatchInfo:
    """The step in progress, for tracing: which requests share it, and what its rows are for.

    Nothing is drawn after `prefill_rows`. Sessions that lost their blocks since the last step: `preempted`
    with a request, `evicted` without.
    """

    request_ids: tuple[int, ...]
    rows: int
    draft_rows: int
    prefill_rows: int
    free_blocks: int
    queue_depth: int
    preempted: tuple[str, ...]
    evicted: tuple[str, ...]
