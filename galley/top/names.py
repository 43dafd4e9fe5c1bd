"""The metrics that `galley top` reads, by their Prometheus names."""

from __future__ import annotations

from typing import Final

from galley.common.metrics import catalogue, labels
from galley.common.metrics.metric import Metric


def _only(metric: Metric) -> str:
    [name] = metric.series
    return name


# Series with other prefixes are skipped unread.
READ: Final = ("galley_", "gen_ai_server_")

BUILD: Final = _only(catalogue.BUILD)
SERVICE: Final = labels.SERVICE.prometheus

# Of gateways.
FIRST_TOKEN: Final = catalogue.TIME_TO_FIRST_TOKEN.prometheus
PER_TOKEN: Final = catalogue.TIME_PER_OUTPUT_TOKEN.prometheus
SESSIONS: Final = catalogue.SESSIONS_OPEN.prometheus
ROUNDS: Final = _only(catalogue.ROUNDS)
CONFIRMED: Final = _only(catalogue.CONFIRMED_TOKENS)
VERIFIED: Final = _only(catalogue.VERIFIED_TOKENS)
ACCEPTED: Final = _only(catalogue.ACCEPTED_TOKENS)
K: Final = catalogue.K.prometheus
PLAIN_TIME: Final = _only(catalogue.PLAIN_TIME)
DECODE_TIME: Final = _only(catalogue.DECODE_TIME)
COMMIT: Final = catalogue.COMMIT_DURATION.prometheus
STREAMS: Final = _only(catalogue.STREAMS)
REFUSED: Final = _only(catalogue.ADMISSION_REJECTED)
FAILOVERS: Final = _only(catalogue.FAILOVERS)
BREAKER: Final = catalogue.BREAKER_STATE.prometheus
WORKLOAD: Final = labels.WORKLOAD.prometheus
SERVER_FAULT: Final = labels.SERVER_FAULT
POOL: Final = labels.POOL.prometheus
REPLICA: Final = labels.REPLICA.prometheus

# Of drafts.
DRAFT_DEPTH: Final = catalogue.DRAFT_QUEUE_DEPTH.prometheus
DRAFT_AGE: Final = catalogue.DRAFT_QUEUE_AGE.prometheus
DRAFT_SESSIONS: Final = catalogue.DRAFT_BATCH_SESSIONS.prometheus
DRAFT_STEP: Final = catalogue.DRAFT_STEP_DURATION.prometheus

# Of targets.
DEPTH: Final = catalogue.QUEUE_DEPTH.prometheus
AGE: Final = catalogue.QUEUE_AGE.prometheus
BATCH_SESSIONS: Final = catalogue.BATCH_SESSIONS.prometheus
BATCH_ROWS: Final = catalogue.BATCH_ROWS.prometheus
BATCH_TIME: Final = catalogue.BATCH_DURATION.prometheus
KV_BLOCKS: Final = catalogue.KV_BLOCKS.prometheus
PREEMPTIONS: Final = _only(catalogue.PREEMPTIONS)
STATE: Final = labels.BLOCKS.prometheus
USED, CACHED, FREE = labels.BLOCKS.values

# Of histograms.
BUCKET: Final = "_bucket"
SUM: Final = "_sum"
COUNT: Final = "_count"
BOUND: Final = "le"
# Series that only grow, except when a process restarts.
GROWING: Final = ("_total", BUCKET, SUM, COUNT)
