"""Catalogue of all metrics; `make metrics` writes it into docs/observe/metrics.md.

Names follow OpenTelemetry. In Prometheus, dots are underscores, units are suffixes (`_seconds`), and counters
end with `_total`. `gen_ai` metrics and their buckets are those of the semantic conventions.
"""

from __future__ import annotations

from functools import partial

from galley.common.metrics import labels as of
from galley.common.metrics.labels import DRAFT, GATEWAY, SERVICES, TARGET
from galley.common.metrics.metric import Kind, Metric

_gateway_counter = partial(Metric, kind=Kind.COUNTER, services=(GATEWAY,))
_gateway_gauge = partial(Metric, kind=Kind.GAUGE, services=(GATEWAY,))
_gateway_histogram = partial(Metric, kind=Kind.HISTOGRAM, services=(GATEWAY,))
_draft_counter = partial(Metric, kind=Kind.COUNTER, services=(DRAFT,))
_draft_gauge = partial(Metric, kind=Kind.GAUGE, services=(DRAFT,))
_draft_histogram = partial(Metric, kind=Kind.HISTOGRAM, services=(DRAFT,))
_target_counter = partial(Metric, kind=Kind.COUNTER, services=(TARGET,))
_target_gauge = partial(Metric, kind=Kind.GAUGE, services=(TARGET,))
_target_histogram = partial(Metric, kind=Kind.HISTOGRAM, services=(TARGET,))

_GEN_AI = (of.OPERATION, of.PROVIDER, of.REQUEST_MODEL, of.RESPONSE_MODEL)
_DRAFTED = (of.WORKLOAD, of.STRATEGY, of.MODEL)

# ----------------------------------------------------------------------------------------- gateway --

