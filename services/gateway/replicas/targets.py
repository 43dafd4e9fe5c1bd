"""The pool of target replicas: what a replica must be to serve here, and what holds for all of them.

A replica is accepted if it has the gateway's model and tokenizer and the vocabulary size of the replicas met
before, and takes as many draft tokens as the gateway may send to those. Other weights of the same model are
another build, so that a pool can be updated to them; a gateway can be told to accept certain weights only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import target_lease
from galley.core.errors import GalleyError, TargetUnavailable, TokenizerMismatch, Unavailable
from galley.core.routing.choice import RoutingRequest, TargetCandidate, TargetLease, choose_target
from galley.core.routing.lateness import ROWS_OF_A_SESSION, SLOW_FACTOR, VerdictTimes
from galley.core.session.events import Clock
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.clients import TargetClient
from services.gateway.replicas.delivery import DeliveryQueue
from services.gateway.replicas.membership import AddressSource, PoolReplica, ReplicaPool

_FIRST_PAUSE_S = 0.1

_log = get_logger(__name__)


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


class TargetReplica(PoolReplica[TargetClient, TargetLease]):
    def __init__(self, address: str, client: TargetClient, channel: grpc.aio.Channel) -> None:
        super().__init__(address, client, channel)
        self.open_requests = 0
        self._rows = 0
        self._responded_s = 0.0
        self._times = VerdictTimes()
        self._times_of: pb.GetTargetInfoResponse | None = None
        self._lease: TargetLease | None = None
        self._lease_of: pb.GetTargetInfoResponse | None = None

    @property
    def times(self) -> VerdictTimes:
        """Return how long verifications take there; a new incarnation starts anew."""
        info = self.client.info
        if info is not self._times_of:
            if self._times_of is None or self._times_of.incarnation != info.incarnation:
                self._times = VerdictTimes([(cost.rows, cost.ns) for cost in info.row_costs])
            self._times_of = info
        return self._times

    @property
    def rows_ahead(self) -> int:
        """Estimate the rows to compute before a request that is sent now."""
        others = 0 if self.lease is None else max(0, self.lease.queue_depth - self.open_requests)
        return self._rows + self.open_requests + others * ROWS_OF_A_SESSION

    def add_request(self, rows: int) -> None:
        self.open_requests += 1
        self._rows += rows

    def responded(self, now_s: float, rows: int) -> None:
        self._responded_s = now_s
        self._rows -= rows

    def remove_request(self, rows: int) -> None:
        self.open_requests -= 1
        self._rows -= rows

    def is_responding(self, since_s: float) -> bool:
        """Return False if it has open requests and has sent no response since `since_s`, the loop's time."""
        return not self.open_requests or self._responded_s >= since_s

    @property
    def fingerprint(self) -> str:
        return self.candidate().lease.fingerprint

    def candidate(self) -> TargetCandidate:
        return TargetCandidate(self.lease or self._described(), self.open_requests, self.is_up)

    def _described(self) -> TargetLease:
        """Return the lease that the replica's description would be, which takes long to make."""
        info = self.client.info
        if self._lease is None or self._lease_of is not info:
            self._lease, self._lease_of = target_lease(self.address, info), info
        return self._lease

    def is_unknown(self) -> bool:
        """Return True also without a lease, which would say how loaded it is."""
        return super().is_unknown() or self.lease is None


