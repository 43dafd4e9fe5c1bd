"""What the target's scheduler is asked and what it answers: plain values, without the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from galley.core.content import Miss, SessionKey
from galley.core.errors import GalleyError
from galley.core.hints import Hint
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A validated item: confirmed `tokens` from absolute position `start` on, and guesses for what follows.

    `credit` is how many tokens may be confirmed unasked after the first result; `hint_due` says that a hint
    is being drafted; at most `max_verified` draft tokens are verified in a pass, 0 being as many as pay.
    `arrival_ns` (of the Unix epoch) and `priority` order sessions: the higher priority goes first, then
    the older. `deadline_ns` is of the scheduler's own clock. `logprobs` asks for so many of the likeliest.
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
    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    credit: int = 0
    hint_due: bool = False
    max_verified: int = 0
    logprobs: int | None = None
    arrival_ns: int = 0
    priority: int = 0
    deadline_ns: int | None = None

    @property
    def position(self) -> int:
        """Of the first token that is not confirmed yet: n."""
        return self.start + len(self.tokens)

    @property
    def limit(self) -> int:
        """No token stands unasked at or beyond this position."""
        return self.position + len(self.draft_tokens) + 1 + self.credit


@dataclass(frozen=True, slots=True)
class Extend:
    """Tells more of an item that runs on its credit; `limit` is never lowered, None as `hint` keeps it."""

    limit: int = 0
    hint: Hint | None = None
    hint_due: bool = False


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Tokens from `position` on: `accepted` of the `verified` draft tokens, then at most one of the target's.

    `kv_len` is how far the cache reaches; `batch_sessions` shared the forward pass; `more` results follow.
    The times are of what led to this result alone; `linger_ns`, of `queue_ns`, went on waiting for hints.
    `row_ns` is what a draft row more adds to a pass of so many sessions, and `prefill_ns` what the rows of
    prompts took of this one, which fed `batch_rows` rows. `plain_ns` is about what `compute_ns` would have
    been had no session of the pass had a draft token. `kv_reused`: of an item's first result, how many
    tokens of its prefix had their KV before. `batch_span` names the pass in a trace; empty where it has none.
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


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer item of the session came: it stood at `position`, with this hash of all tokens before."""

    position: int
    prefix_hash: bytes


# All but a Confirmed with `more` close their item. An error is the outcome of its own item alone.
Outcome: TypeAlias = "Confirmed | Superseded | Miss | GalleyError"


@dataclass(frozen=True, slots=True)
class Response:
    """An outcome of the item that `Scheduler.submit` named `item`.

    `preempted`: a cache miss because its blocks went to an older session, or there were none for it.
    """

    request_id: int
    outcome: Outcome
    preempted: bool = False

    @property
    def is_last(self) -> bool:
        """Nothing further comes of this item."""
        return not (isinstance(self.outcome, Confirmed) and self.outcome.more)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What is worth telling of a pass that is under way: which `items` share it, and what its rows are for.

    Of its `rows`, `draft_rows` are draft tokens, and after `prefill_rows` nothing is drawn: those of prompts,
    and of sessions that come from elsewhere. The sessions named have lost their blocks since the pass before:
    the `preempted` while they had an item, the `evicted` while they had none.
    """

    request_ids: tuple[int, ...]
    rows: int
    draft_rows: int
    prefill_rows: int
    free_blocks: int
    queue_depth: int
    preempted: tuple[str, ...]
    evicted: tuple[str, ...]
