"""Settings of the gateway: flags, or GALLEY_GATEWAY_* in the environment."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from galley.common.config.settings import OFF, ServerLimits, ServiceSettings, settings_config
from galley.common.models.files import DEFAULT_MODEL
from galley.common.redis.url import RedisUrlSetting  # pydantic reads it
from galley.common.registry.leases import DEFAULT_POOL
from galley.common.registry.registration import PoolSetting  # pydantic reads it
from galley.core.hints import MAX_DRAFT_TOKENS
from galley.core.store import FINISHED_TTL_S, SESSION_TTL_S
from galley.core.versions.split import MAX_SHARE
from galley.core.versions.state import check_share, check_version

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric signatures only: "none" signs nothing, and whoever can verify an HMAC can forge it."""

JWT_LEEWAY_S = 30.0
_NEEDS_ISSUER = ("jwt_audience", "jwt_jwks_file", "jwt_jwks_url", "jwt_ca_file")

_CONNECTION_AGE_S = 600.0
_CONNECTION_IDLE_S = 900.0
_MAX_FIELDS = 1 << 14
"""Of a request above 64 KiB; the largest that is served has some 7,000."""
_MAX_NUMBERS_BYTES = (3 << 18) + 4096
"""As many as 262,144 token ids have; parsing them takes 3 ms, or 5 ms if each has one byte."""
MOST_LEARN_TOKENS = 10_000_000
"""40 MB of Redis for each principal."""
NO_DRAFT = "none"
"""The value of `draft` for no drafts."""


class Tuning(NamedTuple):
    """Values that only tests and measurements change."""

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


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part for one in text.split(",") if (part := one.strip()))


def check_https(url: str) -> str:
    """Return `url`. Raise ValueError unless it is empty or https without user name and password."""
    if not url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may hold the credentials
        raise ValueError("must be an https:// URL") from None
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError("must be an https:// URL")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user name or password")
    return url


def _target_models(text: str) -> str:
    for entry in comma_separated(text):
        name, at, digest = entry.partition("@")
        if not name or (at and not re.fullmatch("[0-9a-f]{32}", digest)):
            raise ValueError(f"must be NAME or NAME@DIGEST with 32 hex digits, got {entry!r}")
    return text


def _algorithms(text: str) -> str:
    names = comma_separated(text)
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise ValueError(f"must be some of {', '.join(ALGORITHMS)}, got {unknown[0]!r}")
    if not names:
        raise ValueError(f"must be some of {', '.join(ALGORITHMS)}, got none")
    return text


def _draft_split(text: str) -> str:
    if text:
        try:
            split_setting(text)
        except ValueError:
            raise ValueError(f"must be VERSION=SHARE, at most {MAX_SHARE}, got {text!r}") from None
    return text


def split_setting(text: str) -> tuple[str, float]:
    """Return the version and the share of a `draft_split`. Raise ValueError."""
    version, _, share = text.partition("=")
    return check_version(version), check_share(float(share))


def _origins(text: str) -> str:
    for origin in comma_separated(text):
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ValueError(f"must be * or scheme://host[:port], got {origin!r}")
    return text


