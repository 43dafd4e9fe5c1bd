"""Names that several services write or read: of strategies, reasons for moves, spans and attributes.

`docs/observe/spans.md` explains the names of spans, attributes and events.
"""

from __future__ import annotations

from typing import Final

# Draft strategies, on the wire and in the configuration.
MODEL: Final = "model"
NGRAM: Final = "ngram"
HYBRID: Final = "hybrid"
FEATURES: Final = "features"
ORACLE: Final = "oracle"
NO_STRATEGY: Final = "none"
STRATEGIES: Final = (MODEL, NGRAM, HYBRID, FEATURES, ORACLE, NO_STRATEGY)
# Strategies that read the target's states, where the loaded draft does.
READS_FEATURES: Final = (FEATURES, HYBRID)
# The gateway's own prompt lookup, for when no draft replica answers. Clients cannot request it.
LOOKUP: Final = "lookup"

# Sources of draft tokens: what proposed them. Others are strategies, LOOKUP, and these. The first two are the
# gateway's own: what the grammar of a session forces, and what its caller predicts.
GRAMMAR: Final = "grammar"
PREDICTION: Final = "prediction"
LOCAL_SOURCES: Final = (GRAMMAR, PREDICTION)
# Lookup in answers that other draft replicas have followed.
SHARED: Final = "shared"
# What a draft may name as the source of its tokens, in place of its strategy.
DRAFT_SOURCES: Final = (MODEL, NGRAM, SHARED)

# Why a session moves to another replica.
MOVE_FAILED: Final = "failed"  # a request failed
MOVE_LATE: Final = "late"  # a verdict took too long
MOVE_LEFT: Final = "left"  # the replica is draining, or its lease has ended
MOVE_HEDGED: Final = "hedged"  # a hedged request was answered first
MOVE_RESTARTED: Final = "restarted"  # the same address, a new process
MOVE_REASONS: Final = (MOVE_FAILED, MOVE_LATE, MOVE_LEFT, MOVE_HEDGED, MOVE_RESTARTED)

# Version of the semantic conventions that spans of requests follow: the last with those of GenAI.
GEN_AI_CONVENTIONS: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{GEN_AI_CONVENTIONS}"

# Spans.
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
ROUND: Final = "round"
PROPOSE: Final = "galley.v1.Draft/Propose"
VERIFY: Final = "galley.v1.Target/Verify"
VERIFY_BATCH: Final = "verify batch"
DRAFT_BATCH: Final = "draft batch"
RANK_FORWARD: Final = "rank forward"
EVALSHA: Final = "EVALSHA"

# Attribute of a link: what the linked span is to this one.
LINK: Final = "galley.link"
LINK_BATCH: Final = "batch"
LINK_ITEM: Final = "item"
LINK_CONTINUES: Final = "continues"

# Attributes of requests and calls that the conventions define.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
GALLEY: Final = "galley"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
TOP_K: Final = "gen_ai.request.top_k"
FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
RPC_SYSTEM: Final = "rpc.system"
RPC_SERVICE: Final = "rpc.service"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.grpc.status_code"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"

# Further attributes of requests.
FIELD: Final = "galley.field"
FORCED: Final = "galley.force"
SEED: Final = "galley.seed"
STOP_COUNT: Final = "galley.stop_sequences"
SESSION_ID: Final = "galley.session.id"
WORKLOAD: Final = "galley.workload"
PRIORITY: Final = "galley.priority"
SPECULATION_MODE: Final = "galley.speculation.mode"
GRAMMAR_KIND: Final = "galley.grammar"
RESUMED: Final = "galley.resumed"
EPOCH: Final = "galley.epoch"
FINGERPRINT: Final = "galley.fingerprint"
ROUNDS: Final = "galley.rounds"
DRAFTED: Final = "galley.drafted"
VERIFIED: Final = "galley.verified"
ACCEPTED: Final = "galley.accepted"
SOURCES: Final = "galley.sources"
POSITIONS: Final = "galley.positions"
RANKS: Final = "galley.ranks"
PROPOSALS: Final = "galley.proposals"
PROPOSALS_WITH_FEATURES: Final = "galley.proposals_with_features"
TTFT_NS: Final = "galley.ttft_ns"
SLOWEST_ROUND_NS: Final = "galley.round.slowest_ns"
SLOWEST_ROUND_POSITION: Final = "galley.round.slowest_position"
SLOWEST_COMMIT_NS: Final = "galley.commit.slowest_ns"
MOVES: Final = "galley.moves"
CLIENT_STALLED_NS: Final = "galley.client.stalled_ns"

