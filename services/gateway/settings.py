"""How a gateway is configured: flags, or GALLEY_GATEWAY_* in the environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, Self

from pydantic import Field, SecretStr, model_validator

from galley.common.config.defaults import DEFAULT_MODEL
from galley.common.config.limits import ServerLimits
from galley.common.config.settings import settings_config
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it
from galley.core.store import FINISHED_TTL_S, SESSION_TTL_S
from services.gateway.auth.settings import JWT_LEEWAY_S, TokenSettings

MAX_DRAFT_TOKENS = 64
"""The largest number of draft tokens in a round; targets and drafts have limits of their own."""
_CONNECTION_IDLE_S = 900.0
NO_DRAFT = "none"
"""In place of a draft's address: there is none."""


class Tuning(NamedTuple):
    """Values that operators need not change; tests and measurements do."""

    window: int = 64
    """Tokens that a session may be ahead of its log."""
    verify_timeout_s: float = 120.0
    """Longest time for one verification, the prefill of a long prompt included."""
    lookup_fallback: bool = True
    """Draft by lookup in the session's own tokens while no draft replica is available."""
    slow_round_ms: float = 250.0
    """A round that takes longer is slow, for `round_spans` "slow"."""
    jwt_leeway_s: float = JWT_LEEWAY_S
    """Accepted difference between the token issuer's clock and this one."""


TUNING = Tuning()


class GatewaySettings(TokenSettings):
    """Settings of the gateway."""

    model_config = settings_config("GALLEY_GATEWAY_")

    target: str = Field(
        "",
        description="Addresses of targets, host:port, with commas; empty: those that register at the store.",
    )
    draft: str = Field(
        "",
        description="Addresses of drafts, host:port, with commas; empty: those that register at the store; "
        "`none` decodes plainly.",
    )
    redis_url: RedisUrlSetting = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="Session store: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// "
        "(docs/operate/redis.md); with a password, by environment or by file.",
    )
    redis_url_file: str = Field("", description="File that holds it instead.")
    redis_wait_replicas: int = Field(
        0, ge=0, description="Replicas of the store that must have a commit before its tokens leave."
    )
    peer_ca_file: str = Field(
        "",
        description="PEM of the authorities of targets and drafts, which are spoken to over TLS then; "
        "empty: plainly.",
    )
    peer_cert_file: str = Field("", description="PEM of the certificate that targets and drafts are shown.")
    peer_key_file: str = Field("", description="PEM of its key.")
    target_tls_name: str = Field(
        "", description="Name that targets' certificates must bear; empty: the host of the address."
    )
    draft_tls_name: str = Field(
        "", description="Name that drafts' certificates must bear; empty: the host of the address."
    )
    model: str = Field(DEFAULT_MODEL, description="Where the target's tokenizer is: a directory or a hub id.")
    model_name: str = Field(
        "", description="Name under which clients ask for the model; empty: the target's."
    )
    strategy: str = Field("", description="Draft strategy of AUTO; empty: the draft's default.")
    k: int = Field(
        16, ge=0, le=MAX_DRAFT_TOKENS, description="The most draft tokens a round under AUTO; as many as pay."
    )
    max_sessions: int = Field(
        64, ge=1, description="Open streams; more are refused. No more than the target keeps sessions."
    )
    api_keys_file: str = Field(
        "",
        description="File of API keys and limits (docs/operate/principals.md). Without it and an issuer of "
        "tokens everyone is the same caller.",
    )
    credit: int = Field(
        32, ge=0, description="Tokens that the target may confirm unasked; 0: it is asked for each round."
    )
    buffer: int = Field(256, ge=1, description="Tokens a session may be ahead of its client.")
    store_timeout_s: float = Field(10.0, gt=0, description="How long streams wait for the store.")
    target_timeout_s: float = Field(
        10.0, gt=0, description="How long streams wait for a target that refuses, fails or is away."
    )
    hedge_quantile: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="A first verdict later than this share of those before it is asked of a second target "
        "of the build that holds the prompt; 0: never.",
    )
    draft_timeout_s: float = Field(0.5, gt=0, description="How long a round waits for the draft.")
    client_timeout_s: float = Field(
        60.0, gt=0, description="How long a client may leave its stream unread before it ends, resumable."
    )
    round_spans: Literal["all", "slow", "none"] = Field(
        "all", description="Which rounds of a traced request become spans (docs/observe/telemetry.md)."
    )
    trace_content: bool = Field(
        False, description="Whether traces hold prompts, answers and stop strings. Nothing else ever does."
    )
    startup_timeout_s: float = Field(120.0, gt=0, description="How long to wait for a target at start.")
    session_ttl_s: float = Field(SESSION_TTL_S, gt=0, description="How long an idle session is kept.")
    finished_ttl_s: float = Field(FINISHED_TTL_S, gt=0, description="How long a finished session is kept.")
    id_secret: SecretStr = Field(
        SecretStr(""),
        description="Key of the HMAC that makes session ids of idempotency keys; the same at all gateways. "
        "By environment or by file.",
    )
    id_secret_file: str = Field("", description="File that holds it instead.")
    max_connection_age_s: float = Field(
        600.0,
        ge=0,
        description="Age at which a connection takes no more calls, in seconds, so that clients find new "
        "gateways. Open streams continue. 0 sets no limit.",
    )

    def server_limits(self) -> ServerLimits:
        """Return the limits of this server; connections without calls close after 15 minutes."""
        return replace(
            super().server_limits(),
            max_connection_age_s=self.max_connection_age_s,
            max_connection_idle_s=_CONNECTION_IDLE_S,
        )

    @model_validator(mode="after")
    def _peer_tls_is_whole(self) -> Self:
        if bool(self.peer_cert_file) != bool(self.peer_key_file):
            raise ValueError("--peer-cert-file and --peer-key-file go together")
        for name in ("peer_cert_file", "target_tls_name", "draft_tls_name"):
            if getattr(self, name) and not self.peer_ca_file:
                raise ValueError(f"--{name.replace('_', '-')} needs --peer-ca-file")
        return self
