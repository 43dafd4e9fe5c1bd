"""The replicas of the simulation: the real services of target and draft, over engines that know the truth."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

from galley.common.models.grammars import ReplicaGrammars
from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL
from galley.common.registry.registration import Registration
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.cost.model import StepTimes
from galley.core.features import NO_STATES
from galley.core.routing.choice import DraftLease
from galley.core.step import StepOutcome, StepPlan, StepTrace
from galley.core.trees import ROOT, best_first, path_to
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.loop import DraftLoop
from services.draft.servicer import DraftService
from services.draft.strategies.base import DraftJob, DraftSession, Proposal
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService
from tests.fakes.engine import KnownEngine
from tests.fakes.states import SIZE, states_of
from tests.simulation.grammars import STOP, VOCAB, VOCABULARY, allowed_after, may_follow
from tests.simulation.ledger import BLOCK_TOKENS, Ledger
from tests.simulation.schedule import MOST_K
from tests.simulation.system.call import Server
from tests.simulation.system.loop import Process
from tests.simulation.system.redis import SimRegistry
from tests.simulation.truth import true_next, true_token

if TYPE_CHECKING:
    from tests.simulation.world import World

TOKENIZER = "tokenizer-1"
MOST_DRAFT_TOKENS = MOST_K
BLOCKS = 24
WINDOW = BLOCKS * BLOCK_TOKENS
_MS = 1_000_000
PASS_TIMES = StepTimes.measured([(1, 50 * _MS), (512, 60 * _MS)])
READERS = ("draft-0", "draft-2")
"""The drafts that read the target's states after these layers; other drafts of a schedule read none."""
FEATURE_LAYERS = (1, 4, 8)
_RIGHT = 0.8
_CYCLIC = 0.1
"""The share of trees of draft tokens that are none."""
_FORBIDDEN = 0.85
"""Of a session with a grammar, the bound between wrong tokens that it does not allow, and those it does."""


class SimEngine(KnownEngine):
    def __init__(self, build: str) -> None:
        super().__init__(
            tokenizer_hash=TOKENIZER,
            context_window=WINDOW,
            vocab_size=VOCAB,
            eos_token_ids=(STOP,),
            fingerprint=build,
            kv_block_tokens=BLOCK_TOKENS,
            kv_blocks=BLOCKS,
        )
        self.failing = False

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        if self.failing:
            raise OSError("the device is lost")
        return super().run(plan, watch)

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_token(self.info.fingerprint, seed, position, history)

    def choose(self, seed: int, position: int, history: Sequence[int], allowed: Sequence[int]) -> int:
        return true_token(self.info.fingerprint, seed, position, history, allowed)


class Failing:
    """A switch that makes every incarnation of a draft fail."""

    until_s = 0.0


class HalfRight:
    """A strategy that mostly proposes the tokens of the first build's target; if `failing`, it raises.

    It knows the `specs` of all sessions. A wrong token of a session with a grammar is seldom one that the
    grammar does not allow. Its trees have right tokens at any rank, and some are no trees.

    The target's states that reach it must be those of the session's confirmed tokens.
    """

    def __init__(self, failing: Failing, specs: Mapping[str, SessionSpec], ledger: Ledger) -> None:
        self._failing = failing
        self._specs = specs
        self._ledger = ledger

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        if asyncio.get_running_loop().time() < self._failing.until_s:
            raise OSError("the device is lost")
        guesses = [self._guess(job) for job in jobs]
        for guess in guesses:
            guess.used_features = self._read_states(guess.job.session)
        return guesses

    def advance(self, guesses: Sequence[Proposal]) -> None:
        """Do nothing: `begin` finishes every proposal."""

    def _read_states(self, session: DraftSession) -> bool:
        """Take the states that came. Return True if that of the token before the last confirmed one did."""
        states, session.states = session.states, NO_STATES
        if not states.tokens:
            return False
        self._ledger.met["states reached a draft"] += 1
        if states.end >= session.confirmed:
            self._ledger.violate("a draft got a state of a token that has none yet")
        if states != states_of(session.tokens, states.position, states.end, FEATURE_LAYERS):
            self._ledger.violate("a draft got states that are not those of its tokens")
        return states.end == session.confirmed - 1

    def _guess(self, job: DraftJob) -> Proposal:
        _, session_id = job.slice.key
        spec = self._specs[session_id]
        tokens = list(job.session.tokens)
        if job.width > 1:
            return self._tree(job, spec, tokens)
        start = len(tokens)
        while len(tokens) < start + job.k and may_follow(spec, tokens):
            tokens.append(self._token(spec, tokens))
        count = len(tokens) - start
        return Proposal(job, tokens[start:], [_RIGHT ** (i + 1) for i in range(count)], done=True)

    def _tree(self, job: DraftJob, spec: SessionSpec, before: Sequence[int]) -> Proposal:
        rng = random.Random(f"{spec.sampling.seed} {len(before)}")
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        for _ in range(job.k):
            parent = rng.choice((ROOT, *range(len(tokens)))[-3:])
            context = [*before, *(tokens[node] for node in path_to(parents, parent))]
            siblings = [tokens[node] for node, its in enumerate(parents) if its == parent]
            if len(siblings) == job.width or not may_follow(spec, context):
                continue
            offered = [self._token(spec, context), true_next(spec, "build-1", context)]
            further = [token for token in offered if token not in siblings]
            if further:
                reached = 1.0 if parent == ROOT else survival[parent]
                survival.append(reached * _RIGHT / (1 + len(siblings)))
                tokens.append(further[0])
                parents.append(parent)
        order, placed, falling = best_first(parents, survival)
        is_cyclic = rng.random() < _CYCLIC
        placed = tuple(len(tokens) - 1 - parent for parent in placed) if is_cyclic else placed
        return Proposal(job, [tokens[node] for node in order], falling, parents=list(placed), done=True)

    def _token(self, spec: SessionSpec, tokens: Sequence[int]) -> int:
        right = true_next(spec, "build-1", tokens)
        luck = crc32(f"{spec.sampling.seed} {len(tokens)}".encode()) % 100
        if luck < 100 * _RIGHT:
            return right
        if spec.grammar is None or luck < 100 * _FORBIDDEN:
            return (right + 1) % VOCAB
        others = allowed_after(spec.grammar, tuple(tokens[len(spec.prompt) :]))
        return others[(others.index(right) + 1) % len(others)]