REQUEST_DURATION = _gateway_histogram(
    "gen_ai.server.request.duration",
    "s",
    "Duration of calls of Generate and Resume, with any status.",
    (*_GEN_AI, of.ERROR_TYPE),
    buckets=of.REQUEST_S,
    exemplars=True,
)
TIME_TO_FIRST_TOKEN = _gateway_histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Time from the call to the first token sent, for new sessions; without one, to a deadline that passed or "
    "to a cancellation after more than 1 s.",
    _GEN_AI,
    buckets=of.FIRST_TOKEN_S,
    exemplars=True,
)
TIME_PER_OUTPUT_TOKEN = _gateway_histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per output token after the first, without client stalls, for streams that finished or whose "
    "deadline passed.",
    _GEN_AI,
    buckets=of.TOKEN_S,
    exemplars=True,
)
ROUNDS = _gateway_counter(
    "galley.rounds", "{round}", "Rounds that ended with a verdict.", (of.WORKLOAD, of.STRATEGY)
)
DRAFTED_TOKENS = _gateway_counter(
    "galley.drafted_tokens", "{token}", "Draft tokens sent to targets.", _DRAFTED
)
VERIFIED_TOKENS = _gateway_counter(
    "galley.verified_tokens",
    "{token}",
    "Draft tokens that targets verified. The acceptance rate is accepted over verified tokens.",
    _DRAFTED,
)
ACCEPTED_TOKENS = _gateway_counter(
    "galley.accepted_tokens", "{token}", "Draft tokens that targets accepted.", _DRAFTED
)
ACCEPTED_AT = _gateway_counter(
    "galley.accepted_at", "{round}", "Rounds that accepted a draft token for a position.", (of.POSITION,)
)
VERIFIED_AT = _gateway_counter(
    "galley.verified_at", "{round}", "Rounds that verified draft tokens for a position.", (of.POSITION,)
)
ACCEPTED_BY_RANK = _gateway_counter(
    "galley.accepted_by_rank",
    "{token}",
    "Accepted draft tokens, by rank among the candidates for their position.",
    (of.RANK,),
)
VERIFIED_BY_RANK = _gateway_counter(
    "galley.verified_by_rank",
    "{token}",
    "Verified draft tokens, by rank among the candidates for their position.",
    (of.RANK,),
)
PROPOSALS = _gateway_counter(
    "galley.proposals", "{proposal}", "Proposals of drafts that arrived, counted when a stream ends."
)
PROPOSALS_WITH_FEATURES = _gateway_counter(
    "galley.proposals_with_features",
    "{proposal}",
    "Those for which the draft read the target's state of the token before the last confirmed one.",
)
FEATURE_BYTES = _gateway_counter(
    "galley.feature_bytes",
    "By",
    "Bytes of the target's states that gateways receive for drafts, and send them.",
    (of.PASSED,),
)
PROMPT_TOKENS = _gateway_counter(
    "galley.prompt_tokens", "{token}", "Prompt tokens of new sessions.", (of.WORKLOAD,)
)
USAGE_TOKENS = _gateway_counter(
    "galley.usage.tokens",
    "{token}",
    "Prompt tokens of new sessions and confirmed output tokens, by caller.",
    (of.PRINCIPAL, of.DIRECTION),
)
CONFIRMED_TOKENS = _gateway_counter(
    "galley.confirmed_tokens", "{token}", "Confirmed output tokens, by origin.", (of.ORIGIN, of.WORKLOAD)
)
K = _gateway_histogram(
    "galley.k",
    "{token}",
    "Draft tokens requested for each round; 0 without drafting.",
    (of.WORKLOAD,),
    buckets=of.DRAFT_TOKENS,
)
PLAIN_TIME = _gateway_counter(
    "galley.plain_time",
    "s",
    "Estimated time that plain decoding would take for the rounds of galley.decode_time.",
    (of.WORKLOAD,),
)
DECODE_TIME = _gateway_counter(
    "galley.decode_time",
    "s",
    "Duration of rounds, without those that read a prompt. Live speed-up is plain time over this.",
    (of.WORKLOAD,),
)
WASTED_DRAFT_TOKENS = Metric(
    "galley.wasted_draft_tokens",
    "{token}",
    "Draft tokens without effect. Drafts count cancelled ones, gateways the others.",
    (of.WASTED,),
    initial=(),
    kind=Kind.COUNTER,
    services=(GATEWAY, DRAFT),
)
WASTED_VERIFY_TOKENS = _gateway_counter(
    "galley.wasted_verify_tokens", "{token}", "Rows that targets computed without confirming a token."
)
DRAFT_WAIT = _gateway_histogram(
    "galley.verify.draft_wait",
    "s",
    "Time in a round during which verification waited for a draft.",
    buckets=of.WAIT_S,
)
OVERLAPS = _gateway_counter(
    "galley.overlap",
    "{round}",
    "Rounds with drafting, by whether draft tokens were ready at the start.",
    (of.OVERLAP,),
)
ROUND_DURATION = _gateway_histogram(
    "galley.round.duration",
    "s",
    "Duration of rounds, from one verdict to the next.",
    buckets=of.STEP_S,
    exemplars=True,
)
COMMIT_DURATION = _gateway_histogram(
    "galley.commit.duration",
    "s",
    "Duration of commits to the session store, with retries. A token is sent only after its commit.",
    (of.OUTCOME,),
    buckets=of.COMMIT_S,
    initial=((of.OK,), ("unavailable",)),
    exemplars=True,
)
GRAMMAR_COMPILE_DURATION = _gateway_histogram(
    "galley.grammar.compile_duration",
    "s",
    "Time that a request's grammar took to compile; grammars that are compiled already are not counted.",
    (of.COMPILED,),
    buckets=of.COMMIT_S,
)
LEARNING_SESSIONS = _gateway_counter(
    "galley.learning.sessions",
    "{session}",
    "Finished sessions that drafts may be trained on (`--learn-tokens`).",
    (of.COLLECTED,),
)
SESSIONS_OPEN = _gateway_gauge("galley.sessions.open", "{session}", "Sessions that hold an admission slot.")
SESSIONS_LIMIT = _gateway_gauge(
    "galley.sessions.limit", "{session}", "Admission slots: the most open sessions (`--max-sessions`)."
)
SESSIONS = _gateway_gauge("galley.sessions", "{session}", "Open sessions, by their progress.", (of.PROGRESS,))
TARGETS_KV_USAGE = _gateway_gauge(
    "galley.targets.kv_usage",
    "",
    "Share of all targets' KV blocks that live sessions hold, 0 to 1; absent while no target is up, and for "
    "a single one given by address, which is not polled.",
    initial=(),
)
TARGETS_CACHE = Metric(
    "galley.targets.cache",
    "",
    "KV blocks of all targets that are up.",
    (of.BLOCK_SIZE, of.NUM_GPU_BLOCKS),
    initial=(),
    kind=Kind.INFO,
    services=(GATEWAY,),
)
STREAMS = _gateway_counter(
    "galley.streams",
    "{call}",
    "Finished calls of Generate and Resume, by status and fault.",
    (of.OUTCOME, of.FAULT),
    initial=of.ENDS,
)
RESUMES = _gateway_counter("galley.resumes", "{call}", "Finished calls of Resume, by status.", (of.OUTCOME,))
ADMISSION_REJECTED = _gateway_counter(
    "galley.admission.rejected",
    "{call}",
    "Calls that admission rejected before any work was done.",
    (of.REFUSED,),
)
FAILOVERS = _gateway_counter(
    "galley.failovers",
    "{session}",
    "Sessions that continued at another or a restarted replica.",
    (of.POOL, of.MOVED),
)
BREAKER_STATE = _gateway_gauge(
    "galley.breaker.state",
    "",
    "State of each draft replica's circuit breaker: 0 closed, 1 half open, 2 open.",
    (of.POOL, of.REPLICA),
)
REPLICAS = _gateway_gauge(
    "galley.replicas",
    "{replica}",
    "Replicas known to this gateway. The draft pool is absent if drafting is disabled.",
    (of.POOL, of.UP),
    initial=(),
)
CLIENT_STALLS = _gateway_counter(
    "galley.client.stalls", "{stall}", "Times that a client did not read its stream for a second or longer."
)
STORE_RETRIES = _gateway_counter(
    "galley.store.retries",
    "{call}",
    "Calls to the session store that were repeated because it did not respond.",
)
PEER_CERTIFICATE_EXPIRY = _gateway_gauge(
    "galley.tls.peer_certificate_expiry_timestamp",
    "s",
    "Expiry of the certificate that the gateway presents to replicas, in Unix time; absent without one.",
    initial=(),
)
CACHE_MISSES = _gateway_counter(
    "galley.cache.misses",
    "{request}",
    "Requests to replicas whose response was a cache miss, preempted ones included.",
    (of.POOL,),
)
AUDIT_TOKENS = _gateway_counter(
    "galley.audit.tokens",
    "{token}",
    "Output tokens that an audit computed again and compared with the token log.",
    (of.BUILD, of.COMPARED),
)
AUDIT_SESSIONS = _gateway_counter("galley.audit.sessions", "{session}", "Audits, by verdict.", (of.VERDICT,))
AUDIT_SKIPPED = _gateway_counter(
    "galley.audit.skipped",
    "{session}",
    "Sessions that were drawn for an audit, and not audited or not to their end.",
    (of.SKIPPED,),
)
AUDIT_TIME = _gateway_counter("galley.audit", "s", "Computing time of audits at targets.")
AUDIT_WAITING = _gateway_gauge(
    "galley.audit.waiting", "{session}", "Finished sessions that wait for their audit in this gateway."
)
DRAFT_VERSION_SESSIONS = _gateway_counter(
    "galley.draft.version.sessions",
    "{session}",
    "Finished sessions, by the version of the draft that they were given.",
    (of.DRAFT_VERSION,),
)
DRAFT_VERSION_OUTPUT_TOKENS = _gateway_counter(
    "galley.draft.version.output_tokens",
    "{token}",
    "Output tokens of these sessions.",
    (of.DRAFT_VERSION,),
)
DRAFT_VERSION_ACCEPTED_TOKENS = _gateway_counter(
    "galley.draft.version.accepted_tokens",
    "{token}",
    "Output tokens of these sessions that drafts proposed. Their share of the output tokens is the gain.",
    (of.DRAFT_VERSION,),
)
DRAFT_VERSION_SHARE = _gateway_gauge(
    "galley.draft.version.share",
    "",
    "Share of the sessions that the split gives to a version; absent without a split.",
    (of.DRAFT_VERSION,),
    initial=(),
)
DRAFT_VERSION_DECISIONS = _gateway_counter(
    "galley.draft.version.decisions",
    "{decision}",
    "Trials of versions that this gateway ended by rule.",
    (of.DECISION,),
)

