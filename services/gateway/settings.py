"""Settings of the gateway: flags, or GALLEY_GATEWAY_* in the environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, Self

from pydantic import Field, SecretStr, model_validator

from galley.common.config.defaults import DEFAULT_MODEL
from galley.common.config.settings import ServerLimits, settings_config
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it
from galley.core.store import FINISHED_TTL_S, SESSION_TTL_S
from services.gateway.auth.settings import JWT_LEEWAY_S, TokenSettings

MAX_DRAFT_TOKENS = 64
"""The largest number of draft tokens in a round; targets and drafts have limits of their own."""
_CONNECTION_AGE_S = 600.0
_CONNECTION_IDLE_S = 900.0
NO_DRAFT = "none"
"""The value of `draft` for no drafts."""


class Tuning(NamedTuple):
    """Values that operators need not change; tests and measurements do."""

    window: int = 64
    """Tokens that a session may be ahead of its log."""
    verify_timeout_s: float = 120.0
    """Longest time for one verification, the prefill of a long prompt included."""
    strategy: str = ""
    """Draft strategy in mode AUTO; empty means the draft's default."""
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
        description="Target addresses, host:port, comma-separated. Empty: the targets in the registry.",
    )
    draft: str = Field(
        "",
        description="Draft addresses, host:port, comma-separated. Empty: the drafts in the registry. "
        "`none`: no drafts.",
    )
    redis_url: RedisUrlSetting = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="Session store: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// "
        "(docs/operate/redis.md); with a password, by environment or by file.",
    )
    redis_url_file: str = Field("", description="File that holds the value of --redis-url.")
    redis_wait_replicas: int = Field(
        0, ge=0, description="Redis replicas that must have a commit before its tokens are sent. 0: none."
    )
    peer_ca_file: str = Field(
        "",
        description="PEM file of authorities for targets and drafts, which are then called over TLS. "
        "Empty: no TLS.",
    )
    peer_cert_file: str = Field(
        "", description="PEM file of the certificate that targets and drafts are shown."
    )
    peer_key_file: str = Field("", description="PEM file of the key of --peer-cert-file.")
    target_tls_name: str = Field(
        "", description="Name that certificates of targets must have. Empty: the host of the address."
    )
    draft_tls_name: str = Field(
        "", description="Name that certificates of drafts must have. Empty: the host of the address."
    )
    model: str = Field(DEFAULT_MODEL, description="Model whose tokenizer is loaded: a directory or a hub id.")
    model_name: str = Field("", description="Name of the model for clients. Empty: the target's.")
    k: int = Field(
        16,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="Most draft tokens a round in mode AUTO, which uses as many as pay.",
    )
    max_sessions: int = Field(
        64,
        ge=1,
        description="Most open streams; further ones are rejected. At most as many as the targets keep "
        "sessions.",
    )
    api_keys_file: str = Field(
        "",
        description="Principals file with API keys and limits (docs/operate/principals.md). Empty, and no "
        "JWT issuer: all callers are one principal.",
    )
    credit: int = Field(
        32,
        ge=0,
        description="Tokens that the target may decode without a new request. 0: one request a round.",
    )
    buffer: int = Field(256, ge=1, description="Most tokens that a session may be ahead of its client.")
    store_timeout_s: float = Field(
        10.0, gt=0, description="Longest time that streams wait for the store, in seconds."
    )
    target_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Longest time that streams wait for a target that rejects, fails or is missing, in "
        "seconds.",
    )
    hedge_quantile: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Quantile of response times after which a first verification is also sent to a second "
        "target that caches the prompt. 0: never.",
    )
    draft_timeout_s: float = Field(
        0.5, gt=0, description="Longest time that a round waits for the draft, in seconds."
    )
    client_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Longest time that a client may leave its stream unread, in seconds. The stream then "
        "ends and can be resumed.",
    )
    round_spans: Literal["all", "slow", "none"] = Field(
        "all", description="Rounds of a traced request that become spans (docs/observe/telemetry.md)."
    )
    trace_content: bool = Field(False, description="Include prompts, answers and stop strings in traces.")
    startup_timeout_s: float = Field(
        120.0, gt=0, description="Longest time to wait for a target and the store at start, in seconds."
    )
    session_ttl_s: float = Field(
        SESSION_TTL_S, gt=0, description="Time for which an idle session is kept, in seconds."
    )
    finished_ttl_s: float = Field(
        FINISHED_TTL_S, gt=0, description="Time for which a finished session is kept, in seconds."
    )
    id_secret: SecretStr = Field(
        SecretStr(""),
        description="HMAC key that derives session ids from idempotency keys, the same at all gateways. "
        "Set it by environment or file.",
    )
    id_secret_file: str = Field("", description="File that holds the value of --id-secret.")

    def server_limits(self) -> ServerLimits:
        """Return the limits of this server.

        Connections without calls close after 15 minutes. After 10 minutes a connection takes no more calls,
        so that clients find new gateways; its open streams continue.
        """
        return replace(
            super().server_limits(),
            max_connection_age_s=_CONNECTION_AGE_S,
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
