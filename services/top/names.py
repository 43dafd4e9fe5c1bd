"""The metrics that `galley top` reads, by the names under which Prometheus knows them. Nowhere else."""

from __future__ import annotations

from typing import Final

# What begins with none of these is not even read.
READ: Final = ("galley_", "gen_ai_server_")

BUILD: Final = "galley_build_info"
SERVICE: Final = "service"

# Of gateways.
FIRST_TOKEN: Final = "gen_ai_server_time_to_first_token_seconds"  # noqa: S105  # no password
PER_TOKEN: Final = "gen_ai_server_time_per_output_token_seconds"  # noqa: S105
SESSIONS: Final = "galley_sessions_open"
ROUNDS: Final = "galley_rounds_total"
CONFIRMED: Final = "galley_confirmed_tokens_total"
VERIFIED: Final = "galley_verified_tokens_total"
ACCEPTED: Final = "galley_accepted_tokens_total"
K: Final = "galley_k"
PLAIN_TIME: Final = "galley_plain_time_seconds_total"
DECODE_TIME: Final = "galley_decode_time_seconds_total"
COMMIT: Final = "galley_commit_duration_seconds"
STREAMS: Final = "galley_streams_total"
REFUSED: Final = "galley_admission_refused_total"
FAILOVERS: Final = "galley_failovers_total"
BREAKER: Final = "galley_breaker_state"
WORKLOAD: Final = "workload"
OURS: Final = "ours"
POOL: Final = "pool"
REPLICA: Final = "replica"

# Of drafts.
DRAFT_DEPTH: Final = "galley_draft_queue_depth"
DRAFT_AGE: Final = "galley_draft_queue_age_seconds"
DRAFT_SESSIONS: Final = "galley_draft_batch_sessions"
DRAFT_STEP: Final = "galley_draft_step_duration_seconds"

# Of targets.
DEPTH: Final = "galley_queue_depth"
AGE: Final = "galley_queue_age_seconds"
BATCH_SESSIONS: Final = "galley_batch_sessions"
BATCH_ROWS: Final = "galley_batch_rows"
BATCH_TIME: Final = "galley_batch_duration_seconds"
KV_BLOCKS: Final = "galley_kv_blocks"
PREEMPTIONS: Final = "galley_preemptions_total"
STATE: Final = "state"
USED: Final = "used"
CACHED: Final = "cached"
FREE: Final = "free"

# Of histograms.
BUCKET: Final = "_bucket"
SUM: Final = "_sum"
COUNT: Final = "_count"
BOUND: Final = "le"
# What only grows, but for a process that begins anew.
GROWING: Final = ("_total", BUCKET, SUM, COUNT)