# ------------------------------------------------------------------------------------------- draft --

DRAFT_QUEUE_AGE = _draft_histogram(
    "galley.draft.queue.age",
    "s",
    "Time from the arrival of a proposal request to its first step.",
    buckets=of.WAIT_S,
)
DRAFT_QUEUE_DEPTH = _draft_gauge("galley.draft.queue.depth", "{request}", "Open proposal requests.")
DRAFT_BATCH_SESSIONS = _draft_histogram(
    "galley.draft.batch.sessions", "{session}", "Sessions in a step.", buckets=of.BATCH
)
DRAFT_STEP_DURATION = _draft_histogram(
    "galley.draft.step.duration", "s", "Duration of one forward pass of the draft.", buckets=of.STEP_S
)
DRAFT_PROPOSALS = _draft_counter(
    "galley.draft.proposals",
    "{request}",
    "Proposal requests, by outcome.",
    (of.STRATEGY, of.PROPOSED),
    initial=(),
)
DRAFT_LOADS = _draft_counter(
    "galley.draft.loads",
    "{load}",
    "Calls of LoadDraft, which replaces the weights of a running draft.",
    (of.LOADED,),
)

# ------------------------------------------------------------------------------------------ target --

BATCH_SESSIONS = _target_histogram(
    "galley.batch.sessions", "{session}", "Sessions in a step.", buckets=of.BATCH
)
BATCH_ROWS = _target_histogram(
    "galley.batch.rows", "{row}", "Rows (input tokens) of a step.", buckets=of.ROWS
)
BATCH_TOKENS = _target_histogram(
    "galley.batch.tokens", "{token}", "Tokens that a step confirmed.", buckets=of.ROWS
)
BATCH_DURATION = _target_histogram("galley.batch.duration", "s", "Duration of a step.", buckets=of.STEP_S)
BATCH_PREFILL_ROWS = _target_counter("galley.batch.prefill_rows", "{row}", "Rows that read prompts.")
BATCH_DRAFT_ROWS = _target_counter("galley.batch.draft_rows", "{row}", "Rows that verified draft tokens.")
LINGER = _target_counter("galley.linger", "s", "Time for which steps waited for draft tokens that were due.")
MASK_WAIT = _target_counter(
    "galley.mask_wait",
    "s",
    "Time for which steps of Galley's own engine waited for the masks of grammars after their forward pass.",
)
QUEUE_DEPTH = _target_gauge("galley.queue.depth", "{request}", "Open requests.")
QUEUE_AGE = _target_histogram(
    "galley.queue.age", "s", "Time from the arrival of a request to its first step.", buckets=of.WAIT_S
)
KV_BLOCKS = _target_gauge("galley.kv.blocks", "{block}", "Blocks of the KV pool.", (of.BLOCKS,))
KV_PROMPT_TOKENS = _target_counter(
    "galley.kv.prompt_tokens",
    "{token}",
    "Tokens of new or moved sessions, which have no KV of their own at this replica.",
)
KV_REUSED_TOKENS = _target_counter(
    "galley.kv.reused_tokens",
    "{token}",
    "Tokens of galley.kv.prompt_tokens whose KV was cached (prefix cache hits).",
)
KV_MISSES = _target_counter(
    "galley.kv.misses", "{request}", "Requests whose prefix was not cached; the response is a cache miss."
)
PREEMPTIONS = _target_counter(
    "galley.preemptions", "{session}", "Sessions whose request was stopped for lack of KV blocks or slots."
)
EVICTIONS = _target_counter("galley.evictions", "{block}", "Cached blocks that were evicted.")
OUT_OF_BLOCKS = _target_counter(
    "galley.out_of_blocks",
    "{request}",
    "Requests that were rejected or preempted because no KV block was free.",
)

