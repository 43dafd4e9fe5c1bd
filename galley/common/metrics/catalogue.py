"""Every metric that there is: the one table. `make metrics` writes it into docs/observe/metrics.md.

Names follow OpenTelemetry; Prometheus sees dots as underscores, `_seconds`, and `_total` on counters. Those
of `gen_ai` are the semantic conventions' own, with their buckets.
"""

from __future__ import annotations

from galley.common.metrics import labels as of
from galley.common.metrics.labels import DRAFT, GATEWAY, SERVICES, TARGET
from galley.common.metrics.metric import Kind, Label, LabelValues, Metric


class _Of:
    """Makes the metrics of one service."""

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
    "How long calls of Generate and Resume took, however they ended.",
    *_GEN_AI,
    of.ERROR_TYPE,
    exemplars=True,
)
TIME_TO_FIRST_TOKEN = _GATEWAY.histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    of.FIRST_TOKEN_S,
    "From the call to the first token handed over, of sessions that began with the call.",
    *_GEN_AI,
    exemplars=True,
)
TIME_PER_OUTPUT_TOKEN = _GATEWAY.histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    of.TOKEN_S,
    "Of answers that came to their end: time a token after the first, less the time left unread.",
    *_GEN_AI,
    exemplars=True,
)
ROUNDS = _GATEWAY.counter(
    "galley.rounds", "{round}", "Rounds: verdicts of a target.", of.WORKLOAD, of.STRATEGY
)
DRAFTED_TOKENS = _GATEWAY.counter(
    "galley.drafted_tokens", "{token}", "Draft tokens that targets were sent.", *_DRAFTED
)
VERIFIED_TOKENS = _GATEWAY.counter(
    "galley.verified_tokens",
    "{token}",
    "Draft tokens that targets verified; acceptance is counted over these.",
    *_DRAFTED,
)
ACCEPTED_TOKENS = _GATEWAY.counter(
    "galley.accepted_tokens", "{token}", "Draft tokens that were right.", *_DRAFTED
)
ACCEPTED_AT = _GATEWAY.counter(
    "galley.accepted_at",
    "{token}",
    "Draft tokens that were right, by their position in the round.",
    of.POSITION,
)
VERIFIED_AT = _GATEWAY.counter(
    "galley.verified_at",
    "{token}",
    "Draft tokens that were verified, by their position in the round.",
    of.POSITION,
)
CONFIRMED_TOKENS = _GATEWAY.counter(
    "galley.confirmed_tokens",
    "{token}",
    "Output tokens, by whether a draft had guessed them.",
    of.ORIGIN,
    of.WORKLOAD,
)
K = _GATEWAY.histogram(
    "galley.k",
    "{token}",
    of.DRAFT_TOKENS,
    "Tokens that the draft was last asked for, of each round; 0 where none were wanted.",
    of.WORKLOAD,
)
PLAIN_TIME = _GATEWAY.counter(
    "galley.plain_time",
    "s",
    "What plain decoding would have taken for the tokens of the same rounds, as estimated.",
    of.WORKLOAD,
)
DECODE_TIME = _GATEWAY.counter(
    "galley.decode_time",
    "s",
    "What rounds took, but for those that read a prompt. Live speed-up: plain time over this.",
    of.WORKLOAD,
)
WASTED_DRAFT_TOKENS = Metric(
    "galley.wasted_draft_tokens",
    Kind.COUNTER,
    "{token}",
    "Drafted in vain. The draft counts the cancelled, the gateway the others (unverified at the end).",
    (GATEWAY, DRAFT),
    (of.WASTED,),
    initial=(),
)
WASTED_VERIFY_TOKENS = _GATEWAY.counter(
    "galley.wasted_verify_tokens", "{token}", "Rows that targets computed and that confirmed nothing."
)
DRAFT_WAIT = _GATEWAY.histogram(
    "galley.verify.draft_wait",
    "s",
    of.WAIT_S,
    "How long verification stood idle in a round, waiting for a draft.",
)
OVERLAPS = _GATEWAY.counter(
    "galley.overlap",
    "{round}",
    "Rounds that wanted draft tokens, by whether these were ready.",
    of.OVERLAP,
)
ROUND_DURATION = _GATEWAY.histogram(
    "galley.round.duration",
    "s",
    of.STEP_S,
    "How long rounds took, from verdict to verdict.",
    exemplars=True,
)
COMMIT_DURATION = _GATEWAY.histogram(
    "galley.commit.duration",
    "s",
    of.COMMIT_S,
    "How long commits to the session store took, their repeats included. Tokens leave after them.",
    of.OUTCOME,
    initial=((of.OK,), ("unavailable",)),
    exemplars=True,
)
SESSIONS_OPEN = _GATEWAY.gauge("galley.sessions.open", "{session}", "Places for streams that are taken.")
STREAMS = _GATEWAY.counter(
    "galley.streams",
    "{call}",
    "Calls of Generate and Resume that have ended.",
    of.OUTCOME,
    of.FAULT,
    initial=of.ENDS,
)
RESUMES = _GATEWAY.counter("galley.resumes", "{call}", "Of those, calls of Resume.", of.OUTCOME)
ADMISSION_REFUSED = _GATEWAY.counter(
    "galley.admission.refused",
    "{call}",
    "Calls that were refused for want of a place or of tokens, before any work was done.",
    of.REFUSED,
)
FAILOVERS = _GATEWAY.counter(
    "galley.failovers",
    "{session}",
    "Sessions that another replica, or another life of the same, went on with.",
    of.POOL,
    of.MOVED,
)
BREAKER_STATE = _GATEWAY.gauge(
    "galley.breaker.state",
    "",
    "Of each replica's circuit breaker: 0 closed, 1 half open, 2 open. Drafts alone have one.",
    of.POOL,
    of.REPLICA,
)
REPLICAS = _GATEWAY.gauge(
    "galley.replicas",
    "{replica}",
    "Replicas that this gateway knows of. Without a draft by choice, that pool is left out.",
    of.POOL,
    of.UP,
    initial=(),
)
CLIENT_STALLS = _GATEWAY.counter(
    "galley.client.stalls",
    "{stall}",
    "Times that a client left what it was sent unread for a second or longer.",
)
STORE_RETRIES = _GATEWAY.counter(
    "galley.store.retries",
    "{call}",
    "Calls to the session store that were repeated, as it did not answer.",
)
PEER_CERTIFICATE_EXPIRY = _GATEWAY.gauge(
    "galley.tls.peer_certificate_expiry_timestamp",
    "s",
    "When the certificate that the gateway shows targets and drafts ends, in Unix time; absent without one.",
    initial=(),
)
CACHE_MISSES = _GATEWAY.counter(
    "galley.cache.misses",
    "{item}",
    "Items that were answered with a cache miss, preempted ones included: more had to be sent.",
    of.POOL,
)

