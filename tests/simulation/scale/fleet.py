"""A fleet on virtual time: session machines, admission, routing and schedulers are the real ones.

Answers begin as a Poisson process, at gateways in turn. A gateway computes on one core: verdicts, tokens and
answers cost what `galley.plan.capacity.Tiers` says. So does a store, of which each session has one. Replicas
publish leases, and all gateways know the last ones.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from galley.core.admission.admission import ANONYMOUS, Admission, AdmissionSlot
from galley.core.answer.answer import Answer, SessionSpec
from galley.core.content import Miss
from galley.core.errors import Overloaded
from galley.core.routing.choice import (
    DraftCandidate,
    HashedTokens,
    RoutingRequest,
    TargetCandidate,
    choose_draft,
    choose_target,
)
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Response
from galley.core.session import events as ev
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.machine import Session, SessionLimits
from galley.plan.capacity import Tiers
from tests.simulation.scale.parts import (
    HOP_NS,
    VOCAB,
    WRONG,
    Core,
    Costs,
    Draft,
    Events,
    Job,
    Target,
    proposed_event,
    verified_event,
)

SECOND = 1_000_000_000
# A tenth of the real second. Answers are shorter than real ones by more, as each of their tokens takes time
# to simulate; what counts is how many begin and end while a lease is old.
_LEASES_NS = SECOND // 10


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet and its load. `alpha` is the chance that a draft token is right."""

    gateways: int
    drafts: int
    targets: int
    stores: int
    answers: int
    answers_per_s: float
    prompt_tokens: int
    output_tokens: int
    costs: Costs
    alpha: float = 0.0
    k: int = 0
    gateway_sessions: int = 2000
    tiers: Tiers = field(default_factory=Tiers)
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """What the streams of the steady state saw, in nanoseconds."""

    ended: int = 0
    tokens: int = 0
    first_ns: list[int] = field(default_factory=list)
    lasted_ns: int = 0
    decoded_ns: int = 0
    decoded: int = 0
    verdicts: int = 0
    refusals: int = 0
    wrong: int = 0


