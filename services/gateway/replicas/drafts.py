"""The pool of draft replicas: which may be used, and which is best for a session.

A draft is accepted if it has the gateway's tokenizer. Sessions do not wait for a missing draft: the gateway
drafts by lookup (`draft_session`). One that fails often is not used for a while
(`galley.core.routing.breaker`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import draft_lease
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.errors import GalleyError, TokenizerMismatch
from galley.core.features import FeatureForm
from galley.core.lru import RecentKeys
from galley.core.routing.breaker import Breaker, State
from galley.core.routing.choice import DraftCandidate, DraftLease, choose_draft
from galley.core.session import events as ev
from galley.core.session.events import Clock, Replica
from galley.core.versions.split import Split
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.clients import DraftClient, FaultIn
from services.gateway.replicas.membership import AddressSource, PoolReplica, ReplicaPool
from services.gateway.telemetry.observer import request_observer

_log = get_logger(__name__)

_LATE_SHARE = 0.9
"""Share of the draft timeout after which a cancelled request counts as late."""


class DraftReplica(PoolReplica[DraftClient, DraftLease]):
    """One draft replica; `sessions` are those of this gateway that used it recently.

    `responses` counts their requests that ended there with a response or an error.
    """

    def __init__(
        self, address: str, channel: grpc.aio.Channel, fault_in: FaultIn[pb.GetDraftInfoResponse]
    ) -> None:
        super().__init__(address, DraftClient(channel, address, fault_in), channel)
        self.sessions = RecentKeys()
        self.responses = 0
        self._breaker = Breaker()
        self._breaker_of = ""

    @property
    def breaker(self) -> Breaker:
        """Return its circuit breaker; a new incarnation has a new one."""
        if self._breaker_of != self.client.info.incarnation:
            self._breaker, self._breaker_of = Breaker(), self.client.info.incarnation
        return self._breaker

    def form_of(self, strategy: str) -> FeatureForm | None:
        """Return the target's states that it reads for a strategy ("" is its default), None for none."""
        info = self.client.info
        reads = (strategy or info.default_strategy) in names.READS_FEATURES
        if not (reads and info.feature_layers and info.feature_size):
            return None
        return FeatureForm(tuple(info.feature_layers), info.feature_size)

    @property
    def version(self) -> str:
        return (self.lease or self.client.info).version

    def is_unknown(self) -> bool:
        """Return True if it must be met: another process may serve there, or this one other weights."""
        if super().is_unknown():
            return True
        info = self.client.info
        return info.max_load_bytes > 0 if self.lease is None else self.lease.version != info.version

    def is_available(self, now_ns: int) -> bool:
        return self.is_accepted and self.client.replica is not None and self.breaker.can_begin(now_ns)

    def is_serving(self, now_ns: int) -> bool:
        is_draining = self.lease is not None and self.lease.draining
        return self.is_up and not is_draining and self.is_available(now_ns)

    def candidate(self, now_ns: int) -> DraftCandidate:
        lease = self.lease or draft_lease(self.address, self.client.info)
        return DraftCandidate(lease, self.sessions.count(now_ns), self.is_up)


class DraftPool(ReplicaPool[DraftReplica]):
    probe_timeout_s = 0.5

    def __init__(
        self,
        source: AddressSource,
        tokenizer_hash: str,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        timeout_ns: int,
    ) -> None:
        """`timeout_ns` is how long a session waits for a proposal."""
        super().__init__("draft", source, open_channel, clock)
        self._tokenizer_hash = tokenizer_hash
        self._split: Split | None = None
        self._versions: Mapping[str, str] = {}
        self.placement = 0
        """Changes when sessions should choose anew, because the split or a replica's version is another."""
        self._late_ns = int(timeout_ns * _LATE_SHARE)

    async def start(self) -> None:
        """Meet the drafts that are there and start polling; a gateway needs none."""
        await self.refresh()
        self._start_polling()

    @property
    def strategies(self) -> tuple[str, ...]:
        offered = {
            name for it in self._replicas.values() if it.is_accepted for name in it.client.info.strategies
        }
        return tuple(sorted(offered))

    def breakers(self) -> list[tuple[str, State]]:
        now = self._clock.now_ns()
        return [(it.address, it.breaker.state(now)) for it in self._replicas.values() if it.is_accepted]

    def choose(
        self,
        strategy: str,
        home: Replica | None,
        avoid: Collection[str],
        session_id: str,
        *,
        is_canary: bool = False,
    ) -> DraftReplica | None:
        """Return the best draft for a session whose tokens `home` caches, None if none is available."""
        now = self._clock.now_ns()
        candidates = [it.candidate(now) for it in self._replicas.values() if it.is_available(now)]
        chosen = choose_draft(strategy, candidates, home, avoid, session_id, self._split, is_canary=is_canary)
        return None if chosen is None else self._replicas[chosen.lease.address]

    def use_split(self, split: Split) -> None:
        """Give sessions to versions by `split` from now on, those that are open too."""
        in_force = None if split == Split() else split
        if in_force != self._split:
            self._split = in_force
            self.placement += 1

    def is_canary(self, spec: SessionSpec) -> bool:
        """Return True if the split gives the session to the canary."""
        return self._split is not None and self._split.is_canary(
            spec.session_id, spec.tenant_salt, spec.workload
        )

    def serves(self, version: str) -> bool:
        """Return True if a draft of `version` is available."""
        now = self._clock.now_ns()
        return any(it.is_serving(now) and it.version == version for it in self._replicas.values())

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def is_late(self, since_ns: int) -> bool:
        """Return True if a request that started at `since_ns` and is cancelled now counts as late."""
        return self._clock.now_ns() - since_ns >= self._late_ns

    def begin(self, draft: DraftReplica, breaker: Breaker) -> int:
        now = self._clock.now_ns()
        attempt = breaker.begin(now)
        if attempt >= 0 and breaker.state(now) is State.HALF_OPEN:
            _breaker_changed(draft, State.OPEN, State.HALF_OPEN)
        return attempt

    def failed(self, draft: DraftReplica, breaker: Breaker, attempt: int) -> None:
        now = self._clock.now_ns()
        before = breaker.state(now)
        if breaker.record_failure(attempt, now):
            _log.warning("draft circuit opened", address=draft.address)
            _breaker_changed(draft, before, State.OPEN)

    def succeeded(self, draft: DraftReplica, breaker: Breaker, attempt: int) -> None:
        if breaker.record_success(attempt):
            _log.info("draft circuit closed", address=draft.address)
            _breaker_changed(draft, State.HALF_OPEN, State.CLOSED)

    def _update(self) -> None:
        versions = {it.address: it.version for it in self._replicas.values()}
        if versions != self._versions:
            self._versions = versions
            self.placement += self._split is not None

    def _new_replica(self, address: str) -> DraftReplica:
        return DraftReplica(address, self._open_channel(address), self._fault_in)

    def _fault_in(self, info: pb.GetDraftInfoResponse | DraftLease) -> GalleyError | None:
        if info.tokenizer_hash == self._tokenizer_hash:
            return None
        return TokenizerMismatch(info.tokenizer_hash, self._tokenizer_hash)


def _breaker_changed(draft: DraftReplica, before: State, after: State) -> None:
    request_observer().event(
        names.BREAKER_CHANGED,
        {
            names.POOL: ev.Pool.DRAFT.value,
            names.REPLICA: draft.address,
            names.FROM: before.name.lower(),
            names.TO: after.name.lower(),
        },
    )