# Attributes of rounds. The four `_PART`s sum to the duration of the span.
ROUND_INDEX: Final = "galley.round.index"
ROUND_POSITION: Final = "galley.round.position"
ROUND_K: Final = "galley.round.k"
ROUND_DRAFTED: Final = "galley.round.drafted"
ROUND_VERIFIED: Final = "galley.round.verified"
ROUND_ACCEPTED: Final = "galley.round.accepted"
ROUND_CONFIRMED: Final = "galley.round.confirmed"
ROUND_STRATEGY: Final = "galley.round.strategy"
ROUND_SOURCES: Final = "galley.round.sources"
ROUND_DEPTH: Final = "galley.round.depth"
ROUND_RANKS: Final = "galley.round.ranks"
ROUND_OVERLAP: Final = "galley.round.overlap"
DRAFT_PART: Final = "galley.round.draft_ns"
QUEUE_PART: Final = "galley.round.queue_ns"
COMPUTE_PART: Final = "galley.round.compute_ns"
WIRE_PART: Final = "galley.round.wire_ns"
LINGER_NS: Final = "galley.round.linger_ns"
COMMIT_NS: Final = "galley.round.commit_ns"
DRAFT_COMPUTE_NS: Final = "galley.round.draft_compute_ns"
ROUND_TEXT: Final = "galley.round.text"
DRAFT_REPLICA: Final = "galley.draft.replica"
TARGET_REPLICA: Final = "galley.target.replica"
KV_REUSED: Final = "galley.kv.reused"

# Attributes of requests at a replica.
OUTCOME: Final = "galley.outcome"
CREDIT: Final = "galley.credit"
VERDICTS: Final = "galley.verdicts"
CONFIRMED: Final = "galley.confirmed"
K: Final = "galley.k"
STRATEGY: Final = "galley.strategy"
KV_LEN: Final = "galley.kv.len"
QUEUE_NS: Final = "galley.queue_ns"
COMPUTE_NS: Final = "galley.compute_ns"

# Attributes of calls and batches.
REPLICA: Final = "galley.replica"
DB_SYSTEM: Final = "db.system.name"
DB_OPERATION: Final = "db.operation.name"
REDIS: Final = "redis"
STORE_OPERATION: Final = "galley.store.operation"
STORE_ATTEMPTS: Final = "galley.store.attempts"
BATCH_SESSIONS: Final = "galley.batch.sessions"
BATCH_ROWS: Final = "galley.batch.rows"
BATCH_DRAFT_ROWS: Final = "galley.batch.draft_rows"
BATCH_PREFILL_ROWS: Final = "galley.batch.prefill_rows"
BATCH_PREFILL_SHARE: Final = "galley.batch.prefill_share"
BATCH_STEPS: Final = "galley.batch.steps"
FORWARD_NS: Final = "galley.batch.forward_ns"
MASK_WAIT_NS: Final = "galley.batch.mask_wait_ns"
RANK_FORWARD_NS: Final = "galley.batch.rank_forward_ns"
RANK: Final = "galley.rank"
RANK_WAITED_NS: Final = "galley.rank.waited_ns"
FREE_BLOCKS: Final = "galley.kv.free_blocks"
QUEUE_DEPTH: Final = "galley.queue.depth"

# Events and their attributes.
SESSION_MOVED: Final = "session.moved"
SESSION_FENCED: Final = "session.fenced"
SESSION_RESUMED: Final = "session.resumed"
REQUEST_RETRIED: Final = "request.retried"
DRAFT_ASSIGNED: Final = "draft.assigned"
DRAFT_DEGRADED: Final = "draft.degraded"
BREAKER_CHANGED: Final = "breaker.changed"
KV_MISSED: Final = "kv.missed"
KV_PREEMPTED: Final = "kv.preempted"
KV_EVICTED: Final = "kv.evicted"
STORE_RETRIED: Final = "store.retried"
CLIENT_STALLED: Final = "client.stalled"
NUMERICS_CHANGED: Final = "numerics.changed"
HEDGED: Final = "hedged"
DRAFT_VERSION: Final = "galley.draft.version"
IS_CANARY: Final = "galley.draft.canary"
POOL: Final = "galley.pool"
SOURCE: Final = "galley.source"
FROM: Final = "galley.from"
TO: Final = "galley.to"
REASON: Final = "galley.reason"
HAVE: Final = "galley.have"
EXPECTED: Final = "galley.expected"
STALLED_NS: Final = "galley.stalled_ns"
INDEX: Final = "galley.index"

# Metadata of a call whose request is to be traced whatever the sampling ratio is.
FORCE_KEY: Final = "x-galley-trace"
FORCE_VALUE: Final = "force"
