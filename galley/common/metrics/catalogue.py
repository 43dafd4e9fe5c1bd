"""Catalogue of all metrics; `make metrics` writes it into docs/observe/metrics.md.

Names follow OpenTelemetry. In Prometheus, dots are underscores, units are suffixes (`_seconds`), and counters
end with `_total`. `gen_ai` metrics and their buckets are those of the semantic conventions.
"""

from __future__ import annotations

from galley.common.metrics import labels as of
from galley.common.metrics.labels import DRAFT, GATEWAY, SERVICES, TARGET
from galley.common.metrics.metric import Kind, Label, LabelValues, Metric


class _Of:
    """Make the metrics of one service."""

    def __init__(self, service: str) -> None:
        self._services = (service,)

    def counter(
        self,
        name: str,
        unit: str,
        description: str,
        *labels: Label,
        initial: tuple[LabelValues, ...] | None = None,
    ) -> Metric:
        return Metric(name, Kind.COUNTER, unit, description, self._services, labels, initial=initial)

    def gauge(
        self,
        name: str,
        unit: str,
        description: str,
        *labels: Label,
        initial: tuple[LabelValues, ...] | None = None,
    ) -> Metric:
        return Metric(name, Kind.GAUGE, unit, description, self._services, labels, initial=initial)

    def histogram(
        self,
        name: str,
        unit: str,
        buckets: tuple[float, ...],
        description: str,
        *labels: Label,
        initial: tuple[LabelValues, ...] | None = None,
        exemplars: bool = False,
    ) -> Metric:
        kind, services = Kind.HISTOGRAM, self._services
        return Metric(name, kind, unit, description, services, labels, buckets, initial, exemplars)


_GATEWAY, _DRAFT, _TARGET = _Of(GATEWAY), _Of(DRAFT), _Of(TARGET)
_GEN_AI = (of.OPERATION, of.PROVIDER, of.REQUEST_MODEL, of.RESPONSE_MODEL)
_DRAFTED = (of.WORKLOAD, of.STRATEGY, of.MODEL)

# ----------------------------------------------------------------------------------------- gateway --