class TargetPool(ReplicaPool[TargetReplica]):
    def __init__(
        self,
        source: AddressSource,
        requirements: TargetRequirements,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        slow_factor: float = SLOW_FACTOR,
        hedge_quantile: float = 0.0,
        turns: DeliveryQueue | None = None,
    ) -> None:
        """Create a pool of the targets that meet `requirements`.

        A response that takes `slow_factor` times as long as predicted is late. One slower than the quantile
        `hedge_quantile` of the last ones may be requested from another replica too; 0 means never. All
        replicas share the queue `turns`.
        """
        super().__init__("target", source, open_channel, clock)
        self.info = pb.GetTargetInfoResponse()
        self.slow_factor = slow_factor
        self.hedge_quantile = hedge_quantile
        self.turns = turns or DeliveryQueue()
        self._requirements = requirements
        self._infos: list[pb.GetTargetInfoResponse] = []
        self._weights: frozenset[str] = frozenset()

    async def start(self, timeout_s: float) -> None:
        """Wait for the first replica. Raise TargetUnavailable, or TokenizerMismatch if all are refused."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_first()
        except TimeoutError as error:
            raise TargetUnavailable(self.problem) from error
        if self._source.can_change:
            self._start_polling()

    async def _wait_for_first(self) -> None:
        while True:
            await self.refresh()
            if any(replica.is_accepted and replica.is_up for replica in self._replicas.values()):
                return  # `info` is set: one whose lease has expired would not do
            if self.mismatch is not None:
                raise self.mismatch
            await asyncio.sleep(_FIRST_PAUSE_S)

    def choose(self, request: RoutingRequest, avoid: Collection[str]) -> TargetReplica | None:
        candidates = [it.candidate() for it in self._replicas.values() if it.is_accepted]
        chosen = choose_target(request, candidates, avoid)
        return None if chosen is None else self._replicas[chosen.lease.address]

    def leases(self) -> list[TargetLease]:
        """Return the leases of the replicas that are up."""
        return [it.candidate().lease for it in self._replicas.values() if it.is_accepted and it.is_up]

    @property
    def knows_load(self) -> bool:
        """Return True if the load of the replicas is renewed; one that is given by address is not polled."""
        return self._source.can_change

    def block_sizes(self) -> frozenset[int]:
        """Return the sizes of blocks whose hashes `choose` compares, if there is a choice."""
        leases = [it.candidate().lease for it in self._replicas.values() if it.is_accepted]
        if len(leases) < 2:
            return frozenset()
        return frozenset(it.kv_block_tokens for it in leases if it.cached_prefixes) - {0}

    def _new_replica(self, address: str) -> TargetReplica:
        channel = self._open_channel(address)
        client = TargetClient(channel, address, self._fault_in, self._update, self.turns)
        return TargetReplica(address, client, channel)

    def _fault_in(self, info: pb.GetTargetInfoResponse | TargetLease) -> GalleyError | None:
        return self._requirements.fault_in(info, self.info)

    def _update(self) -> None:
        """Set `info` to what holds for the replicas that are up; keep the last one while none is."""
        infos = [it.client.info for it in self._replicas.values() if it.is_accepted and it.is_up]
        if infos and infos != self._infos:
            self._infos = infos
            self.info = _merged(infos)
            self._note_weights(frozenset(info.weights_digest for info in infos))

    def _note_weights(self, weights: frozenset[str]) -> None:
        """Log that targets differ in weights: an update goes on, or a replica has the wrong ones."""
        if weights != self._weights and len(weights) > 1:
            _log.warning("targets differ in weights", weights_digests=sorted(weights))
        self._weights = weights


def _merged(infos: Sequence[pb.GetTargetInfoResponse]) -> pb.GetTargetInfoResponse:
    """Return the info of the build that most replicas run, with all limits, and what any offers."""
    merged = pb.GetTargetInfoResponse()
    [(fingerprint, _)] = Counter(info.fingerprint for info in infos).most_common(1)
    merged.CopyFrom(next(info for info in infos if info.fingerprint == fingerprint))
    merged.context_window = min(info.context_window for info in infos)
    merged.max_draft_tokens = min(info.max_draft_tokens for info in infos)
    merged.deterministic = all(info.deterministic for info in infos)
    merged.lora_adapters[:] = sorted({name for info in infos for name in info.lora_adapters})
    merged.grammar_kinds[:] = sorted({kind for info in infos for kind in info.grammar_kinds})
    return merged
