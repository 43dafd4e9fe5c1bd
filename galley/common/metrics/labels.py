"""Labels of metrics with their bounds, and buckets of histograms."""

from __future__ import annotations

from galley.common.metrics.metric import OTHER, Label
from galley.core.admission.admission import (
    DRAINING,
    NO_SHARE,
    NO_SLOT,
    OWN_STREAMS,
    OWN_TOKENS,
    SATURATED,
)
from galley.core.audit import Verdict
from galley.core.names import (
    CHAT,
    GALLEY,
    LOCAL_SOURCES,
    LOOKUP,
    MOVE_REASONS,
    SHARED,
    STRATEGIES,
    TEXT_COMPLETION,
)
from galley.core.trees import MAX_WIDTH

GATEWAY, DRAFT, TARGET = "gateway", "draft", "target"
SERVICES = (GATEWAY, DRAFT, TARGET)

NO_WORKLOAD = "none"
NO_VERSION = "none"
OK = "ok"
DEADLINE_EXCEEDED = "deadline_exceeded"
NO_FAULT, CALLER_FAULT, SERVER_FAULT = "none", "caller", "server"

WORKLOAD = Label("workload", f"`workload` of the request; `{NO_WORKLOAD}` if it has none", most=32)
PRINCIPAL = Label(
    "principal",
    "kind of the caller: `anonymous`, `key` or `token`; with `--usage-by-principal` its name",
    most=64,
)
DIRECTION = Label(
    "direction", "`input`: prompt tokens; `output`: tokens of the answer", values=("input", "output")
)
STRATEGY = Label(
    "strategy",
    "what proposed the tokens: a strategy; `shared`: lookup in answers that other drafts have followed; by "
    "the gateway itself `grammar` (what a grammar forces), `prediction` (what callers predict), `lookup`; "
    "`none`: no draft tokens",
    values=(*STRATEGIES, SHARED, *LOCAL_SOURCES, LOOKUP, OTHER),
)
MODEL = Label("model", "name of the served model", most=4)
POSITION = Label(
    "position",
    "position in the round: how many draft tokens are before on the path",
    values=(*(str(position) for position in range(16)), "16+"),
)
RANK = Label(
    "rank",
    "place of the draft token among the candidates for its position, the likeliest first; 0 of a chain",
    values=tuple(str(rank) for rank in range(MAX_WIDTH)),
)
ORIGIN = Label("origin", "`draft`: accepted draft tokens; `target`: the others", values=("draft", "target"))
WASTED = Label(
    "reason",
    "`rejected`: verified and not accepted; `unverified`: never verified (late, or no room); "
    "`cancelled`: drafted for a cancelled proposal",
    values=("rejected", "unverified", "cancelled"),
)
PASSED = Label("direction", "`received`: from targets; `sent`: to drafts", values=("received", "sent"))
COMPILED = Label("result", "`ok`; `refused`: the request's grammar cannot be used", values=("ok", "refused"))
COLLECTED = Label(
    "result",
    "`kept`; `dropped`: too many at once, Redis was away, or deleted meanwhile",
    values=("kept", "dropped"),
)
OVERLAP = Label(
    "result",
    "`hit`: draft tokens were ready when the round started; `miss`: they were still being drafted",
    values=("hit", "miss"),
)
POOL = Label("pool", "pool of replicas", values=("draft", "target"))
REPLICA = Label("replica", "address of the replica, host:port", most=64)
MOVED = Label(
    "reason",
    "`failed`: a request failed; `late`: a response was late; `left`: it drained or its lease ended; "
    "`hedged`: another replica responded first; `restarted`: same address, new process",
    values=MOVE_REASONS,
)
UP = Label("state", "`up`: connected and accepted by the gateway", values=("up", "down"))
REFUSED = Label(
    "reason",
    "`streams`: the gateway's slots are in use; `share`: the caller has its fair share while others wait; "
    "`saturated`: responses of targets wait for their turn in the gateway; "
    "`own_streams`, `own_tokens`: the caller's own limits; `draining`: the gateway is shutting down",
    values=(NO_SLOT, NO_SHARE, SATURATED, OWN_STREAMS, OWN_TOKENS, DRAINING),
)
BUILD = Label(
    "build",
    "target build of the audited tokens; `deterministic`: it promises the same tokens in any batch, so each "
    "difference is an incident",
    values=("deterministic", "other"),
)
COMPARED = Label(
    "result",
    "`same`: the target computed the logged token again; `differs`: it computed another",
    values=("same", "differs"),
)
VERDICT = Label(
    "verdict",
    "`damaged`: the stored session does not agree with its hash; `not_compared`: no target of its build "
    "is up, or those failed",
    values=tuple(verdict.value for verdict in Verdict),
)
SKIPPED = Label(
    "reason",
    "`expired`: the session was no longer stored when a target had time; `backlog`: too many waited; `long`: "
    "the audit reached its limit of computing time; `failed`: by an error; `drained`: the gateway shut down",
    values=("expired", "backlog", "long", "failed", "drained"),
)
DRAFT_VERSION = Label(
    "version",
    "version of the draft that a session was given, whatever then served it; "
    f"`{NO_VERSION}`: any that no trial names",
    most=16,
    keeps_latest=True,
)
DECISION = Label(
    "decision",
    "`promoted`: the version was better and gets all sessions; `rolled_back`: it was worse or failed, and "
    "gets none; `no_gain`: it was not better, and gets none",
    values=("promoted", "rolled_back", "no_gain"),
)
OPERATION = Label("gen_ai.operation.name", "requested operation", values=(CHAT, TEXT_COMPLETION))
PROVIDER = Label("gen_ai.provider.name", "always `galley`", values=(GALLEY,))
REQUEST_MODEL = Label(
    "gen_ai.request.model",
    "name of the served model or the LoRA adapter, or `other` if another was requested",
    most=32,
)
RESPONSE_MODEL = Label(
    "gen_ai.response.model",
    "name of the served model or the LoRA adapter, if a session was opened",
    most=32,
)