REQUEST_DURATION = _GATEWAY.histogram(
    "gen_ai.server.request.duration",
    "s",
    of.REQUEST_S,
    "Duration of calls of Generate and Resume, with any status.",
    *_GEN_AI,
    of.ERROR_TYPE,
    exemplars=True,
)
TIME_TO_FIRST_TOKEN = _GATEWAY.histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    of.FIRST_TOKEN_S,
    "Time from the call to the first token sent, for new sessions.",
    *_GEN_AI,
    exemplars=True,
)
TIME_PER_OUTPUT_TOKEN = _GATEWAY.histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    of.TOKEN_S,
    "Mean time per output token after the first, for finished streams, without client stalls.",
    *_GEN_AI,
    exemplars=True,
)
ROUNDS = _GATEWAY.counter(
    "galley.rounds",
    "{round}",
    "Rounds that ended with a verdict.",
    of.WORKLOAD,
    of.STRATEGY,
)
DRAFTED_TOKENS = _GATEWAY.counter(
    "galley.drafted_tokens", "{token}", "Draft tokens sent to targets.", *_DRAFTED
)
VERIFIED_TOKENS = _GATEWAY.counter(
    "galley.verified_tokens",
    "{token}",
    "Draft tokens that targets verified. The acceptance rate is accepted over verified tokens.",
    *_DRAFTED,
)
ACCEPTED_TOKENS = _GATEWAY.counter(
    "galley.accepted_tokens", "{token}", "Draft tokens that targets accepted.", *_DRAFTED
)
ACCEPTED_AT = _GATEWAY.counter(
    "galley.accepted_at",
    "{token}",
    "Accepted draft tokens, by position in the round.",
    of.POSITION,
)
VERIFIED_AT = _GATEWAY.counter(
    "galley.verified_at",
    "{token}",
    "Verified draft tokens, by position in the round.",
    of.POSITION,
)
CONFIRMED_TOKENS = _GATEWAY.counter(
    "galley.confirmed_tokens",
    "{token}",
    "Confirmed output tokens, by origin.",
    of.ORIGIN,
    of.WORKLOAD,
)
K = _GATEWAY.histogram(
    "galley.k",
    "{token}",
    of.DRAFT_TOKENS,
    "Draft tokens requested for each round; 0 without drafting.",
    of.WORKLOAD,
)
PLAIN_TIME = _GATEWAY.counter(
    "galley.plain_time",
    "s",
    "Estimated time of plain decoding for the tokens of the same rounds.",
    of.WORKLOAD,
)
DECODE_TIME = _GATEWAY.counter(
    "galley.decode_time",
    "s",
    "Duration of rounds, without those that read a prompt. Live speed-up is plain time over this.",
    of.WORKLOAD,
)
WASTED_DRAFT_TOKENS = Metric(
    "galley.wasted_draft_tokens",
    Kind.COUNTER,
    "{token}",
    "Draft tokens without effect. Drafts count cancelled ones, gateways the others.",
    (GATEWAY, DRAFT),
    (of.WASTED,),
    initial=(),
)
WASTED_VERIFY_TOKENS = _GATEWAY.counter(
    "galley.wasted_verify_tokens", "{token}", "Rows that targets computed without confirming a token."
)
DRAFT_WAIT = _GATEWAY.histogram(
    "galley.verify.draft_wait",
    "s",
    of.WAIT_S,
    "Time in a round during which verification waited for a draft.",
)
OVERLAPS = _GATEWAY.counter(
    "galley.overlap",
    "{round}",
    "Rounds with drafting, by whether draft tokens were ready at the start.",
    of.OVERLAP,
)
ROUND_DURATION = _GATEWAY.histogram(
    "galley.round.duration",
    "s",
    of.STEP_S,
    "Duration of rounds, from one verdict to the next.",
    exemplars=True,
)
COMMIT_DURATION = _GATEWAY.histogram(
    "galley.commit.duration",
    "s",
    of.COMMIT_S,
    "Duration of commits to the session store, with retries. A token is sent only after its commit.",
    of.OUTCOME,
    initial=((of.OK,), ("unavailable",)),
    exemplars=True,
)
SESSIONS_OPEN = _GATEWAY.gauge("galley.sessions.open", "{session}", "Sessions that hold an admission slot.")
STREAMS = _GATEWAY.counter(
    "galley.streams",
    "{call}",
    "Finished calls of Generate and Resume, by status and fault.",
    of.OUTCOME,
    of.FAULT,
    initial=of.ENDS,
)
RESUMES = _GATEWAY.counter("galley.resumes", "{call}", "Finished calls of Resume, by status.", of.OUTCOME)
ADMISSION_REJECTED = _GATEWAY.counter(
    "galley.admission.rejected",
    "{call}",
    "Calls that admission rejected before any work was done.",
    of.REFUSED,
)
FAILOVERS = _GATEWAY.counter(
    "galley.failovers",
    "{session}",
    "Sessions that continued at another or a restarted replica.",
    of.POOL,
    of.MOVED,
)
BREAKER_STATE = _GATEWAY.gauge(
    "galley.breaker.state",
    "",
    "State of each draft replica's circuit breaker: 0 closed, 1 half open, 2 open.",
    of.POOL,
    of.REPLICA,
)
REPLICAS = _GATEWAY.gauge(
    "galley.replicas",
    "{replica}",
    "Replicas known to this gateway. The draft pool is absent if drafting is disabled.",
    of.POOL,
    of.UP,
    initial=(),
)
CLIENT_STALLS = _GATEWAY.counter(
    "galley.client.stalls",
    "{stall}",
    "Times that a client did not read its stream for a second or longer.",
)
STORE_RETRIES = _GATEWAY.counter(
    "galley.store.retries",
    "{call}",
    "Calls to the session store that were repeated because it did not answer.",
)
PEER_CERTIFICATE_EXPIRY = _GATEWAY.gauge(
    "galley.tls.peer_certificate_expiry_timestamp",
    "s",
    "Expiry of the certificate that the gateway presents to replicas, in Unix time; absent without one.",
    initial=(),
)
CACHE_MISSES = _GATEWAY.counter(
    "galley.cache.misses",
    "{request}",
    "Requests to replicas that were answered with a cache miss, preempted ones included.",
    of.POOL,
)

