"""A schedule: the world, its sessions and its faults. `schedules/` draws it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from galley.client.options import GenerateOptions, Retries, Speculation
from galley.core.admission.admission import Principal
from galley.core.answer.answer import SessionSpec
from galley.core.grammar.spec import GrammarSpec
from tests.simulation.grammars import STOP

ID_SECRET = b"of all gateways"
MOST_K = 8
"""Most draft tokens of a request that the targets accept."""
START_S = 5.0
"""Time that a gateway gives its targets at its start, before it tries again."""
MAX_DRAFT_COOLDOWN_S = 1.0
FINISHED_TTL_S = 120.0
RENEWALS = 3
"""Renewals of a session within the time that the store keeps it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault `at_s` seconds after the world is ready. `faults.py` gives `amount` its meaning by kind."""

    at_s: float
    kind: str
    where: tuple[str, ...] = ()
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        for_s = f" for {self.for_s:.3f} s" if self.for_s else ""
        amount = f", {self.amount:g}" if self.amount else ""
        return f"at {self.at_s:.3f} s: {self.kind} {' '.join(self.where)}{for_s}{amount}"


@dataclass(frozen=True, slots=True)
class Timing:
    """The time limits of all parts, in seconds. `keepalive_s` is that of clients, `pings_s` of servers."""

    store_s: float = 2.0
    verify_s: float = 2.0
    draft_s: float = 0.1
    target_s: float = 2.0
    call_s: float = 0.6
    lease_s: float = 2.0
    ttl_s: float = 6.0
    keepalive_s: float = 1.5
    pings_s: float = 1.5
    drain_s: float = 0.5

    @property
    def renew_s(self) -> float:
        return self.ttl_s / RENEWALS

    @property
    def settled_s(self) -> float:
        """Return how long after the last fault a client may still see an error."""
        return max(self.store_s, self.verify_s + self.target_s, self.lease_s) + self.keepalive_s + 1.0


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A client that `breaks_off` loses its connection; a `long` session outlasts the faults.

    After an error, its application opens the stream again up to `returns` times, each after `return_s`.
    """

    name: str
    principal: str
    spec: SessionSpec
    at_s: float
    checks_seen: bool = True
    within_s: float | None = None
    pause_s: float = 0.0
    breaks_off: bool = False
    long: bool = False
    retries: Retries = field(default_factory=Retries)
    returns: int = 0
    return_s: float = 0.5
    key: str = ""
    """The idempotency key; empty: the name."""
    by_http: bool = False
    """Whether its client uses the HTTP port, and continues by `Last-Event-ID`."""
    as_response: bool = False
    """Whether a session by HTTP uses the Responses API."""

    @property
    def client(self) -> str:
        return self.name.replace("session", "client")

    @property
    def is_form(self) -> bool:
        """Return True if its request has options that the simulation's Responses API does not take."""
        return self.spec.grammar is not None or bool(self.spec.prediction)

    def options(self) -> GenerateOptions:
        spec = self.spec
        return {
            "max_tokens": spec.max_position - len(spec.prompt),
            "min_tokens": spec.min_tokens,
            "ignore_eos": STOP not in spec.stop_token_ids,
            "seed": spec.sampling.seed,
            "logprobs": spec.logprobs,
            "speculation": _speculation(spec),
            "idempotency_key": self.key or self.name,
            "continue_without_client": spec.continue_without_client,
            "timeout_s": self.within_s,
            "prediction": spec.prediction or None,
            **_form(spec),
        }

    def __str__(self) -> str:
        spec = self.spec
        length = spec.max_position - len(spec.prompt)
        alone = ", goes on alone" if spec.continue_without_client else ""
        alone += ", predicted" * bool(spec.prediction)
        alone += "" if spec.grammar is None else f", by {spec.grammar}"
        alone += (", by HTTP" + ", as a response" * self.as_response) * self.by_http
        what = f"{self.name} ({spec.session_id}) of {len(spec.prompt)} + {length} tokens, "
        what += f"k {spec.k}, width {spec.width}{alone}"
        what += f", returns {self.returns} times after {self.return_s} s, {self.retries}"
        return f"at {self.at_s:.3f} s: {self.principal} wants {what}"


def _speculation(spec: SessionSpec) -> Speculation:
    if not spec.k:
        return Speculation(off=True)
    width = spec.width or None
    return Speculation(width=width) if spec.auto else Speculation(k=spec.k, width=width)


def _form(spec: SessionSpec) -> GenerateOptions:
    match spec.grammar:
        case GrammarSpec("regex", text):
            return {"regex": text}
        case GrammarSpec("choice", text):
            return {"choice": json.loads(text)}
        case GrammarSpec("grammar", text):
            return {"grammar": text}
    return {}


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """The versions of the drafts, by number, and the `changes` of them, which no stream may end for."""

    labels: tuple[str, ...]
    changes: tuple[Fault, ...]

    @property
    def settled_s(self) -> float:
        return max(change.at_s + change.for_s for change in self.changes)


@dataclass(frozen=True, slots=True)
class Schedule:
    """`replicas` are the store's; `copies` of them must have a change before it counts (WAIT)."""

    seed: int
    gateways: int
    builds: tuple[str, ...]
    drafts: int
    credit: int
    window: int
    pass_s: float
    slots: int
    client_s: float
    slow_factor: float
    hedge_quantile: float
    looks_up: bool
    replicas: int
    copies: int
    timing: Timing
    principals: tuple[Principal, ...]
    sessions: tuple[PlannedSession, ...]
    faults: tuple[Fault, ...]
    versions: VersionPlan | None = None
    audits: bool = False
    """Whether gateways audit every session that finishes."""
    limits: tuple[tuple[str, float], ...] = ()
    """Factors by which constants of the product are shrunk or grown, by name."""

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.gateways} gateways of {self.slots} slots, "
            f"targets {', '.join(self.builds)}, {self.drafts} drafts, credit {self.credit}, "
            f"window {self.window}, passes of {self.pass_s} s, client_s {self.client_s}, "
            f"slow_factor {self.slow_factor}, hedge_quantile {self.hedge_quantile}, "
            f"looks_up {self.looks_up}, audits {self.audits}, {self.copies} of {self.replicas} copies, "
            f"{self.timing}{''.join(f', {name} * {factor:g}' for name, factor in self.limits)}"
        )
        changes = () if self.versions is None else (self.versions.labels, *self.versions.changes)
        what = (*self.principals, *self.sessions, *self.faults, *changes)
        return "\n".join([head, *(f"  {it}" for it in what)])

    @property
    def healed_s(self) -> float:
        faults_s = max((fault.at_s + self._lasts_s(fault) for fault in self.faults), default=0.0)
        return faults_s if self.versions is None else max(faults_s, self.versions.settled_s)

    def _lasts_s(self, fault: Fault) -> float:
        """Return how long a fault is in force: a part that drains is replaced after `drain_s`."""
        return self.timing.drain_s if fault.kind == "drain" else fault.for_s

    def with_faults(self, faults: tuple[Fault, ...]) -> Schedule:
        return replace(self, faults=faults)

    def with_sessions(self, sessions: tuple[PlannedSession, ...]) -> Schedule:
        return replace(self, sessions=sessions)