# Statuses of calls with their fault.
ENDS: tuple[tuple[str, str], ...] = (
    (OK, NO_FAULT),
    ("cancelled", CALLER_FAULT),
    ("invalid_argument", CALLER_FAULT),
    (DEADLINE_EXCEEDED, CALLER_FAULT),
    ("not_found", CALLER_FAULT),
    ("already_exists", CALLER_FAULT),
    ("failed_precondition", CALLER_FAULT),
    ("resource_exhausted", CALLER_FAULT),
    ("resource_exhausted", SERVER_FAULT),
    ("unimplemented", CALLER_FAULT),
    ("unavailable", CALLER_FAULT),
    ("unavailable", SERVER_FAULT),
    ("data_loss", SERVER_FAULT),
    ("internal", SERVER_FAULT),
)
ERRORS = tuple(dict.fromkeys(end for end, _ in ENDS if end != OK))
OUTCOME = Label("outcome", "`ok`, or the status in lower case", values=(OK, *ERRORS))
FAULT = Label(
    "fault",
    "`caller`: bad request, own limits, cancelled, unread, or deadline passed; "
    "`server`: all other errors, full gateways and shutdowns included",
    values=(NO_FAULT, CALLER_FAULT, SERVER_FAULT),
)
ERROR_TYPE = Label("error.type", "status in lower case; empty for success", values=("", *ERRORS))
PROPOSED = Label(
    "outcome",
    "`superseded`: replaced by a newer request; `cancelled`: given up by the gateway",
    values=("result", "cache_miss", "superseded", "cancelled", "error"),
)
LOADED = Label(
    "result",
    "`refused`: before its files were sent; `failed`: afterwards, for example because they are damaged or do "
    "not suit the target. Both change nothing",
    values=("loaded", "refused", "failed"),
)
BLOCKS = Label(
    "state",
    "`used`: by open sessions; `cached`: evictable; `free`: empty",
    values=("used", "cached", "free"),
)
PROGRESS = Label(
    "state",
    "`running`: a target has given it a token; `queued`: not yet",
    values=("queued", "running"),
)
# Names that endpoint pickers of the Gateway API Inference Extension read.
BLOCK_SIZE = Label("block_size", "tokens in a KV block", most=1)
NUM_GPU_BLOCKS = Label("num_gpu_blocks", "KV blocks of all targets, on whatever device", most=1)
VERSION = Label("version", "version of the package", most=1)
SERVICE = Label("service", "name of the service", values=SERVICES)

# In seconds, or in what is counted.
REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
WAIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
COMMIT_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
DRAFT_TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
BATCH = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