class Gateway:
    """One gateway: its core, its slots, its statistics of drafts, and how many of its sessions are where."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.core = Core(fleet.events)
        self.admission = Admission(fleet.size.gateway_sessions)
        self.book = SharedStatistics()
        self.at: Counter[str] = Counter()

    def target_for(self, stream: Stream) -> Target:
        spec = stream.session.spec
        request = RoutingRequest(HashedTokens(spec.prompt), spec.max_position, session_id=stream.name)
        leases = self.fleet.target_leases
        found = choose_target(request, [TargetCandidate(it, self.at[it.address]) for it in leases])
        assert found is not None
        return self.fleet.targets[found.lease.address]

    def draft_for(self, stream: Stream) -> Draft:
        leases = self.fleet.draft_leases
        found = choose_draft(
            "", [DraftCandidate(it, self.at[it.address]) for it in leases], session_id=stream.name
        )
        assert found is not None
        return self.fleet.drafts[found.lease.address]


class Stream:
    """One answer, from its call to its end."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        size, chance = fleet.size, random.Random(f"{fleet.size.seed} {number}")
        self.name = f"s{number}"
        self.began_ns = fleet.events.now
        self._fleet = fleet
        # Its first tokens are its own, so that nothing is cached.
        own = tuple(1 + part for part in divmod(number, VOCAB // 2))
        prompt = own + (1,) * (size.prompt_tokens - len(own))
        # From one token to twice the mean less one.
        count = chance.randrange(1, 2 * size.output_tokens)
        self.truth = [*prompt, *(chance.randrange(1, VOCAB) for _ in range(count))]
        self._right = [chance.random() < size.alpha for _ in range(count)]
        self._prompt = prompt
        self.items: dict[int, int] = {}
        self.job: Job | None = None
        self._first_ns = 0
        self._retries = 0

    def begin(self) -> None:
        """Call the next gateway; if that has no slot, call another when it says."""
        fleet = self._fleet
        self._gateway = gateway = fleet.next_gateway()
        now = fleet.events.now
        try:
            self._slot: AdmissionSlot = gateway.admission.enter(ANONYMOUS, now)
        except Overloaded as error:
            fleet.tally.refusals += 1
            fleet.events.later(round(error.retry_after_s * SECOND), self.begin)
            return
        gateway.core.do(1e6 * fleet.size.tiers.gateway_ms_per_answer, self._create)

    def _create(self) -> None:
        fleet = self._fleet
        created_ns = fleet.store(self).work(1e3 * fleet.size.tiers.store_us_per_change)
        fleet.events.at(created_ns + 2 * HOP_NS, self._start)

    def _start(self) -> None:
        fleet, size = self._fleet, self._fleet.size
        spec = SessionSpec(
            self.name,
            self._prompt,
            SamplingParams(),
            len(self.truth),
            VOCAB,
            k=size.k if fleet.drafts else 0,
            auto=False,
            strategy="any",
        )
        answer = Answer(spec, lambda tokens: "x" * len(tokens))
        self.session = Session(answer, SessionLimits(), shared=self._gateway.book)
        self._target = self._gateway.target_for(self)
        self._gateway.at[self._target.address] += 1
        self._draft: Draft | None = None
        self._carry_out(self.session.start(fleet.events.now))

    def _handle(self, event: ev.Event) -> None:
        self._carry_out(self.session.step(event, now=self._fleet.events.now))

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        fleet = self._fleet
        for effect in effects:
            match effect:
                case ev.Verify() | ev.ExtendVerify() | ev.CancelVerify():
                    fleet.events.later(HOP_NS, self._target.receive, self, effect)
                case ev.Propose():
                    self._propose(effect)
                case ev.CancelPropose():
                    self._cancel_proposal()
                case ev.Commit():
                    self._store(ev.Committed(effect.expected_len + len(effect.tokens)))
                case ev.Emit():
                    self._first_ns = self._first_ns or fleet.events.now
                    fleet.events.later(0, self._handle, ev.Sent(effect.end))
                case ev.StoreFinish():
                    self._store(ev.FinishStored())
                case ev.SetTimer():
                    fleet.events.at(effect.at_ns, self._handle, ev.TimerFired())
                case ev.End():
                    self._end(effect)

    def _store(self, done: ev.Event) -> None:
        fleet = self._fleet
        cost_ns = 1e3 * fleet.size.tiers.store_us_per_change
        stored_ns = fleet.store(self).work(cost_ns)
        fleet.events.at(stored_ns + 2 * HOP_NS, self._handle, done)

    def _cancel_proposal(self) -> None:
        if self.job is not None and self._draft is not None:
            self._draft.drop(self.job)
        self.job = None

    def _propose(self, request: ev.Propose) -> None:
        if self._draft is None:
            self._draft = self._gateway.draft_for(self)
            self._draft.homes += 1
            self._gateway.at[self._draft.address] += 1
        self.job = Job(self, request)
        self._fleet.events.later(HOP_NS, self._draft.receive, self.job)

    def guess(self, job: Job) -> int:
        """Return the next token that the draft proposes: right if all before it are, and by chance."""
        part = job.request.slice
        position = part.start + len(part.tokens) + len(job.tokens)
        if position >= len(self.truth) or not self._right[position - len(self._prompt)]:
            return WRONG
        known = [*part.tokens, *job.tokens]
        return self.truth[position] if known == self.truth[part.start : position] else WRONG

    def proposed(self, job: Job) -> None:
        if job is self.job:
            self.job = None
            self._handle(proposed_event(job))

    def verified(self, response: Response) -> None:
        """Take a response of the target, once the gateway's core has time for it."""
        request_id = next((own for own, item in self.items.items() if item == response.request_id), None)
        if request_id is None:
            return
        outcome = response.outcome
        if response.is_last:
            del self.items[request_id]
        event: ev.Event
        if isinstance(outcome, Confirmed):
            event, tokens = verified_event(request_id, outcome), len(outcome.tokens)
            self._fleet.tally.verdicts += self._fleet.is_steady
        elif isinstance(outcome, Miss):
            event, tokens = ev.CacheMissed(request_id, outcome.have, outcome.prefix_hash), 0
        else:
            event, tokens = ev.Failed(request_id, str(outcome)), 0
        tiers = self._fleet.size.tiers
        cost_us = tiers.gateway_us_per_verdict + tokens * tiers.gateway_us_per_token
        self._gateway.core.do(1e3 * cost_us, self._handle, event)

    def _end(self, end: ev.End) -> None:
        fleet, now = self._fleet, self._fleet.events.now
        assert end.error is None, end.error
        fleet.tally.wrong += self.session.answer.tokens != self.truth
        self._slot.used = self.session.answer.output_len
        self._gateway.admission.leave(self._slot, now)
        self._gateway.at[self._target.address] -= 1
        self._target.forget(self)
        if self._draft is not None:
            self._draft.homes -= 1
            self._gateway.at[self._draft.address] -= 1
        fleet.ended(self, self._first_ns, self.session.answer.output_len)


class Fleet:
    """All of it. `run` returns once every answer has ended; the tally has those of the steady state."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.events = events = Events()
        self.targets = {f"t{i:03}": Target(events, size.costs, f"t{i:03}") for i in range(size.targets)}
        self.drafts = {f"d{i:03}": Draft(events, size.costs, f"d{i:03}") for i in range(size.drafts)}
        self.gateways = [Gateway(self) for _ in range(size.gateways)]
        self.stores = [Core(events) for _ in range(size.stores)]
        self.tally = Tally()
        self.is_steady = False
        self.open = self.most_open = 0
        self.steady_ns = 0
        self.busy: dict[str, float] = {}
        self._chance = random.Random(size.seed)
        self._arrived = self._done = self._turn = 0
        self._before: dict[str, float] = {}

    def next_gateway(self) -> Gateway:
        self._turn += 1
        return self.gateways[self._turn % len(self.gateways)]

    def store(self, stream: Stream) -> Core:
        return self.stores[int(stream.name[1:]) % len(self.stores)]

    def run(self) -> Fleet:
        """Run from the first answer to the end of the last."""
        self._publish()
        self._arrive()
        self.events.run()
        assert self._done == self.size.answers
        return self

    def _publish(self) -> None:
        self.target_leases = [target.lease() for target in self.targets.values()]
        self.draft_leases = [draft.lease() for draft in self.drafts.values()]
        if self._done < self.size.answers:
            self.events.later(_LEASES_NS, self._publish)

    def _arrive(self) -> None:
        size = self.size
        share = self._arrived / size.answers
        # The fleet fills in the first part, and empties once the last answers have begun.
        if not self.is_steady and _FILLED <= share < _LAST:
            self._begin_steady()
        elif self.is_steady and share >= _LAST:
            self._end_steady()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        Stream(self, self._arrived).begin()
        self._arrived += 1
        if self._arrived < size.answers:
            gap_s = self._chance.expovariate(size.answers_per_s)
            self.events.later(round(gap_s * SECOND), self._arrive)

    def _begin_steady(self) -> None:
        self.is_steady, self._before = True, self._spent()
        self._steady_since = self.events.now

    def _end_steady(self) -> None:
        self.is_steady = False
        self.steady_ns = self.events.now - self._steady_since
        spent = self._spent()
        self.busy = {name: (spent[name] - self._before[name]) / self.steady_ns for name in spent}

    def _spent(self) -> dict[str, float]:
        """Return the nanoseconds that each tier has worked, summed over its processes."""
        return {
            "targets": sum(target.busy_ns for target in self.targets.values()),
            "drafts": sum(draft.busy_ns for draft in self.drafts.values()),
            "gateways": sum(gateway.core.busy_ns for gateway in self.gateways),
            "stores": sum(store.busy_ns for store in self.stores),
        }

    def ended(self, stream: Stream, first_ns: int, tokens: int) -> None:
        self._done += 1
        self.open -= 1
        if not self.is_steady:
            return
        tally, now = self.tally, self.events.now
        tally.ended += 1
        tally.tokens += tokens
        tally.first_ns.append(first_ns - stream.began_ns)
        tally.lasted_ns += now - stream.began_ns
        tally.decoded_ns += now - first_ns
        tally.decoded += tokens - 1


_FILLED, _LAST = 0.3, 0.95