class SimTarget:
    def __init__(self, world: World, address: str, build: str) -> None:
        self.address = address
        self._world = world
        self._build = build
        self.start()

    def start(self) -> None:
        self.process = Process(self.address)
        self.process.compute_s = self._world.schedule.pass_s
        self.process.call(self._start)

    def _start(self) -> None:
        world, process = self._world, self.process
        self.engine = world.kinds.engine(self._build)
        limits = Limits(max_draft_tokens=MOST_DRAFT_TOKENS, max_linger_ms=5.0)
        self.target = self.engine.serve(PASS_TIMES, limits)
        self.service = _NotedTarget(self.target, None, grammars=ReplicaGrammars(VOCABULARY))
        self.service.world, self.service.name = world, self.address
        registry: Any = SimRegistry(world.redis, process)
        lease = partial(self.service.lease, self.address)
        self.registration = Registration(registry, TARGET_POOL, lease, world.schedule.timing.lease_s / 3)
        world.servers[self.address] = Server(process, self.service)

    async def drain(self) -> None:
        await self.registration.drain()
        await self.service.drain()


class SimDraft:
    def __init__(self, world: World, address: str) -> None:
        self.address = address
        self.failing = Failing()
        self.claimed: str | None = None
        """The version that its lease names, if that is not its own."""
        self._world = world
        self.start()

    def start(self) -> None:
        self.process = Process(self.address)
        self.process.compute_s = 0.01
        self.process.call(self._start)

    def _start(self) -> None:
        world = self._world
        reads = self.address in READERS
        strategy = names.FEATURES if reads else "sim"
        loop = DraftLoop(
            {strategy: HalfRight(self.failing, world.specs, world.ledger)},
            max_sessions=64,
            max_tokens=65536,
            max_batch=16,
            max_waiting=64,
        )
        info = pb.GetDraftInfoResponse(
            tokenizer_hash=TOKENIZER,
            strategies=[strategy],
            default_strategy=strategy,
            max_draft_tokens=MOST_DRAFT_TOKENS,
            vocab_size=VOCAB,
            feature_layers=FEATURE_LAYERS if reads else (),
            feature_size=SIZE if reads else 0,
            version=self._label,
        )
        self._info = info
        self.service = _NotedDraft(loop, info, None, grammars=ReplicaGrammars(VOCABULARY))
        self.service.world, self.service.name = world, self.address
        self.registration = self._register(self.address)

    @property
    def _label(self) -> str:
        plan = self._world.schedule.versions
        return "" if plan is None else plan.labels[int(self.address.rpartition("-")[2])]

    def _register(self, address: str) -> Registration[DraftLease]:
        registry: Any = SimRegistry(self._world.redis, self.process)
        self._world.servers[address] = Server(self.process, self.service)
        every_s = self._world.schedule.timing.lease_s / 3
        return Registration(registry, DRAFT_POOL, partial(self._lease, address, self.service), every_s)

    def _lease(self, address: str, service: DraftService) -> DraftLease:
        lease = service.lease(address)
        return lease if self.claimed is None else replace(lease, version=self.claimed)

    def set_version(self, version: str) -> None:
        """Name its weights otherwise, as a replica does that has exchanged them."""
        if self.process.alive:
            self._info.version = version

    def register_again(self, for_s: float) -> None:
        """Register at a second address as well."""
        if self.process.alive:
            self.process.spawn(self._second(f"{self.address}-again", for_s))

    async def _second(self, address: str, for_s: float) -> None:
        registration = self._register(address)
        await asyncio.sleep(for_s)
        await registration.close()

    async def drain(self) -> None:
        await self.registration.drain()
        await self.service.drain()


class _NotedTarget(TargetService):
    """Check the salt of each request."""

    world: World
    name: str

    def _respond(self, item: pb.VerifyItem, running: Any = None) -> AsyncGenerator[pb.VerifyAnswer]:
        self.world.ledger.requested(self.name, item.slice.session_id, item.slice.tenant_salt)
        return super()._respond(item, running)


class _NotedDraft(DraftService):
    """Record in the ledger which session requested a proposal, and when; check its salt."""

    world: World
    name: str

    def _respond(self, item: Any) -> AsyncGenerator[Any]:
        self.world.ledger.drafted(item.slice.session_id)
        if self.world.versions is not None:
            self.world.versions.drafted(self.name, item.slice.session_id)
        self.world.ledger.requested(self.name, item.slice.session_id, item.slice.tenant_salt)
        return super()._respond(item)