# ------------------------------------------------------------------------------------------- draft --

DRAFT_QUEUE_AGE = _DRAFT.histogram(
    "galley.draft.queue.age",
    "s",
    of.WAIT_S,
    "Time from the arrival of a proposal request to its first step.",
)
DRAFT_QUEUE_DEPTH = _DRAFT.gauge("galley.draft.queue.depth", "{request}", "Unanswered proposal requests.")
DRAFT_BATCH_SESSIONS = _DRAFT.histogram(
    "galley.draft.batch.sessions", "{session}", of.BATCH, "Sessions in a step."
)
DRAFT_STEP_DURATION = _DRAFT.histogram(
    "galley.draft.step.duration",
    "s",
    of.STEP_S,
    "Duration of one forward pass of the draft.",
)
DRAFT_PROPOSALS = _DRAFT.counter(
    "galley.draft.proposals",
    "{request}",
    "Proposal requests, by outcome.",
    of.STRATEGY,
    of.PROPOSED,
    initial=(),
)

# ------------------------------------------------------------------------------------------ target --

BATCH_SESSIONS = _TARGET.histogram("galley.batch.sessions", "{session}", of.BATCH, "Sessions in a step.")
BATCH_ROWS = _TARGET.histogram("galley.batch.rows", "{row}", of.ROWS, "Rows (input tokens) of a step.")
BATCH_TOKENS = _TARGET.histogram("galley.batch.tokens", "{token}", of.ROWS, "Tokens that a step confirmed.")
BATCH_DURATION = _TARGET.histogram("galley.batch.duration", "s", of.STEP_S, "Duration of a step.")
BATCH_PREFILL_ROWS = _TARGET.counter("galley.batch.prefill_rows", "{row}", "Rows that read prompts.")
BATCH_DRAFT_ROWS = _TARGET.counter("galley.batch.draft_rows", "{row}", "Rows that verified draft tokens.")
LINGER = _TARGET.counter("galley.linger", "s", "Time for which steps waited for draft tokens that were due.")
QUEUE_DEPTH = _TARGET.gauge("galley.queue.depth", "{request}", "Open requests.")
QUEUE_AGE = _TARGET.histogram(
    "galley.queue.age",
    "s",
    of.WAIT_S,
    "Time from the arrival of a request to its first step.",
)
KV_BLOCKS = _TARGET.gauge("galley.kv.blocks", "{block}", "Blocks of the KV pool.", of.BLOCKS)
KV_PROMPT_TOKENS = _TARGET.counter(
    "galley.kv.prompt_tokens",
    "{token}",
    "Tokens of new or moved sessions, which have no KV of their own at this replica.",
)
KV_REUSED_TOKENS = _TARGET.counter(
    "galley.kv.reused_tokens",
    "{token}",
    "Tokens of galley.kv.prompt_tokens whose KV was cached (prefix cache hits).",
)
KV_MISSES = _TARGET.counter(
    "galley.kv.misses",
    "{request}",
    "Requests whose prefix was not cached, answered with a cache miss.",
)
PREEMPTIONS = _TARGET.counter(
    "galley.preemptions",
    "{session}",
    "Sessions whose request was stopped to free KV blocks.",
)
EVICTIONS = _TARGET.counter("galley.evictions", "{block}", "Cached blocks that were evicted.")
OUT_OF_BLOCKS = _TARGET.counter(
    "galley.out_of_blocks",
    "{request}",
    "Requests that were delayed, rejected or preempted because no KV block was free.",
)

# --------------------------------------------------------------------------------------------- all --

BUILD = Metric(
    "galley.build",
    Kind.INFO,
    "",
    "Version and service of the process.",
    SERVICES,
    (of.VERSION, of.SERVICE),
    initial=(),
)

SERVED_CERTIFICATE_EXPIRY = Metric(
    "galley.tls.certificate_expiry_timestamp",
    Kind.GAUGE,
    "s",
    "Expiry of the server's certificate, in Unix time; absent without TLS.",
    SERVICES,
    initial=(),
)

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))


def of_service(service: str) -> tuple[Metric, ...]:
    """Return the metrics of a service."""
    return tuple(metric for metric in METRICS if service in metric.services)
