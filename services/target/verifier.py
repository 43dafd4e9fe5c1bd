"""The target's engine of today: one ragged forward pass over all sessions, a KV cache for each.

A step feeds about MAX_NEW_ROWS tokens: a long prompt takes several steps, and the others wait for one of them
at a time.

A step, for each job: look up what the cache holds *in content*, feed what it lacks and the draft tokens,
sample the target's own token at every position, confirm what agrees, and cut the cache back to what is
confirmed. The last confirmed token is always fed: its KV is computed together with the guesses after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.batching import Unfinished
from services.common.sessions import SessionTable
from services.common.status import log_internal
from services.core.acceptance import confirm
from services.core.content import Miss, look_up
from services.core.errors import GalleyError, Unavailable
from services.engine.model import Rows
from services.engine.sampling import SamplingContext, logprobs, sample
from services.target.engine import Confirmed, EngineInfo, VerifyJob, VerifyOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.common.slices import SessionKey
    from services.engine.model import CausalModel, SessionCache


MAX_NEW_ROWS = 512
"""Prefill gets what the jobs before it in the step have left of this."""

ALWAYS_ROWS = 32
"""So few rows, a verification's or a short prompt's, never wait for another step."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A job that takes part in the pass; `rows` has `1 + len(draft_tokens)` rows of logits wanted, or none.

    None where the step only brings the cache nearer to the position: the job is not finished with it.
    """

    job: VerifyJob
    cache: SessionCache
    tokens: list[int]  # all that are confirmed, from absolute position 0
    draft_tokens: tuple[int, ...]
    rows: Rows


class Verifier:
    """A `VerifyEngine` over a `CausalModel`; at most `max_kv_tokens` of KV over at most `max_sessions`."""

    def __init__(
        self,
        model: CausalModel,
        fingerprint: str,
        *,
        max_sessions: int,
        max_kv_tokens: int,
        max_new_rows: int = MAX_NEW_ROWS,
    ) -> None:
        self._model = model
        self._max_new_rows = max_new_rows
        self._info = _engine_info(model, fingerprint)
        self._sessions: SessionTable[SessionCache] = SessionTable(
            model.new_cache,
            max_sessions=max_sessions,
            max_tokens=max(max_kv_tokens, self._info.context_window),
        )

    @property
    def info(self) -> EngineInfo:
        """What the model is."""
        return self._info

    def step(self, jobs: Sequence[VerifyJob]) -> list[VerifyOutcome | Unfinished]:
        """See `VerifyEngine.step`."""
        busy = frozenset(job.slice.key for job in jobs)
        plans: list[_Plan | Miss | GalleyError | Unfinished] = []
        budget = self._max_new_rows
        for job in jobs:
            plan = self._plan(job, busy, budget)
            plans.append(plan)
            budget -= len(plan.rows.tokens) if isinstance(plan, _Plan) else 0
        logits = iter(self._forward([plan for plan in plans if isinstance(plan, _Plan)]))
        batch = sum(isinstance(plan, _Plan) for plan in plans)
        return [
            self._conclude(plan, next(logits), batch) if isinstance(plan, _Plan) else plan for plan in plans
        ]

    def _plan(
        self, job: VerifyJob, busy: frozenset[SessionKey], budget: int
    ) -> _Plan | Miss | GalleyError | Unfinished:
        """What to feed, or why nothing is."""
        asked = job.slice
        cache = self._sessions.peek(asked.key)
        found = look_up(cache.tokens if cache else (), asked.start, asked.tokens, asked.prefix_hash)
        if isinstance(found, Miss):
            return found
        room = asked.max_position - asked.position - 1
        draft_tokens = job.draft_tokens[:room]
        try:
            cache = self._sessions.admit(asked.key, asked.position + len(draft_tokens), busy)
        except GalleyError as overloaded:
            return overloaded
        keep = min(found.agree, asked.position - 1)
        tokens = [*cache.tokens[: asked.start], *asked.tokens]
        cache.truncate(keep)
        fed = [*tokens[keep:], *draft_tokens]
        wanted = 1 + len(draft_tokens)
        if len(fed) > max(budget, ALWAYS_ROWS):
            room = budget - wanted  # less than the confirmed tokens, so that the last of them waits
            if room < ALWAYS_ROWS:
                return Unfinished()
            fed, wanted = tokens[keep : keep + room], 0
        return _Plan(job, cache, tokens, draft_tokens, Rows(cache, fed, wanted))

    def _forward(self, plans: list[_Plan]) -> list[Tensor]:
        """The logits of each plan, float32 [1 + draft tokens, vocab]."""
        if not plans:
            return []
        try:
            return self._model.forward([plan.rows for plan in plans])
        except BaseException:
            # How far the caches came is unknown.
            for plan in plans:
                self._sessions.drop(plan.job.slice.key)
            raise

    def _conclude(self, plan: _Plan, logits: Tensor, batch: int) -> VerifyOutcome | Unfinished:
        """Sample, confirm, cut the cache; an error costs this session its cache and no other anything."""
        if plan.rows.want_logits == 0:
            return Unfinished()
        try:
            return self._confirm(plan, logits, batch)
        except Exception as error:  # noqa: BLE001  # one session must not fail the others
            log_internal(error, session_id=plan.job.slice.key[1])
            self._sessions.drop(plan.job.slice.key)
            return error if isinstance(error, GalleyError) else Unavailable("sampling failed")

    def _confirm(self, plan: _Plan, logits: Tensor, batch: int) -> Confirmed:
        asked, position = plan.job.slice, plan.job.slice.position
        context = SamplingContext(
            asked.sampling, plan.tokens, asked.prompt_len, asked.stop_token_ids, asked.min_tokens
        )
        verdict = confirm(
            plan.draft_tokens,
            sample(logits, context, plan.draft_tokens),
            position=position,
            max_position=asked.max_position,
            stop_token_ids=asked.stop_token_ids,
            output_len=position - asked.prompt_len,
            min_tokens=asked.min_tokens,
        )
        top = plan.job.logprobs
        # The cache keeps what is confirmed but for the last token, which the next step feeds.
        plan.cache.truncate(position + len(verdict.tokens) - 1)
        self._sessions.resize(asked.key, len(plan.cache.tokens))
        return Confirmed(
            position=position,
            tokens=verdict.tokens,
            accepted=verdict.accepted,
            verified=len(plan.draft_tokens),
            logprobs=() if top is None else tuple(logprobs(logits, verdict.tokens, top)),
            kv_len=len(plan.cache.tokens),
            batch_sessions=batch,
        )


def _engine_info(model: CausalModel, fingerprint: str) -> EngineInfo:
    info = model.info
    return EngineInfo(
        model=info.name,
        tokenizer_hash=info.tokenizer_hash,
        context_window=info.context_window,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        fingerprint=fingerprint,
        deterministic=info.deterministic,
        dtype=info.dtype,
        device=info.device,
    )
