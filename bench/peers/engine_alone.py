"""A target's engine in one process: no gateway, no gRPC, no Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from galley.core.content import prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken
from galley.core.hints import Hint
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Extend, Response, VerifyRequest
from galley.core.step import StepPlan
from services.target.engine.protocol import TargetEngine

# A row costs nothing by these, so that every draft token is verified.
FREE_ROWS = StepTimes.measured([(1, 1_000_000)])


@dataclass(slots=True)
class Heard:
    """An answer as it comes: tokens, and when each came, in seconds from its request.

    `drafts[i]` are the draft tokens for output position i and those after it. So far `accepted` of `verified`
    were accepted.
    """

    began_s: float
    prompt: Sequence[int] = ()
    drafts: Sequence[Sequence[int]] = ()
    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    verified: int = 0
    accepted: int = 0

    @property
    def next_draft(self) -> tuple[int, ...]:
        at = len(self.tokens)
        return tuple(self.drafts[at]) if at < len(self.drafts) else ()


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one step, and of the engine within it."""

    whole_s: float
    engine_s: float


class EngineAlone:
    """Decode many sessions at once, each with credit to its end, and with draft tokens known beforehand."""

    def __init__(self, engine: TargetEngine, eos_token_ids: Sequence[int] | None = None) -> None:
        """Decode with `engine`; answers end at the model's own end tokens if none are given."""
        self._engine = engine
        self._eos = frozenset(engine.info.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._heard: dict[int, Heard] = {}
        self._count = 0

    @property
    def running(self) -> int:
        """Return the number of unfinished sessions."""
        return len(self._heard)

    @property
    def unheard(self) -> int:
        """Return the number of unfinished sessions without a token."""
        return sum(not heard.tokens for heard in self._heard.values())

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        drafts: Sequence[Sequence[int]] = (),
    ) -> Heard:
        """Add a session; return its answer, which grows from step to step."""
        self._count += 1
        heard = Heard(time.perf_counter(), prompt, drafts)
        request = VerifyRequest(
            key=(b"", str(self._count)),
            start=0,
            tokens=tuple(prompt),
            prefix_hash=prefix_hash(()),
            prompt_len=len(prompt),
            max_position=len(prompt) + max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            stop_token_ids=self._eos,
            draft_tokens=heard.next_draft,
            survival=(1.0,) * len(heard.next_draft),
            credit=max_tokens,
            arrival_ns=time.time_ns(),
        )
        self._heard[self._engine.submit(request, time.perf_counter_ns())] = heard
        return heard

    def step(self) -> PassTime:
        """Run one step over all sessions. Raises the error with which a session ended."""
        began_s = time.perf_counter()
        plan = self._engine.plan(time.perf_counter_ns())
        engine_s = 0.0
        if isinstance(plan, StepPlan):
            before_s = time.perf_counter()
            outcomes = self._engine.run(plan)
            engine_s = time.perf_counter() - before_s
            self._engine.conclude(plan, outcomes, time.perf_counter_ns())
        for answer in self._engine.take_responses():
            self._note(answer)
        return PassTime(time.perf_counter() - began_s, engine_s)

    def _note(self, answer: Response) -> None:
        outcome = answer.outcome
        heard = self._heard[answer.request_id]
        if isinstance(outcome, Confirmed):
            heard.tokens += outcome.tokens
            heard.at_s += [time.perf_counter() - heard.began_s] * len(outcome.tokens)
            heard.verified += outcome.verified
            heard.accepted += outcome.accepted
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            raise Broken(f"a session lost its place: {outcome}")
        if answer.is_last:
            del self._heard[answer.request_id]
        elif heard.drafts:
            self._hint(answer.request_id, heard)

    def _hint(self, request_id: int, heard: Heard) -> None:
        tokens, draft = [*heard.prompt, *heard.tokens], heard.next_draft
        hint = Hint(len(tokens), prefix_hash(tokens), draft, (1.0,) * len(draft))
        self._engine.extend(request_id, Extend(hint=hint), time.perf_counter_ns())
