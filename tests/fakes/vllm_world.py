"""A target over a stub of vLLM's engine core: the fuzzed world, and one in which all requests complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from galley.core.content import SessionKey
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken, Unavailable
from galley.core.step import Draw, Sampled, StepOutcome, StepPlan
from services.target.engine.protocol import Limits
from services.target.engine.vllm.target import VllmTarget
from tests.fakes.fuzz_world import TICK_NS, TIMES, FuzzSize, FuzzWorld
from tests.fakes.scheduler_world import FLAT, Bench, request
from tests.fakes.stepped_core import STUB_POISON, STUB_STOP, STUB_VOCAB, StubCore, stub_outcome
from tests.fakes.truth import true_id

STUB = FuzzSize(
    vocab=STUB_VOCAB,
    context=96,
    blocks=24,
    sessions=8,
    prompt_tokens=40,
    max_rows=24,
    stop=STUB_STOP,
    poison=STUB_POISON,
)
STEPS = 60
CHECK_EVERY = 10
_BLOCK_TOKENS = 4
_LIMITS = Limits(max_sessions=8, max_waiting=12, max_rows=STUB.max_rows, max_linger_ms=TICK_NS / 1e6)


def check_target(target: VllmTarget, core: StubCore) -> None:
    """Check that vLLM has no sequence but those of sessions, and those that the next step ends."""
    kv, sessions = target.kv, target._sessions
    known = [*sessions._live.values(), *sessions._idle.values()]
    left = core.ids - {session.id for session in known} - {*sessions._ended}
    assert not left or target._batch is not None, f"sequences {left} are left behind"
    assert len(known) <= min(target.limits.max_sessions, core.max_sequences)
    assert kv.live_blocks + kv.free == kv.total
    assert 0 <= kv.empty <= kv.total
    assert set(kv.cached_prefixes(kv.total)) == core.cached_prefixes


def forget_all(target: VllmTarget, now: int) -> None:
    """Forget all sessions and serve one more: vLLM then has its sequence alone."""
    target.abandon(Unavailable("the end"))
    target.submit(request([2, 3]), now)
    plan = target.plan(now)
    assert isinstance(plan, StepPlan)
    target.conclude(plan, target.run(plan), now)


class VllmWorld(FuzzWorld):
    cuts_drafts = True

    def __init__(self, seed: int) -> None:
        self.core = StubCore(
            blocks=STUB.blocks,
            block_tokens=_BLOCK_TOKENS,
            max_rows=STUB.max_rows,
            max_sequences=_LIMITS.max_sessions - 2,
            max_draft_tokens=6,
            context_window=STUB.context,
        )
        self.target = VllmTarget(self.core, TIMES, _LIMITS)
        super().__init__(self.target, STUB, seed)

    def check(self) -> None:
        check_target(self.target, self.core)

    def check_empty(self, keys: Sequence[SessionKey]) -> None:  # all sessions are dropped
        forget_all(self.target, self._now)
        assert len(self.core.ids) == 1
        self.check()

    def happened(self) -> Counter[str]:
        return self.counts.happened + Counter(
            {
                "steps": self.core.steps,
                "tokens checked": self.counts.tokens_checked,
                "accepted": self.counts.accepted,
                "preempted by vLLM": self.core.preempted,
                "reused tokens": self.target.counts.reused_tokens,
                "evicted blocks": self.target.kv.evicted_blocks,
            }
        )

    def run(self, plan: StepPlan) -> Sequence[StepOutcome]:
        self._rows_before = self.core.rows
        return self.target.run(plan)

    def fed_rows(self, plan: StepPlan) -> int:  # vLLM plans itself
        return self.core.rows - self._rows_before

    def fresh(self, draw: Draw) -> StepOutcome:
        return stub_outcome(draw)


def run_schedule(seed: int) -> VllmWorld:
    """Run a random schedule to its end; raise AssertionError if an answer is wrong or anything is left."""
    world = VllmWorld(seed)
    world.play(STEPS, check_every=CHECK_EVERY)
    return world


class VllmBench(Bench):
    """A bench whose scheduler is a `VllmTarget`; tokens are the same as over the known engine."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        max_sessions: int = 16,
        times: StepTimes = FLAT,
        max_rows: int = 64,
        max_waiting: int = 64,
        max_linger_ns: int = 0,
        max_draft_tokens: int = 8,
        max_sequences: int | None = None,
        draw: Callable[[Draw], Sampled | Broken] | None = None,
    ) -> None:
        super().__init__(times=times)
        self.core = StubCore(
            blocks=blocks,
            max_rows=max_rows,
            max_sequences=max_sequences or max_sessions,
            max_draft_tokens=max_draft_tokens,
            draw=draw or _true_outcome,
        )
        limits = Limits(
            max_sessions=max_sessions,
            max_waiting=max_waiting,
            max_rows=max_rows,
            max_linger_ms=max_linger_ns / 1e6,
        )
        self.target = VllmTarget(self.core, times, limits)
        self.scheduler = self.engine = self.target

    def check(self) -> None:
        check_target(self.target, self.core)


def _true_outcome(draw: Draw) -> Sampled | Broken:
    tokens: list[int] = []
    for draft in (*draw.draft_tokens, -1):
        tokens.append(true_id([*draw.history, *tokens]))
        if tokens[-1] != draft:
            break
    return Sampled(tuple(tokens))