# --------------------------------------------------------------------------------------------- all --

BUILD = Metric(
    "galley.build",
    "",
    "Version and service of the process.",
    (of.VERSION, of.SERVICE),
    initial=(),
    kind=Kind.INFO,
    services=SERVICES,
)

SERVED_CERTIFICATE_EXPIRY = Metric(
    "galley.tls.certificate_expiry_timestamp",
    "s",
    "Expiry of the server's certificate, in Unix time; absent without TLS.",
    initial=(),
    kind=Kind.GAUGE,
    services=SERVICES,
)

_process_gauge = partial(Metric, kind=Kind.GAUGE, services=SERVICES, initial=())
PROCESS_CPU = Metric(
    "process.cpu",
    "s",
    "CPU time of the process, user and system.",
    initial=(),
    kind=Kind.COUNTER,
    services=SERVICES,
)
PROCESS_START = _process_gauge("process.start_time", "s", "Start of the process, in Unix time.")
PROCESS_RESIDENT = _process_gauge("process.resident_memory", "By", "Memory of the process that is in RAM.")
PROCESS_VIRTUAL = _process_gauge("process.virtual_memory", "By", "Address space of the process.")
PROCESS_OPEN_FDS = _process_gauge(
    "process.open_fds", "", "Open file descriptors; absent on Linux before 6.2."
)
PROCESS_MAX_FDS = _process_gauge("process.max_fds", "", "Most file descriptors that may be open.")

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))


def of_service(service: str) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if service in metric.services)
