"""The labels of metrics, each with its bound, and the buckets of histograms."""

from __future__ import annotations

from galley.common.metrics.metric import OTHER, Label
from galley.core.admission.admission import DRAINING, NO_PLACE, NO_SHARE, OWN_STREAMS, OWN_TOKENS
from galley.core.names import CHAT, GALLEY, LOOKUP, MOVE_REASONS, STRATEGIES, TEXT_COMPLETION

GATEWAY, DRAFT, TARGET = "gateway", "draft", "target"
SERVICES = (GATEWAY, DRAFT, TARGET)

NO_WORKLOAD = "none"
OK = "ok"
NOBODYS, CALLERS, OURS = "none", "caller", "ours"

WORKLOAD = Label("workload", f"`workload` of the request; `{NO_WORKLOAD}` where it names none", most=32)
STRATEGY = Label(
    "strategy",
    "how the tokens were guessed; `lookup`: by the gateway itself; `none`: there were none",
    values=(*STRATEGIES, LOOKUP, OTHER),
)
MODEL = Label("model", "name of the served model", most=4)
POSITION = Label(
    "position", "of the draft token in its round", values=(*(str(position) for position in range(16)), "16+")
)
ORIGIN = Label("origin", "who had the token first", values=("draft", "target"))
WASTED = Label(
    "reason",
    "`rejected`: verified and refused; `unverified`: never verified, for it came too late or did not fit; "
    "`cancelled`: drafted for a proposal that was given up",
    values=("rejected", "unverified", "cancelled"),
)
OVERLAP = Label(
    "result", "were draft tokens ready when the round began, or still being drafted", values=("hit", "miss")
)
POOL = Label("pool", "which replicas", values=("draft", "target"))
REPLICA = Label("replica", "address", most=64)
MOVED = Label(
    "reason",
    "`failed`: it failed an item; `late`: it kept one waiting; `left`: it drained or was let go; `hedged`: "
    "another answered first; `restarted`: the same address, another life",
    values=MOVE_REASONS,
)
UP = Label("state", "`up`: may be asked", values=("up", "down"))
REFUSED = Label(
    "reason",
    "`streams`: all places of the gateway are in use; `share`: the caller has its share while others wait; "
    "`own_streams`, `own_tokens`: the caller's own limits; `draining`: the gateway is shutting down",
    values=(NO_PLACE, NO_SHARE, OWN_STREAMS, OWN_TOKENS, DRAINING),
)
OPERATION = Label("gen_ai.operation.name", "what was asked", values=(CHAT, TEXT_COMPLETION))
PROVIDER = Label("gen_ai.provider.name", "always `galley`", values=(GALLEY,))
REQUEST_MODEL = Label(
    "gen_ai.request.model", "the served model's name, or `other` if another was asked", most=4
)
RESPONSE_MODEL = Label("gen_ai.response.model", "the served model's name, if there was an answer", most=4)

# How a call can end, and whose fault that is.
ENDS: tuple[tuple[str, str], ...] = (
    (OK, NOBODYS),
    ("cancelled", CALLERS),
    ("invalid_argument", CALLERS),
    ("deadline_exceeded", CALLERS),
    ("not_found", CALLERS),
    ("already_exists", CALLERS),
    ("failed_precondition", CALLERS),
    ("resource_exhausted", CALLERS),
    ("resource_exhausted", OURS),
    ("unimplemented", CALLERS),
    ("unavailable", CALLERS),
    ("unavailable", OURS),
    ("data_loss", OURS),
    ("internal", OURS),
)
ERRORS = tuple(dict.fromkeys(end for end, _ in ENDS if end != OK))
OUTCOME = Label("outcome", "`ok`, or the status in lower case", values=(OK, *ERRORS))
FAULT = Label(
    "fault",
    "`caller`: it asked for what cannot be, used up its own limits, went away, did not read, or its deadline "
    "passed; `ours`: all else, full gateways and shutdowns included",
    values=(NOBODYS, CALLERS, OURS),
)
ERROR_TYPE = Label("error.type", "the status in lower case; empty where all went well", values=("", *ERRORS))
PROPOSED = Label(
    "outcome",
    "`superseded`: a newer question came; `cancelled`: nobody wanted it any more",
    values=("result", "cache_miss", "superseded", "cancelled", "error"),
)
BLOCKS = Label(
    "state",
    "`used`: live sessions hold them; `cached`: they hold what may be had back; `free`: nothing",
    values=("used", "cached", "free"),
)
VERSION = Label("version", "of the distribution", most=1)
SERVICE = Label("service", "which", values=SERVICES)

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