# ------------------------------------------------------------------------------------------- draft --

DRAFT_QUEUE_AGE = _DRAFT.histogram(
    "galley.draft.queue.age",
    "s",
    of.WAIT_S,
    "How long a proposal that was asked for waited for its first step.",
)
DRAFT_QUEUE_DEPTH = _DRAFT.gauge("galley.draft.queue.depth", "{item}", "Proposals that are not answered yet.")
DRAFT_BATCH_SESSIONS = _DRAFT.histogram(
    "galley.draft.batch.sessions", "{session}", of.BATCH, "Sessions that shared a step."
)
DRAFT_STEP_DURATION = _DRAFT.histogram(
    "galley.draft.step.duration",
    "s",
    of.STEP_S,
    "How long a step took: of the sessions that came, or a further token for all.",
)
DRAFT_PROPOSALS = _DRAFT.counter(
    "galley.draft.proposals",
    "{item}",
    "Proposals that were asked for, by what became of them.",
    of.STRATEGY,
    of.PROPOSED,
    initial=(),
)

# ------------------------------------------------------------------------------------------ target --

BATCH_SESSIONS = _TARGET.histogram(
    "galley.batch.sessions", "{session}", of.BATCH, "Sessions that shared a pass."
)
BATCH_ROWS = _TARGET.histogram("galley.batch.rows", "{row}", of.ROWS, "Rows (tokens fed) of a pass.")
BATCH_TOKENS = _TARGET.histogram("galley.batch.tokens", "{token}", of.ROWS, "Tokens that a pass confirmed.")
BATCH_DURATION = _TARGET.histogram("galley.batch.duration", "s", of.STEP_S, "How long a pass took.")
BATCH_PREFILL_ROWS = _TARGET.counter("galley.batch.prefill_rows", "{row}", "Rows that read prompts.")
BATCH_DRAFT_ROWS = _TARGET.counter("galley.batch.draft_rows", "{row}", "Rows that verified draft tokens.")
LINGER = _TARGET.counter("galley.linger", "s", "Time that passes were put off, for a draft that was due.")
QUEUE_DEPTH = _TARGET.gauge("galley.queue.depth", "{item}", "Items that stand here.")
QUEUE_AGE = _TARGET.histogram(
    "galley.queue.age",
    "s",
    of.WAIT_S,
    "How long an item waited for the pass that fed its first row.",
)
KV_BLOCKS = _TARGET.gauge("galley.kv.blocks", "{block}", "Blocks of the KV pool.", of.BLOCKS)
KV_PROMPT_TOKENS = _TARGET.counter(
    "galley.kv.prompt_tokens",
    "{token}",
    "Tokens that sessions brought which had no KV of their own here: new ones, and those from elsewhere.",
)
KV_REUSED_TOKENS = _TARGET.counter(
    "galley.kv.reused_tokens",
    "{token}",
    "Of those, tokens whose KV was cached: the prefix cache's hits.",
)
KV_MISSES = _TARGET.counter(
    "galley.kv.misses",
    "{item}",
    "Items that built on a prefix which is not held here, answered with a cache miss.",
)
PREEMPTIONS = _TARGET.counter(
    "galley.preemptions",
    "{session}",
    "Sessions that had to stop in mid-item: for older ones, or for want of blocks.",
)
EVICTIONS = _TARGET.counter("galley.evictions", "{block}", "Cached blocks whose content went, to make room.")
OUT_OF_BLOCKS = _TARGET.counter(
    "galley.out_of_blocks",
    "{item}",
    "Items that were put off, refused or preempted because blocks had run out.",
)

# --------------------------------------------------------------------------------------------- all --

BUILD = Metric(
    "galley.build", Kind.INFO, "", "What runs here.", SERVICES, (of.VERSION, of.SERVICE), initial=()
)

SERVED_CERTIFICATE_EXPIRY = Metric(
    "galley.tls.certificate_expiry_timestamp",
    Kind.GAUGE,
    "s",
    "When the certificate that this server shows ends, in Unix time; absent without TLS.",
    SERVICES,
    initial=(),
)

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))


def of_service(service: str) -> tuple[Metric, ...]:
    """Those that it gives."""
    return tuple(metric for metric in METRICS if service in metric.services)