class TokenSettings(ServiceSettings):
    """Accepted signed tokens (JWT, docs/operate/principals.md); without an issuer, none."""

    jwt_issuer: str = Field(
        "", description="Token issuer, exactly as in `iss`. Empty: tokens are not accepted."
    )
    jwt_audience: str = Field("", description="Accepted audiences (`aud`), comma-separated.")
    jwt_jwks_file: str = Field("", description="JWKS file with the issuer's keys; reloaded when it changes.")
    jwt_jwks_url: Annotated[str, AfterValidator(check_https)] = Field(
        "",
        description="URL (https) of the issuer's JWKS. Empty, and no file: from its OpenID configuration.",
    )
    jwt_ca_file: str = Field(
        "", description="PEM file of authorities for the issuer's host. Empty: the system's."
    )
    jwt_algorithms: Annotated[str, AfterValidator(_algorithms)] = Field(
        "RS256,ES256", description="Accepted signature algorithms, comma-separated."
    )
    jwt_principal_claim: str = Field("sub", min_length=1, description="Claim that names the principal.")

    @model_validator(mode="after")
    def _tokens_fit_together(self) -> Self:
        if not self.jwt_issuer:
            if useless := [name for name in _NEEDS_ISSUER if getattr(self, name)]:
                raise ValueError(f"{useless[0]}: must be empty without jwt_issuer")
            return self
        if not comma_separated(self.jwt_audience):
            raise ValueError(
                "jwt_audience: required with jwt_issuer; without it, tokens issued for other services would "
                "be accepted"
            )
        if self.jwt_jwks_file and self.jwt_jwks_url:
            raise ValueError("jwt_jwks_url: must be empty if jwt_jwks_file is set")
        if not (self.jwt_jwks_file or self.jwt_jwks_url):
            try:
                check_https(self.jwt_issuer)
            except ValueError as error:
                raise ValueError(
                    f"jwt_issuer: {error}, unless jwt_jwks_file or jwt_jwks_url is set"
                ) from None
        return self


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
    pool: PoolSetting = Field(
        DEFAULT_POOL,
        description="Name of the pool whose replicas and sessions are used. Deployments that share a Redis "
        "need names of their own.",
    )
    redis_wait_replicas: int = Field(
        0, ge=0, description="Redis replicas that must have a commit before its tokens are sent. 0: none."
    )
    peer_ca_file: str = Field(
        "",
        description="PEM file of authorities for targets and drafts, which are then called over TLS. "
        "Empty: no TLS.",
    )
    peer_cert_file: str = Field(
        "", description="PEM file of the certificate that the gateway presents to targets and drafts."
    )
    peer_key_file: str = Field("", description="PEM file of the key of --peer-cert-file.")
    target_tls_name: str = Field(
        "", description="Name that certificates of targets must have. Empty: the host of the address."
    )
    draft_tls_name: str = Field(
        "", description="Name that certificates of drafts must have. Empty: the host of the address."
    )
    http_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="Port of the OpenAI-compatible HTTP API (docs/http.md). 0 lets the system choose, -1 "
        "opens none.",
    )
    http_cors_origins: Annotated[str, AfterValidator(_origins)] = Field(
        "",
        description="Origins of web pages that may use the HTTP API, comma-separated, such as "
        "https://chat.example.com; * allows all. Empty: pages of the gateway itself only.",
    )
    page: bool = Field(
        default=True, description="Serve a page for people at `/` of the HTTP port (docs/http.md)."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Sampling of requests that leave it to the model, as those of HTTP, the Python client "
        "and the galley command do: that of the model's own generation_config.json, or none: temperature 1. "
        "Its max_new_tokens is the default of max_tokens, else 512.",
    )
    strict_parameters: bool = Field(
        False, description="Refuse HTTP requests with unknown parameters. Off: ignore these with a warning."
    )
    model: str = Field(DEFAULT_MODEL, description="Model whose tokenizer is loaded: a directory or a hub id.")
    control_tokens_in_messages: bool = Field(
        False,
        description="Read control tokens that a message of a chat spells out as such, as transformers does. "
        "Off: they are plain text (docs/security.md).",
    )
    model_name: str = Field("", description="Name of the model for clients. Empty: the target's.")
    target_models: Annotated[str, AfterValidator(_target_models)] = Field(
        "",
        description="Models that targets may serve, comma-separated: NAME, or NAME@DIGEST for these weights "
        "only, as targets log them. Empty: that of --model. Other targets are refused "
        "(docs/operate/upgrade.md).",
    )
    k: int = Field(
        16,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="Most draft tokens a round in mode AUTO, which uses as many as pay.",
    )
    max_sessions: int = Field(
        64,
        ge=1,
        description="Most open streams; further ones are rejected. Should not exceed the sum of the targets' "
        "--max-sessions.",
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
        "seconds. Where none responds, each silent one is waited for 120 s instead.",
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
    draft_split: Annotated[str, AfterValidator(_draft_split)] = Field(
        "",
        description="Version of the draft that begins a trial, and its share of the sessions, at most 0.5: "
        "VERSION=SHARE. It takes the place of a trial that this flag of another gateway began before this "
        "gateway started. No trial begins of a version that was promoted, rolled back or drained, or while "
        "another is on trial otherwise. Empty: none.",
    )
    client_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Longest time that a client may leave its stream unread, in seconds. The stream then "
        "ends and can be resumed.",
    )
    audit_ratio: float = Field(
        0.001,
        ge=0,
        le=1,
        description="Share of finished sessions that are computed again in idle time and compared with their "
        "token logs (docs/operate/audit.md). 0: none.",
    )
    round_spans: Literal["all", "slow", "none"] = Field(
        "all", description="Rounds of a traced request that become spans (docs/observe/telemetry.md)."
    )
    trace_content: bool = Field(False, description="Include prompts, answers and stop strings in traces.")
    usage_by_principal: bool = Field(
        False, description="Name callers in the metric galley.usage.tokens; else it holds their kind."
    )
    learn_tokens: int = Field(
        0,
        ge=0,
        le=MOST_LEARN_TOKENS,
        description="Most tokens of finished sessions that are kept for each principal, to train drafts on "
        "(docs/operate/learning.md). Only principals that allow it have any. 0: no session is kept.",
    )
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
        description="HMAC key that derives session ids from idempotency keys and the salts of caches, the "
        "same at all gateways. Set it by environment or file. Empty: a random one of this process.",
    )
    id_secret_file: str = Field("", description="File that holds the value of --id-secret.")

    @property
    def collects_metrics(self) -> bool:
        return super().collects_metrics or self.http_port != OFF

    def server_limits(self) -> ServerLimits:
        """Return the limits of this server.

        Connections without calls close after 15 minutes. After 10 minutes a connection takes no more calls,
        so that clients find new gateways; its open streams continue.
        """
        return replace(
            super().server_limits(),
            max_connection_age_s=_CONNECTION_AGE_S,
            max_connection_idle_s=_CONNECTION_IDLE_S,
            max_message_fields=_MAX_FIELDS,
            max_numbers_bytes=_MAX_NUMBERS_BYTES,
        )

    @model_validator(mode="after")
    def _peer_tls_is_whole(self) -> Self:
        if bool(self.peer_cert_file) != bool(self.peer_key_file):
            raise ValueError("--peer-cert-file: must be set together with --peer-key-file, got only one")
        for name in ("peer_cert_file", "target_tls_name", "draft_tls_name"):
            if getattr(self, name) and not self.peer_ca_file:
                raise ValueError(f"--{name.replace('_', '-')}: must be empty without --peer-ca-file")
        return self
